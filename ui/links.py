"""Links from a finding to the requests and steps behind it. A link holds its filter, so that it can be shared."""

from typing import NamedTuple

import streamlit as st

from sojourn.diagnosis.verdict import Finding
from sojourn.ui.filters import MOST_IDS, SERVED, RunFilter, missed_by
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.request import accounts_ms
from sojourn.ui.text import markdown

SERVER_PAGES = ("overview", "diagnose", "requests", "steps", "memory", "compute")  # that read steps
HAD_LATENCY = ("ok", "cancelled")
LARGE_SHARE = 0.3  # of a request's time in one account: the account is what the request suffers from


class Link(NamedTuple):
    label: str
    page: str  # a name of PAGES
    query: dict[str, str]
    icon: str


def links_of(run: RunData, found: Finding) -> list[Link]:
    """To all requests that miss the objective, to those with much time in one account, and to the worst steps."""
    if run.requests.empty:
        return []
    objectives = run.meta.get("objectives") or []
    missed, klass = missed_by(found.objective)
    if klass not in set(run.requests.klass.fillna("")):
        klass = ""
    # A finding about a latency counts those that had one, and those whose clients gave up waiting for it.
    statuses = () if missed in ("", SERVED) else tuple(each for each in HAD_LATENCY if each in set(run.requests.status))
    all_late = RunFilter(klasses=(klass,) if klass else (), statuses=statuses, missed=missed)
    late = all_late.requests(run.requests, objectives, run.begin_ns)
    links = []
    if missed and len(late):
        what = "were not served" if missed == SERVED else f"were answered and miss {found.objective}"
        links.append(_requests(run, f"{len(late):,} requests that {what}", all_late))
    ids = tuple(found.request_ids)[:MOST_IDS]
    if ids:
        links.append(_requests(run, f"{len(ids)} requests that show it worst", RunFilter(ids=ids)))
    until = "ttft" if missed == "ttft_ms" else "ledger"
    if (account := _largest_account(late, until)) is not None:
        narrow = RunFilter(
            klasses=(klass,) if klass else (), statuses=statuses, missed=missed, account=account,
            min_share=LARGE_SHARE, until=until,
        )  # fmt: skip
        if count := len(narrow.requests(run.requests, objectives, run.begin_ns)):
            links.append(_requests(run, f"{count:,} of them with much time in {account}", narrow))
    if (steps := _steps(run, found, late, missed)) is not None:
        label = f"steps {steps.first:,} to {steps.last:,}"
        links.append(Link(label, "steps", {"run": run.name, **steps.query()}, ":material/stacked_bar_chart:"))
    return links


def show(links: list[Link], key: str) -> None:
    """The links side by side, each to a page of the app."""
    if not links:
        return
    with st.container(horizontal=True, gap="small", key=key):
        for link in links:
            st.page_link(f"views/{link.page}.py", label=markdown(link.label), icon=link.icon, query_params=link.query)


def servers(run: RunData, page: str = "overview") -> list[Link]:
    """To the runs of a fleet's servers; [] of a run of one server."""
    if run.fleet is None:
        return []
    return [
        Link(replica.name, page, {"run": f"{run.name}/{replica.name}"}, ":material/dns:")
        for replica in run.fleet.replicas
    ]


def show_servers(run: RunData) -> None:
    """For each server of a fleet, links to the pages that need its steps."""
    for link in servers(run):
        with st.container(horizontal=True, gap="small", vertical_alignment="center", key=f"server-{link.label}"):
            st.markdown(f"**{markdown(link.label)}**", width="content")
            for page in SERVER_PAGES:
                st.page_link(f"views/{page}.py", label=page.capitalize(), query_params=link.query)


def _requests(run: RunData, label: str, chosen: RunFilter) -> Link:
    return Link(label, "requests", {"run": run.name, **chosen.query()}, ":material/view_timeline:")


def _largest_account(late, until: str) -> str | None:
    booked = accounts_ms(late, until)
    sums = booked.sum()
    return None if booked.empty or sums.sum() <= 0 else str(sums.idxmax())


def _steps(run: RunData, found: Finding, late, missed: str) -> RunFilter | None:
    """The worst stretch that the finding names, or the steps of its slowest request."""
    if not run.has_steps:
        return None
    if (named := found.steps) is not None:
        return RunFilter(first=named[0], last=named[1])
    known = late[late.first_step.notna()] if len(late) else late
    latency_ms = known[missed if missed in known else "e2e_ms"].astype("float64") if len(known) else known
    if known.empty or latency_ms.isna().all():  # requests that failed have no latency
        return None
    worst = known.loc[latency_ms.idxmax()]
    return RunFilter(first=int(worst.first_step), last=int(worst.last_step))
