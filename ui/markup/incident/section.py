"""The moving parts as HTML: the data of a run, the place for them, and the script that draws them."""

from importlib.resources import files

import msgspec

from sojourn.ui.markup.document import as_json
from sojourn.ui.markup.incident.payload import MOST_REQUESTS, payload
from sojourn.ui.markup.incident.summary import markdown_summary
from sojourn.ui.run_data import RunData
from sojourn.ui.text import safe

SCRIPTS = ("judge.js", "timeline.js", "page.js")


def moving_parts(run: RunData, other: RunData | None = None) -> str:
    """Objectives to move, and the timeline, that of `other` beside it; a sentence in place of what is too large for a
    page."""
    runs = [each for each in (run, other) if each is not None and each.num_requests > 0]
    note = "".join(_too_large(each) for each in runs if each.num_requests > MOST_REQUESTS)
    shown = [each for each in runs if each.num_requests <= MOST_REQUESTS]
    if not shown:
        return note
    data = "".join(map(as_json, ("sojourn-run", "sojourn-run-other"), map(payload, shown)))
    script = "".join(map(_file, SCRIPTS))
    return f"{note}<style>{_file('incident.css')}</style>{_file('incident.html')}{data}<script>{script}</script>"


def _too_large(run: RunData) -> str:
    return (
        f"<p>The run {safe(run.name)} has {run.num_requests:,} requests. A page holds at most {MOST_REQUESTS:,}: "
        "<code>sojourn ui</code> shows all of them.</p>"
    )


def for_tools(run: RunData) -> str:
    """The diagnosis as JSON, and a summary as Markdown, with a button that copies it."""
    if run.diagnosis is None:
        return ""
    summary = markdown_summary(run.name, run.diagnosis).replace("<", "&lt;")
    return (
        '<p class="sj-tools"><button id="sojourn-copy" type="button">Copy the summary as Markdown</button></p>'
        f"{as_json('sojourn-diagnosis', msgspec.to_builtins(run.diagnosis))}"
        f'<script type="text/markdown" id="sojourn-summary">{summary}</script>'
    )


def _file(name: str) -> str:
    return files("sojourn.ui.markup.incident").joinpath(name).read_text(encoding="utf-8")
