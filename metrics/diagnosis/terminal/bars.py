"""Bars and tables of the terminal's reports."""

from rich import box
from rich.table import Table
from rich.text import Text

BAR_CELLS = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, colour: str, cells: int = BAR_CELLS) -> Text:
    """A horizontal bar of `share` (0 to 1) of `cells` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (EIGHTHS[rest] if rest else ""), style=colour)


def ruled_table(*headings: tuple[str, str]) -> Table:
    """An empty table without a frame; a heading is its words and how its column stands."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for heading, justify in headings:
        empty.add_column(heading, justify=justify, header_style="dim")
    return empty
