"""The pages for readers: every link leads somewhere."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _pages() -> list[Path]:
    """All Markdown files of the repository; in a tree without git, those of its folders."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = [ROOT / line for line in listed.stdout.splitlines()] or [
        path for path in ROOT.rglob("*.md") if not {".venv", "build", "runs"} & set(path.parts)
    ]
    return sorted(path for path in found if path.exists())


def _prose(text: str) -> str:
    """The page without its blocks of code and without code within a line."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page: a repeated one gets a number."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w -]", "", shown).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


def _wrong_links(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(_prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file.resolve())):
            found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def test_links_lead_to_files_and_headings():
    assert [wrong for page in _pages() for wrong in _wrong_links(page)] == []
