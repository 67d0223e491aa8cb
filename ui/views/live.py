"""Live: what servers suffer from now, by their own metrics, refreshed each second."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import streamlit as st

from sojourn.live.watch import profile
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.fetch import base_of
from sojourn.live.watch.percentiles import OVER_S, POINT_S
from sojourn.live.watch.recorded import record
from sojourn.live.watch.watcher import Watcher
from sojourn.metrics.errors import InputError, RunDataError, ServerError
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL, parse_bounds
from sojourn.ui.figures import live as figures
from sojourn.ui.markup import fragments
from sojourn.ui.markup import live as markup
from sojourn.ui.page import draw, stop_with, style
from sojourn.ui.text import markdown

UNASKED_S = 120.0  # without a reader a watch ends
SHOWN_CHANGES = 8
HISTORY = f"Histograms of `/metrics` over {OVER_S:g} s, one point every {POINT_S:g} s; up to ten minutes."
READ_ONLY = "this app was started with `sojourn ui --read-only`"

style()
st.title("Live", anchor=False)
st.markdown("What servers suffer from now, by their own metrics. No load is sent.")
with st.expander("How to read this page"):
    st.markdown(
        "The page reads `/metrics` once per second and judges the **last 60 s**, as `sojourn watch` does. It knows "
        "sums and histograms over all requests that ended meanwhile, and no single request. A verdict is shown once it "
        "has stood for 5 s. **Cannot tell**: time is lost, and no metric says why; the page names the setting that "
        "would show it. Goodput needs objectives; tokens by objectives are counted by Sojourn's server alone. "
        "Without objectives time counts as lost where requests take twice what their own work takes. The address keeps "
        "the servers and the objectives."
    )


@st.cache_resource(max_entries=8)
def watchers() -> dict[tuple[str, str], Watcher]:
    """Running watches by addresses and objectives; all readers of the app share them."""
    return {}


def watcher_of(urls: str, slo: str) -> Watcher:
    """Raises InputError."""
    known = watchers()
    for key in [key for key, each in known.items() if each.is_over]:
        del known[key]
    if (urls, slo) not in known:
        known[urls, slo] = Watcher(urls.split(), _bounds(slo), unasked_s=UNASKED_S).start()
    return known[urls, slo]


def _bounds(slo: str) -> Mapping[str, float]:
    try:
        return parse_bounds(slo, WHAT_SERVERS_TELL) if slo.strip() else {}
    except ValueError as error:
        raise InputError(str(error)) from None


def is_here(urls: str) -> bool:
    """Whether all addresses are of this host: a link may name them, and nobody else learns that it was opened."""
    hosts = [urlsplit(base_of(url)).hostname or "" for url in urls.split()]
    return all(host == "localhost" or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


with st.form("servers", border=False):
    left, middle, right = st.columns([5, 3, 1.6], vertical_alignment="bottom")
    urls = left.text_input(
        "Servers", value=st.query_params.get("url", ""), placeholder="http://127.0.0.1:8000",
        help="addresses of servers (ours, vLLM, SGLang …), or of a Prometheus that scrapes them; several: with blanks",
    )  # fmt: skip
    slo = middle.text_input(
        "Objectives (ms)",
        value=st.query_params.get("slo", ""),
        placeholder="ttft:500 tpot:50",
        help="a bound in ms for each latency that has one: ttft, tpot, e2e",
    )
    if right.form_submit_button("Watch", type="primary", width="stretch"):
        st.session_state.watched = (urls, slo)
        st.query_params.update({name: value for name, value in (("url", urls), ("slo", slo)) if value})
if not urls.split():
    stop_with("Enter a server address, for example `http://127.0.0.1:8000`.", "monitor_heart")
try:
    if st.session_state.get("watched") != (urls, slo) and not is_here(urls):
        stop_with("The address in this link is not of this host. Press **Watch** to read its metrics.", "link")
    watcher = watcher_of(urls, slo)
except InputError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()


def chosen(servers: list[WatchedServer]) -> WatchedServer:
    """Of several servers the one that the reader chose; else the first in the worst state."""
    names = [each.name for each in servers]
    kept = st.session_state.get("server")
    return servers[names.index(kept)] if kept in names else servers[0]


def act(server: WatchedServer) -> None:
    """The two buttons."""
    why_not = READ_ONLY if st.session_state.is_read_only else ""
    no_profile = why_not or ("" if profile.can_profile(server.source) else profile.ONLY_OURS)
    with st.container(horizontal=True, gap="small", key="actions"):
        is_recorded = st.button(
            "Record this", icon=":material/fiber_manual_record:", disabled=bool(why_not), key="record",
            help=why_not or "writes the scrapes of the window as a run",
        )  # fmt: skip
        is_profiled = st.button(
            f"Profile {profile.STEPS} steps", icon=":material/timer:", disabled=bool(no_profile), key="profile",
            help=no_profile or "what the device does in the next steps",
        )  # fmt: skip
    try:
        if is_recorded:
            path = record(watcher.observer(server.name), st.session_state.runs_folder)
            st.session_state.acted = ("recorded", str(path))
        if is_profiled:
            with st.spinner(f"profiling the next {profile.STEPS} steps"):
                st.session_state.acted = ("profiled", profile.profile(server.url))
    except (RunDataError, ServerError) as error:
        st.session_state.acted = ("failed", str(error))


def show_result() -> None:
    """What came of the last click."""
    what, result = st.session_state.get("acted", ("", None))
    if what == "recorded":
        st.success(f"Recorded as {markdown(result)}. `sojourn diagnose` opens it.", icon=":material/check:")
    elif what == "profiled":
        st.html(markup.profile(result))
        st.caption("What the device did in these steps; `docs/observability.md` explains the classes.")
    elif what == "failed":
        st.error(markdown(result), icon=":material/error:")


def show_latencies(server: WatchedServer) -> None:
    points = watcher.latencies().get(server.name, [])
    if server.percentiles:
        st.subheader(f"Latencies over {server.window_s:.0f} s", anchor=False)
        st.html(markup.percentiles(server))
        st.caption("A histogram knows a percentile between two bounds of its buckets, and no better.")
    left, right = st.columns([3, 2], gap="large")
    with left:
        draw("Percentiles over the last minutes", figures.percentiles(points), HISTORY)
    with right:
        if (goodput := figures.goodput(points)) is not None:
            draw("Goodput over the last minutes", goodput, HISTORY)


@st.fragment(run_every=1.0)
def show() -> None:
    if watcher.is_over:  # this page slept for so long: a new watch begins
        st.rerun()
    found = watcher.watch()
    if not found.servers:
        st.info(found.headline, icon=":material/hourglass_top:")
        return
    if len(found.servers) > 1:
        st.html(markup.servers(found))
        st.selectbox("Server", [each.name for each in found.servers], key="server")
    server = chosen(found.servers)
    act(server)
    moments = watcher.histories().get(server.name, [])
    st.html(markup.headline(server))
    st.caption(markdown(markup.about(server, found.at)))
    if server.now is not None:
        st.html(markup.tiles(server))
        draw("The last minutes", figures.history(moments), "`/metrics`, one point per scrape; up to ten minutes.")
        draw("Where a request’s time goes", figures.parts(server.parts), "Requests that ended in the window.")
        if server.met:
            st.html(markup.met(server))
        show_latencies(server)
    causes = [each for each in server.findings if each.role == "cause"]
    for place, cause in enumerate(causes, start=1):
        st.html(fragments.finding(place, cause))
    show_result()
    if server.devices:
        st.subheader("Devices, by their sensors", anchor=False)
        st.html(fragments.lines(server.devices))
    if server.unknown or server.warnings:
        st.subheader("What cannot be known from these metrics", anchor=False)
        st.html(markup.sentences([*server.unknown, *server.warnings]))
    if said := watcher.changes():
        st.subheader("What changed", anchor=False)
        st.html(markup.changes(said[-SHOWN_CHANGES:]))


show()
