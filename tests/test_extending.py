"""Every recipe of docs/extending.md works as it is written: applied to a copy of the tree, it does what it shows."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = (
    "commands", "dashboards", "diagnosis", "engine", "interop", "live", "loadgen", "metrics", "replay", "scripting",
    "tests", "triage", "ui", "sojourn", "pyproject.toml",
)  # fmt: skip
LINKED = ("scenarios", "docs")  # folders in which a recipe may add a file
FENCE = re.compile(r"^( *)```(\S+)(?: (\w+)=(\S+))?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass
class Recipe:
    title: str
    files: list[tuple[str, str]] = field(default_factory=list)  # path, its whole text
    diffs: list[tuple[str, str]] = field(default_factory=list)  # path, lines with " ", "+" or "-" before them
    commands: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # what the commands print


def recipes(document: str) -> list[Recipe]:
    """A section is a recipe if it has a command."""
    found = []
    for section in re.split(r"^## ", document, flags=re.MULTILINE)[1:]:
        recipe = Recipe(section.splitlines()[0])
        for indent, language, attribute, path, text in FENCE.findall(section):
            text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
            if language == "diff":
                recipe.diffs.append((path, text))
            elif attribute == "file":
                recipe.files.append((path, text))
            elif language == "sh":
                recipe.commands.append(text)
            elif language == "text":
                recipe.outputs.append(text)
        if recipe.commands:
            found.append(recipe)
    return found


RECIPES = recipes((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))


def changed(text: str, diff: str) -> str:
    """`text` with the lines of `diff` replaced: those with " " and "-" stand in it once, one behind the other."""
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} <= set(" +-"), f"a line of this diff begins with none of ' +-':\n{diff}"
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1, f"these lines stand {text.count(old)} times in the file, not once:\n{old}"
    return text.replace(old, new)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree. Each recipe leaves it as it was: modules are compiled once."""
    folder = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source = ROOT / name
        if source.is_file():
            shutil.copy(source, folder)
        else:
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (folder / name).mkdir()
        for path in (ROOT / name).iterdir():
            (folder / name / path.name).symlink_to(path)
    return folder


def test_there_is_a_recipe_for_each_place_that_is_made_for_extensions():
    subjects = " ".join(recipe.title for recipe in RECIPES)
    for subject in ("policy", "model family", "metric", "cause", "source", "arrival process"):
        assert subject in subjects, subject


@pytest.mark.server
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_recipe_works_as_it_is_written(recipe, tree):
    assert recipe.outputs, "a recipe shows what its command prints"
    with contextlib.ExitStack() as undo:
        for path, text in recipe.files:
            assert not (tree / path).exists(), f"{path} is there already: change it by a diff"
            (tree / path).write_text(text, encoding="utf-8")
            undo.callback((tree / path).unlink)
        for path, diff in recipe.diffs:
            file = tree / path
            before = file.read_text(encoding="utf-8")
            text = changed(before, diff)
            file.unlink()  # it may be a link to ours
            undo.callback(file.write_text, before, encoding="utf-8")
            file.write_text(text, encoding="utf-8")
        printed = output_of(recipe, tree)
    for line in "".join(recipe.outputs).splitlines():
        assert line.strip() in printed, f"not printed: {line}\n{printed}"


def output_of(recipe: Recipe, tree: Path) -> str:
    printed = ""
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in recipe.commands:
        done = subprocess.run(
            ["bash", "-euc", command.replace("sojourn ", "python -m sojourn ")], cwd=tree, capture_output=True,
            text=True, timeout=100, env=os.environ | {"PYTHONPATH": str(tree), "PATH": binaries, "COLUMNS": "120"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        printed += done.stdout
    return printed
