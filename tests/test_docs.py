"""The pages for readers: links lead somewhere, pages and words are few, and plain."""

import re
from functools import cache
from pathlib import Path

import typer

from sojourn.commands.program import app
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from tests.repository import ROOT, repository_files

DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _pages() -> list[Path]:
    """All Markdown files of the repository."""
    return [path for path in repository_files() if path.suffix == ".md"]


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


MOST_PAGES, MOST_WORDS = 40, 50_000  # that a person wrote; docs/decisions has one short file each beside the pages
GENERATED = ("metrics.md", "json.md", "alerts.md", "foreign-servers.md", "triage.md")
# What commands write within a page.
KINDS = ("exit_codes", "fields", "unsupported", "causes", "complaints", "faults", "scenarios", "accounts")
WRITTEN_BY_COMMANDS = re.compile(rf"<!-- (?:{'|'.join(KINDS)}).*?<!-- end -->", re.DOTALL)


def _written() -> list[Path]:
    """The pages that a person wrote: neither generated ones nor figures that commands made."""
    listed = [page for page in _pages() if page.is_relative_to(DOCS) and not page.is_relative_to(DOCS / "results")]
    return [page for page in listed if page.name not in GENERATED]


def _words(text: str) -> int:
    """Words of prose and tables, without blocks of code."""
    prose = re.sub(r"^ *```.*?^ *```", "", WRITTEN_BY_COMMANDS.sub("", text), flags=re.MULTILINE | re.DOTALL)
    return sum(1 for word in prose.split() if re.search(r"\w", word))


def test_there_are_few_pages_and_words():
    pages = _written()
    assert len([page for page in pages if page.parent.name != "decisions"]) <= MOST_PAGES
    assert sum(_words(page.read_text(encoding="utf-8")) for page in pages) <= MOST_WORDS
    assert all(_words(page.read_text(encoding="utf-8")) <= 350 for page in pages if page.parent.name == "decisions")


def test_percent_has_one_style():
    texts = {page.name: page.read_text(encoding="utf-8") for page in _written()}
    assert {name: found for name, text in texts.items() if (found := re.findall(r".*\d %(?! \d)", text))} == {}


def test_every_page_stands_in_the_contents():
    contents = "".join(
        (folder / "README.md").read_text(encoding="utf-8") for folder in (DOCS, DOCS / "results", DOCS / "decisions")
    )
    assert [
        page.name
        for page in _pages()
        if page.is_relative_to(DOCS) and f"{page.name})" not in contents and page.name != "README.md"
    ] == []


RATE = r"(?:\d[\d.,]*|once|twice|times|requests|tokens|bytes|calls|prompts|lines?|samples?|blocks|steps|changes) a"
UNIT = r"(?:second|minute|hour|day|token|step|call|request|server|rate|run|reply)"


def _unwanted() -> dict[str, re.Pattern[str]]:
    """The first column of the word list, as patterns. Its first row is a habit, which has a pattern of its own."""
    page = (DOCS / "words.md").read_text(encoding="utf-8")
    table = page[page.index("| not | but |") : page.index("Terms with one meaning")]
    phrases = [each for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:] for each in row.split(", ")]
    found = {each: re.compile(rf"(?<!cannot )\b{re.escape(each)}\b") for each in phrases}
    return found | {"a for per": re.compile(rf"\b{RATE} {UNIT}\b")}


def test_no_page_has_a_word_that_the_word_list_replaces():
    unwanted = _unwanted()
    assert len(unwanted) > 30
    wrong = []
    others = [
        *(DOCS / name for name in GENERATED),
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    ]
    for page in [*_written(), *others]:
        if page.name != "words.md":
            text = " ".join(_prose(page.read_text(encoding="utf-8")).split())
            wrong += [f"{page.relative_to(ROOT)}: {name}" for name, pattern in unwanted.items() if pattern.search(text)]
    assert wrong == []


def _commands_of(text: str) -> list[list[str]]:
    """The words of each `sojourn …` line in the blocks of code of a page, without comments and shell operators."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + re.findall(
        r"^    sojourn .*(?:\\\n.*)*$", text, re.MULTILINE
    )
    lines = "\n".join(block.replace("\\\n", " ") for block in blocks).splitlines()
    found = [re.split(r"\s#|\s[|&>]|\[", line.strip())[0] for line in lines]
    return [line.split()[1:] for line in found if re.match(r"sojourn \w", line) and "…" not in line]


def test_every_command_on_a_page_has_its_verb_and_options():
    program = typer.main.get_command(app)
    wrong, seen = [], 0
    for page in [*_written(), ROOT / "README.md"]:
        for words in _commands_of(page.read_text(encoding="utf-8")):
            seen += 1
            command = program
            while words and words[0] in getattr(command, "commands", {}):
                command, words = command.commands[words[0]], words[1:]
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            options = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
            others = command.name in ("bench-serve", "locust")  # flags of vLLM and of Locust
            if command is program or not (set(options) <= known or others):
                wrong.append(f"{page.relative_to(ROOT)}: {' '.join(words)}")
    assert seen > 80 and wrong == []


def test_the_scenario_of_the_tutorial_is_one(tmp_path):
    page = (DOCS / "tutorials" / "your_vllm_in_ten_minutes.md").read_text(encoding="utf-8")
    (tmp_path / "chat.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    scenario = load_scenario(tmp_path / "chat.yaml")
    assert len(build_schedule(scenario, scenario.measure.seed, "x")) > 300


def test_every_name_in_the_tour_of_the_engine_is_in_its_sources():
    page = (DOCS / "tutorials" / "read_the_engine.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(?:\w+\.)?(\w+)`", page))
    sources = "".join(
        path.read_text(encoding="utf-8") for room in ("engine", "metrics") for path in (ROOT / room).rglob("*.py")
    )
    assert len(names) > 20
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} <= {"py"}
