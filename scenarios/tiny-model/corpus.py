"""The text that the bundled models learn: prose paragraphs from docstrings that are already on the machine.

Only the standard library and packages under permissive licences are read. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "stdlib"

# Every source of text and its licence. Only these are read; a package that is not installed is skipped, and said so.
SOURCES = {
    STANDARD_LIBRARY: "PSF-2.0",
    "_pytest": "MIT", "altair": "BSD-3-Clause", "anyio": "MIT", "attr": "MIT", "click": "BSD-3-Clause", "duckdb": "MIT",
    "fastapi": "MIT", "flask": "BSD-3-Clause", "fsspec": "BSD-3-Clause", "gevent": "MIT", "httpx": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0", "jinja2": "BSD-3-Clause", "locust": "MIT", "mpmath": "BSD-3-Clause",
    "narwhals": "MIT", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause", "openai": "Apache-2.0",
    "packaging": "Apache-2.0 OR BSD-2-Clause", "pandas": "BSD-3-Clause", "pip": "MIT", "playwright": "Apache-2.0",
    "plotly": "MIT", "prometheus_client": "Apache-2.0 AND BSD-2-Clause", "psutil": "BSD-3-Clause",
    "pyarrow": "Apache-2.0", "pydantic": "MIT", "pygments": "BSD-2-Clause", "setuptools": "MIT",
    "sortedcontainers": "Apache-2.0", "streamlit": "Apache-2.0", "sympy": "BSD-3-Clause", "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0", "uvicorn": "BSD-3-Clause", "watchdog": "Apache-2.0", "websockets": "BSD-3-Clause",
    "werkzeug": "BSD-3-Clause",
}  # fmt: skip
# Copies of other people's code inside these packages have licences of their own; test suites are not prose.
NOT_READ = {"site-packages", "test", "tests", "_vendor", "_vendored", "vendor", "vendored", "lib2to3", "ensurepip"}

# A word seen less often than this in the whole text is rare; a paragraph may hold one in forty words. A model this
# small misspells what it seldom reads, and its text looks more like English without.
RARE_BELOW = 5


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of prose. `subject` names what it documents, on the first paragraph of a docstring only."""

    text: str
    subject: str = ""


_ROLE = re.compile(r":[\w:+-]+:`~?\.?([^`<]*?)(?:\s*<[^>]*>)?`")
_QUOTED_CODE = re.compile(r"`+([^`]*)`+_*")
_EMPHASIS = re.compile(r"\*\*?([A-Za-z][^*]*)\*\*?")
_SENTENCES_ONLY = re.compile(r"[A-Z][A-Za-z0-9 .,;:'\"()?!-]*[.!?]")
_LOOKS_LIKE_CODE = re.compile(r"[a-z]\.[a-z]|\w\(|[a-z][A-Z]|:\S|\.\.|\d{5}|--|[A-Z]{9}")
_PLAIN_WORD = re.compile(r"[\"'(]?[A-Za-z][a-z'-]*[)\"'.,;:?!]*")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def prose(paragraph: str) -> str | None:
    """The paragraph on one line without markup, or None where it is not plain English sentences."""
    text = " ".join(paragraph.split())
    for markup in (_ROLE, _QUOTED_CODE, _EMPHASIS):
        text = markup.sub(r"\1", text)
    words = text.split()
    if len(words) < 8 or len(text) > 1500 or not _SENTENCES_ONLY.fullmatch(text) or _LOOKS_LIKE_CODE.search(text):
        return None
    return text if sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words) > 0.9 * len(words) else None


def documented_strings(source: str) -> Iterator[tuple[str, str]]:
    """(subject, text) of every string literal of a module that is long enough to be documentation, in source order."""
    tree = ast.parse(source)
    subjects: dict[ast.AST, str] = {}
    fragments: set[ast.AST] = set()  # of f-strings: not whole sentences
    literals: list[ast.Constant] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node.body[0], ast.Expr):
                subjects[node.body[0].value] = node.name.strip("_").replace("_", " ")
        elif isinstance(node, ast.JoinedStr):
            fragments.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 50:
            literals.append(node)
    for node in sorted(literals, key=lambda literal: (literal.lineno, literal.col_offset)):
        if node not in fragments:
            yield subjects.get(node, ""), node.value


def source_folder(name: str) -> Path | None:
    """Where the modules of one of the SOURCES lie, without importing them; None where it is not installed."""
    if name == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def gather_paragraphs() -> list[Paragraph]:
    """Reads the installed sources in a fixed order. A paragraph whose first 60 characters were seen is dropped."""
    seen: set[str] = set()
    paragraphs: list[Paragraph] = []
    for name in SOURCES:
        root = source_folder(name)
        if root is None:
            print(f"  {name:20} not installed: skipped")
            continue
        num_characters = 0
        for path in sorted(root.rglob("*.py")):
            if NOT_READ.intersection(path.relative_to(root).parts):
                continue
            try:
                strings = list(documented_strings(path.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError):  # templates and deliberately broken examples
                continue
            for subject, string in strings:
                for index, block in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(string))):
                    text = prose(block)
                    if text and text[:60] not in seen:
                        seen.add(text[:60])
                        paragraphs.append(Paragraph(text, subject if index == 0 else ""))
                        num_characters += len(text)
        print(f"  {name:20} {num_characters / 1e3:8.0f} kB  {SOURCES[name]}", flush=True)
    return paragraphs


def drop_rare_words(paragraphs: list[Paragraph]) -> list[Paragraph]:
    """The paragraphs that keep to common words; a subject with a rare word is forgotten."""
    counts = Counter(word for paragraph in paragraphs for word in _WORD.findall(paragraph.text.lower()))

    def num_rare(text: str) -> int:
        return sum(counts[word] < RARE_BELOW for word in _WORD.findall(text.lower()))

    return [
        Paragraph(paragraph.text, "" if num_rare(paragraph.subject) else paragraph.subject)
        for paragraph in paragraphs
        if 40 * num_rare(paragraph.text) <= len(paragraph.text.split())
    ]


def split_held_out(paragraphs: list[Paragraph]) -> tuple[list[Paragraph], list[Paragraph]]:
    """(training, held out): every fiftieth run of twenty neighbouring paragraphs is held out."""
    training = [paragraph for index, paragraph in enumerate(paragraphs) if index // 20 % 50 != 49]
    return training, [paragraph for index, paragraph in enumerate(paragraphs) if index // 20 % 50 == 49]


def write_prompts(paragraphs: list[Paragraph], path: Path, num_bytes: int, rng: random.Random) -> None:
    """The file that the load generator cuts prompts from: one paragraph a line, runs of five neighbours, shuffled."""
    long_enough = [paragraph.text for paragraph in paragraphs if len(paragraph.text) >= 100]
    runs = [long_enough[start : start + 5] for start in range(0, len(long_enough), 5)]
    rng.shuffle(runs)
    text = "\n".join(line for run in runs for line in run)
    path.write_text(text[: text.index("\n", num_bytes)] + "\n", encoding="utf-8")
