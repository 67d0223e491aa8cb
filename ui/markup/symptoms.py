"""Pieces of HTML of the page Symptoms: lifecycles as bars with reasons, objects with figures, what is ruled out."""

from sojourn.diagnosis.symptom_tree.tree import (
    STATUS_WORDS,
    Figure,
    LifecycleBranch,
    ObjectBranch,
    SymptomTree,
)
from sojourn.metrics.ledger import COLOURS
from sojourn.ui.markup.fragments import STATUS_COLOURS, chip, dot, html_table, wrap
from sojourn.ui.text import percent, prose, safe
from sojourn.ui.theme import ACCOUNT_COLOURS, ink_on

BADGES = {"leads_here": "sj-leads", "possible": "sj-possible", "unknown": "sj-unknown", "ruled_out": "sj-out"}
SHOWS = {"present": "this run shows it", "absent": "this run does not show it", "unknown": "this run alone cannot tell"}
ROUNDS_TO_NOTHING = 0.005
LABELLED = 0.12  # of the bar: room for the name of an account


def shows(status: str, reason: str) -> str:
    """Whether the run shows a symptom, below its complaint."""
    colour = STATUS_COLOURS[status]
    return wrap(
        f'<p class="sj-small sj-shows">{dot(colour)}<b>{SHOWS[status]}</b> '
        f'<span class="sj-muted">{prose(reason)}</span></p>'
    )


def badge(status: str) -> str:
    return f'<span class="sj-badge {BADGES[status]}">{STATUS_WORDS[status]}</span>'


def lifecycle(branch: LifecycleBranch, chosen: bool) -> str:
    """One lifecycle: its question, a bar of its accounts, and why it leads or is ruled out."""
    css = "sj-branch" + (" sj-greyed" if branch.status == "ruled_out" else "") + (" sj-chosen" if chosen else "")
    share = "" if branch.share is None else f'<b class="sj-share">{_whole_percent(branch)}</b>'
    return wrap(
        f'<div class="{css}" style="--lifecycle:{COLOURS[branch.lifecycle]}">'
        f"<header>{chip(branch.lifecycle)} <span>{safe(branch.asks)}</span>{badge(branch.status)}{share}</header>"
        f'{_bar(branch)}<p class="sj-small">{prose(branch.reason)}</p></div>'
    )


def _whole_percent(branch: LifecycleBranch) -> str:
    """Rounded as in the reason below it. A finding whose time stands in other accounts would read as nothing."""
    if branch.status == "leads_here" and branch.share < ROUNDS_TO_NOTHING:
        return '<span class="sj-small sj-muted">booked elsewhere</span>'
    return f"{100 * branch.share:.0f}%"


def _bar(branch: LifecycleBranch) -> str:
    if branch.share is None:
        return '<div class="sj-bar sj-nobar"></div>'
    parts = [
        f'<span style="width:{100 * min(1.0, share):.2f}%;{_ink(name)}" '
        f'title="{safe(name)} {percent(share)}">{safe(name.split(".")[-1]) if share >= LABELLED else ""}</span>'
        for name, share in branch.accounts.items()
    ]
    return f'<div class="sj-bar">{"".join(parts)}</div>'


def _ink(account: str) -> str:
    colour = ACCOUNT_COLOURS.get(account, COLOURS["client"])
    return f"background:{colour};color:{ink_on(colour)}"


def thing(each: ObjectBranch, lifecycle_name: str, chosen: bool) -> str:
    """An object that is not ruled out: question, figures, and the measurement that would tell."""
    css = "sj-branch" + (" sj-chosen" if chosen else "")
    facts = [] if each.finding is None else [f"<li><b>{prose(each.reason)}</b></li>"]
    facts += [_figure(figure) for figure in each.figures if figure.statement != each.reason or each.finding is None]
    if each.status == "unknown":
        facts = [f'<li class="sj-muted">{prose(each.reason)}</li>']
    asks = f'<p class="sj-muted">{safe(each.asks)}</p>' if each.asks else ""
    return wrap(
        f'<div class="{css}" style="--lifecycle:{COLOURS[lifecycle_name]}">'
        f"<header><b>{safe(each.name)}</b>{badge(each.status)}</header>{asks}"
        f'<ul class="sj-figures">{"".join(facts)}</ul>{measure(each.measurement, each.command)}</div>'
    )


def _figure(figure: Figure) -> str:
    bar = ""
    if figure.share is not None:
        bar = f'<span class="sj-meter"><span style="width:{100 * min(1.0, max(0.0, figure.share)):.1f}%"></span></span>'
    return f'<li>{bar}{prose(figure.statement)} <span class="sj-small sj-muted">{safe(figure.source)}</span></li>'


def measure(measurement: str, command: str) -> str:
    line = f'<code class="sj-line">{safe(command)}</code>' if command else ""
    return f'<p class="sj-measure"><b>Measure:</b> {prose(measurement)}</p>{line}'


def next_measurement(tree: SymptomTree) -> str:
    return wrap(measure(tree.next_measurement, tree.next_command)) if tree.next_measurement else ""


def listed(branches: list[ObjectBranch]) -> str:
    """A table of objects that this run rules out, or cannot know, each with its reason and its measurement."""
    rows = [
        [safe(each.name), badge(each.status), f'<span class="sj-muted">{prose(each.reason)}</span>',
         f'<span class="sj-muted">{prose(each.measurement)}</span>']
        for each in branches
    ]  # fmt: skip
    return html_table(["object", "", "because", "measure"], rows)
