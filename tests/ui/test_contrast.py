"""Text can be read on what it stands on, in both themes: 4.5 to 1 at least (WCAG 2.2, level AA)."""

import re
import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.colors import sample_colorscale, unlabel_rgb

from sojourn.metrics.ledger import COLOURS
from sojourn.ui import theme
from sojourn.ui.figures import blame, compute, memory
from sojourn.ui.markup import fragments
from tests.ui.test_figures import figures

LEAST = 4.5
UI = Path(theme.__file__).parent
CSS = (UI / "style.css").read_text()
# Which ink of style.css stands on which paper; --sj-line is the paper of a badge.
INKS_ON = {
    "paper": ("ink", "text", "muted", "good", "warn", "bad", "accent"),
    "soft": ("ink", "text", "muted", "good", "warn", "bad", "accent"), "line": ("text",), "leads": ("on-leads",),
    "accent": ("paper",), "primary": ("on-primary",),
}  # fmt: skip


def contrast(ink: str, paper: str) -> float:
    light, dark = sorted((theme.luminance(ink), theme.luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"--sj-([\w-]+): (#[0-9A-Fa-f]{6})", css))


THEMES = {"light": variables(CSS), "dark": variables(CSS) | variables(theme.DARK_CSS)}


@pytest.mark.parametrize("name", THEMES)
def test_every_ink_of_the_style_can_be_read_on_its_papers(name):
    found = {
        (ink, paper): contrast(THEMES[name][ink], THEMES[name][paper])
        for paper, inks in INKS_ON.items() for ink in inks
    }  # fmt: skip
    assert {pair: round(value, 2) for pair, value in found.items() if value < LEAST} == {}


def test_every_ink_of_the_style_is_judged_above():
    """A rule names a variable that is judged, or what the element's colour sets; none has a colour of its own."""
    rules = re.sub(r":root \{ --sj-ink.*", "", CSS)
    inks = re.findall(r"(?<![\w-])color: ([^;}]+)", rules)
    judged = {f"var(--sj-{ink})" for inks in INKS_ON.values() for ink in inks}
    assert set(inks) <= judged | {"var(--state)"}
    assert not re.findall(r"opacity: 0", rules)  # it would take contrast from all text within
    colours = {*theme.STATE_COLOURS.values(), *fragments.STATUS_COLOURS.values()}
    assert colours <= judged | {"var(--sj-line-bold)"}  # a dot is no text


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_of_the_app_can_be_read(name):
    of_app = tomllib.loads((UI / ".streamlit" / "config.toml").read_text())["theme"][name]
    papers = [of_app["backgroundColor"], of_app["secondaryBackgroundColor"]]
    inks = [of_app["textColor"], of_app["linkColor"], of_app["codeTextColor"]]
    assert min(contrast(ink, paper) for ink, paper in product(inks, papers)) >= LEAST
    assert THEMES[name]["primary"] == of_app["primaryColor"]  # of a button; its label is judged above


def test_labels_of_bars_can_be_read_on_every_colour_of_the_data():
    colours = {*COLOURS.values(), *theme.ACCOUNT_COLOURS.values(), *theme.KIND_COLOURS.values(),
               *theme.STAGE_COLOURS.values(), *theme.BLOCK_COLOURS.values(), *theme.REFUSAL_COLOURS.values(),
               *theme.COHORT_COLOURS, *memory.OUTCOME_COLOURS.values(), *compute.PART_COLOURS.values()}  # fmt: skip
    assert min(contrast(theme.ink_on(colour), colour) for colour in colours) >= LEAST
    assert min(contrast(theme.ink_on(f"#{grey:02x}{grey:02x}{grey:02x}"), f"#{grey:02x}{grey:02x}{grey:02x}")
               for grey in range(256)) >= LEAST  # fmt: skip


def inside_labels(fig: go.Figure) -> list[tuple[str, str]]:
    """Ink and colour of each label within a bar."""
    return [
        (bar.insidetextfont.color or bar.textfont.color, bar.marker.color)
        for bar in fig.data
        if bar.type == "bar" and bar.textposition in ("inside", "auto") and bar.text is not None and any(bar.text)
    ]


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_of_figures_can_be_read(chat, is_dark):
    paper = theme.DARK_PAPER if is_dark else theme.PAPER
    labelled = 0
    for name, light in figures(chat).items():
        fig = theme.in_the_dark(light) if is_dark else light
        for ink, colour in inside_labels(fig):
            labelled += 1
            assert contrast(ink, colour) >= LEAST, (name, ink, colour)
            assert colour not in theme.DARK, name  # the ink would stay, and the colour would not
        template = fig.layout.template.layout
        inks = [template.font.color, template.xaxis.title.font.color, template.xaxis.tickfont.color]
        assert min(contrast(ink, paper) for ink in inks) >= LEAST, name
    assert labelled > 5


def test_labels_of_a_blame_matrix_can_be_read_on_their_cells():
    shares = np.linspace(0, 1, 101)
    for share, cell in zip(shares, sample_colorscale(blame.HEAT_SCALE, shares), strict=True):
        paper = "#" + "".join(f"{round(part):02x}" for part in unlabel_rgb(cell))
        assert contrast(blame._ink(share), paper) >= LEAST
