"""Pictures of the pages, taken from a run in headless Chromium: `python -m sojourn.ui.screenshots runs/demo docs`.

Needs playwright and a Chromium of the system; loads nothing from a network.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from sojourn.metrics.errors import ServerError, SojournError
from sojourn.ui.launch import PAGES, app_command, unfilled_pages

START_TIMEOUT_S = 60
PAGE_TIMEOUT_MS = 60_000
POLL_MS = 120  # between two looks at whether a page still moves; plotly draws once more after a change of size
FADE_MS = 1000
WINDOW_HEIGHT_PX = 900
# What is clicked on a page before its picture is taken, as CSS: the three clicks from a complaint to its cause.
CLICKS = {
    "symptoms": tuple(f'[class*="st-key-{part}"] button' for part in ("complaint-high_ttft", "lifecycle-", "object-")),
}
CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PagePicture:
    """What one page looked like, and what went wrong on it."""

    page: str
    file: Path
    text: str
    exceptions: list[str]  # boxes that Streamlit shows for an exception
    console_errors: list[str]
    overflows: list[str]  # labels of figures that reach out of their figure
    covered: list[str]  # labels of figures that an interval or another label crosses
    cut: list[str]  # tables and texts that are wider than the place they have
    bare: list[str]  # options of the command line that stand in a sentence, without their command
    faint: list[str]  # texts that are hard to read on what is behind them
    height_px: int


def chromium() -> str | None:
    """Path of the system's Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def serving(run: Path | str) -> Iterator[str]:
    """Runs the app on a free port and gives its address. Raises ServerError if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with TemporaryFile() as log:
        process = subprocess.Popen(app_command("", run, port), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise ServerError(f"the app did not start: {log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium. Raises SojournError where there is none."""
    executable = chromium()
    if executable is None:
        raise SojournError("no Chromium was found; install Debian's package chromium")
    from playwright.sync_api import sync_playwright  # only this needs it, and the app is installed without it

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS)) as opened,
    ):
        yield opened


def take(
    run: Path | str, out: Path | str, width_px: int = 1440, pages: Iterable[str] = PAGES, is_dark: bool = False
) -> list[PagePicture]:
    """Saves `<page>.png` of each page of a run below `out`, each as high as its page is long."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    without = unfilled_pages(Path(run))
    pages = [name for name in pages if name not in without]
    with serving(run) as url, browser() as opened:
        page = opened.new_page(
            viewport={"width": width_px, "height": WINDOW_HEIGHT_PX}, color_scheme="dark" if is_dark else "light"
        )
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url, wait_until="domcontentloaded")
        return [_picture(page, name, folder / f"{name}.png", width_px, errors) for name in pages]


def _picture(page: Any, name: str, file: Path, width_px: int, errors: list[str]) -> PagePicture:
    """Goes to a page of the app by its link, and takes its picture."""
    errors.clear()
    title = page.get_by_role("heading", name=name.capitalize(), exact=True)
    link = page.get_by_test_id("stSidebarNavLink").get_by_text(name.capitalize(), exact=True)
    link.click(timeout=PAGE_TIMEOUT_MS)
    title.wait_for(timeout=PAGE_TIMEOUT_MS)
    _wait_until_still(page)
    for button in CLICKS.get(name, ()):
        if page.locator(button).count():  # a run without the symptom has nothing to follow
            page.locator(button).first.click(timeout=PAGE_TIMEOUT_MS)
            page.wait_for_timeout(2 * POLL_MS)  # until the click has reached the script
            _wait_until_still(page)
    page.set_viewport_size({"width": width_px, "height": max(WINDOW_HEIGHT_PX, page.evaluate(_HEIGHT) + 40)})
    _wait_until_still(page)
    page.screenshot(path=str(file))
    picture = PagePicture(
        page=name,
        file=file,
        text=page.inner_text('[data-testid="stMain"]'),
        exceptions=page.locator('[data-testid="stException"]').all_inner_texts(),
        console_errors=list(errors),
        overflows=page.evaluate(_OVERFLOWS),
        covered=page.evaluate(_COVERED),
        cut=page.evaluate(_CUT),
        bare=page.evaluate(_BARE),
        faint=_faint(page),
        height_px=page.evaluate(_HEIGHT),
    )
    page.set_viewport_size({"width": width_px, "height": WINDOW_HEIGHT_PX})
    return picture


def _faint(page: Any) -> list[str]:
    """Texts that are hard to read, and still so when what a click faded in has come."""
    found = page.evaluate(_FAINT)
    if found:
        page.wait_for_timeout(FADE_MS)
    return [text for text in page.evaluate(_FAINT) if text in found] if found else []


def _wait_until_still(page: Any) -> None:
    """Waits until the script of the page has run, its figures are drawn, and nothing moves any more."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=PAGE_TIMEOUT_MS)
    page.wait_for_selector('[data-testid="stSkeleton"]', state="detached", timeout=PAGE_TIMEOUT_MS)
    heights: list[int] = []
    while len(heights) < 3 or len(set(heights[-3:])) > 1:
        page.wait_for_timeout(POLL_MS)
        heights.append(page.evaluate(_HEIGHT))


_HEIGHT = "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
# Text of a figure that is drawn outside of its figure's box would be cut.
_OVERFLOWS = """
() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('text')].filter(text => {
    const at = text.getBoundingClientRect();
    return at.width > 0 && (at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1
                            || at.bottom > box.bottom + 1);
  }).map(text => text.textContent);
})
"""
# A label is read only where no line of an interval and no other label lies on it.
_COVERED = """
() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const seen = node => [node, node.getBoundingClientRect()];
  const texts = [...plot.querySelectorAll('text')].filter(text => text.textContent.trim()).map(seen)
    .filter(([_, box]) => box.width > 0);
  const lines = [...plot.querySelectorAll('.errorbar path')].map(seen).filter(([_, box]) => box.width + box.height > 0);
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > -1;
  const cross = (a, b) => meet(a, b) && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  return texts.flatMap(([text, box], place) => [
    ...lines.filter(([_, line]) => meet(box, line)).map(() => `${text.textContent} | interval`),
    ...texts.slice(place + 1).filter(([_, other]) => cross(box, other)).map(([other]) =>
      `${text.textContent} | ${other.textContent}`),
  ]);
})
"""
# What is wider than the box that shows it, and what reaches out of the page. A table of Streamlit's scrolls its own
# canvas: its columns are counted where its sum is known.
_CUT = """
() => {
  const page = document.querySelector('[data-testid=stMainBlockContainer]').getBoundingClientRect();
  const shown = node => node.getClientRects().length > 0;
  const boxes = [...document.querySelectorAll('.sj, .sj table, .sj td, .sj th')];
  const wide = boxes.filter(node => shown(node) && (node.scrollWidth > node.clientWidth + 1
    || node.getBoundingClientRect().right > page.right + 1));
  const frames = [...document.querySelectorAll('[data-testid=stDataFrame] .dvn-scroller')].filter(node =>
    shown(node) && node.scrollWidth > node.clientWidth + 1);
  return [...wide, ...frames].map(node => node.className + ': ' + node.textContent.slice(0, 80));
}
"""


# An option means nothing on a page: the page has a control of its own, or names the whole command as code.
_BARE = r"""
() => {
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    if (/(^|\s)--[a-z]/.test(node.textContent) && !node.parentElement?.closest("code, pre, style, script"))
      found.push(node.textContent.trim().slice(0, 80));
  }
  return found;
}
"""


# Text that stands at less than 4.5 to 1 on what is behind it. Labels within bars have tests of their own.
_FAINT = """
() => {
  const parts = color => { const all = color.match(/[\\d.]+/g).map(Number); return [...all.slice(0, 3), all[3] ?? 1]; };
  const over = (front, back) => [0, 1, 2].map(place => front[place] * front[3] + back[place] * (1 - front[3]));
  const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const weights = [0.2126, 0.7152, 0.0722];
  const light = color => weights.reduce((sum, weight, place) => sum + weight * linear(color[place] / 255), 0);
  // The value of a slider stands above its thumb, whose colour is not behind it; its ends come with the pointer.
  const SKIPPED = "style, script, .bars, .annotation, [data-testid=stIconMaterial], [data-testid^=stSlider]";
  const found = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), node = texts.currentNode.parentElement;
    if (!text || !node?.getClientRects().length || node.closest(SKIPPED)) continue;
    const style = getComputedStyle(node), svg = node.closest("svg"), papers = [];
    let opacity = 1;
    for (let at = node; at; at = at.parentElement) {
      opacity *= parseFloat(getComputedStyle(at).opacity);
      if (svg?.contains(at)) continue;
      papers.push(parts(getComputedStyle(at).backgroundColor));
      if (papers.at(-1)[3] === 1) break;
    }
    const paper = papers.reverse().reduce((below, each) => over(each, below), [255, 255, 255]);
    const ink = parts(svg && style.fill.startsWith("rgb") ? style.fill : style.color);
    const seen = over([...ink.slice(0, 3), ink[3] * opacity], paper);
    const [low, high] = [light(seen), light(paper)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) found.add(`${contrast.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return [...found];
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--width", type=int, default=1440, help="width of the window in pixels")
    parser.add_argument("--dark", action="store_true", help="as a reader with a dark theme sees them")
    options = parser.parse_args()
    bad = 0
    for picture in take(options.run, options.out, options.width, is_dark=options.dark):
        problems = [
            *picture.exceptions,
            *picture.console_errors,
            *(f"cut: {text}" for text in (*picture.overflows, *picture.cut)),
            *(f"covered: {text}" for text in picture.covered),
            *(f"no command: {text}" for text in picture.bare),
        ]
        bad += bool(problems)
        print(picture.file, *problems, sep="\n  ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
