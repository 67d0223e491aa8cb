"""The HTML file of a report: one page that loads nothing from a network."""

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from plotly.offline import get_plotlyjs

from sojourn.ui.drawings import Drawing
from sojourn.ui.markup.fragments import CSS_FILE
from sojourn.ui.text import prose, safe, split_source
from sojourn.ui.theme import CONFIG, DARK, DARK_CSS, DARK_PAPER, FONT

VALUES = '<details class="sj sj-values"><summary>The values as a table</summary></details>'
SCRIPTS = ("plots.js", "values.js")
_places = count()

PAGE_CSS = """
body { font-family: %s; color: #1F2933; margin: 0 auto; max-width: 1180px; padding: 28px 32px; font-size: 15px; }
h1 { font-size: 1.6rem; margin: 0 0 0.9rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 0.7rem; }
h3 { font-size: 1.02rem; margin: 1.3rem 0 0.3rem; }
p.caption { color: #5F6B7A; font-size: 0.8rem; margin: 0.2rem 0 1rem; }
nav { display: flex; gap: 1.2rem; margin: 1rem 0; font-size: 0.88rem; flex-wrap: wrap; } nav a { color: #0072B2; }
details.sj-values { margin: -0.6rem 0 1.2rem; } details.sj-values summary { font-size: 0.8rem; cursor: pointer;
 color: var(--sj-muted); } details.sj-values > div { max-height: 26rem; overflow: auto; }
details.sj-values caption { text-align: left; font-size: 0.8rem; color: var(--sj-muted); padding: 0.3rem 0; }
.figure { break-inside: avoid; } .sj { margin-bottom: 0.6rem; }
@media screen and (prefers-color-scheme: dark) {
body { color: #E6EAEE; background: #11161C; } nav a, a { color: #6CB6E8; } p.caption { color: #9AA5B1; }
%s}
@media print { body { max-width: none; padding: 0; print-color-adjust: exact; }
.sj table.sj-table { font-size: 0.75rem; } .sj table.sj-table .sj-id { white-space: normal; }
 .sj table.sj-table td { overflow-wrap: break-word; padding-right: 0.5rem; }
 nav, details.sj-values:not([open]) { display: none; } h2, h3 { break-after: avoid; } }
"""


def document(title: str, body: str) -> str:
    """The whole page; `body` is HTML."""
    css = CSS_FILE.read_text(encoding="utf-8") + PAGE_CSS % (FONT, DARK_CSS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{css}</style></head><body><h1>{safe(title)}</h1>{body}"
        f'<script type="text/plain" id="sojourn-plotly">{get_plotlyjs()}</script>'
        f"{as_json('sojourn-dark', {'ink': DARK, 'paper': DARK_PAPER, 'config': CONFIG})}"
        f"<script>{''.join(map(_script, SCRIPTS))}</script></body></html>"
    )


def _script(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def caption(text: str) -> str:
    words, source = split_source(text)
    mark = f' <abbr title="{safe(source.replace("`", ""))}">source</abbr>' if source else ""
    return f'<p class="caption">{prose(words)}{mark}</p>'


def figure(drawing: Drawing, heading: str = "h3") -> str:
    """A figure below its heading; none for an empty title."""
    title = f"<{heading}>{safe(drawing.title)}</{heading}>" if drawing.title else ""
    name, height = f"sojourn-plot-{next(_places)}", drawing.figure.layout.height or 450
    data = drawing.figure.to_json().replace("<", "\\u003c")
    return (
        f'{title}<div class="figure sj-plot"><div class="plotly-graph-div" id="{name}" style="height:{height}px"></div>'
        f'<script type="application/json">{data}</script></div>{caption(drawing.caption)}'
        f"{VALUES if drawing.figure.data else ''}"
    )


def as_json(name: str, content: Any) -> str:
    """Data in the page. No text of a run can end the element."""
    text = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
