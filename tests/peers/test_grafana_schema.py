"""The dashboards fit the schema that Grafana publishes as TypeScript types: npm's @grafana/schema.

`tsc` is found on the PATH, in the `node_modules/.bin` of a folder that has that package too, and skipped elsewhere:

    npm install @grafana/schema typescript && PATH="$PATH:$PWD/node_modules/.bin" pytest -m peer tests/peers
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from sojourn.dashboards.build import build_dashboards

# JSON has the values of an enumeration, where the types name its members.
TYPES = """
import type { Dashboard } from '@grafana/schema';
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")

pytestmark = [pytest.mark.peer, pytest.mark.timeout(300)]


def complaints(boards: dict[str, dict], folder: Path) -> list[str]:
    """What the compiler says of dashboards: unknown keys, missing ones, values of another type."""
    compiler = shutil.which("tsc")
    modules = Path(compiler).parents[1] if compiler else Path()
    if compiler is None or not (modules / "@grafana" / "schema").is_dir():
        pytest.skip("tsc and @grafana/schema are not on the PATH")
    (folder / "node_modules").symlink_to(modules)
    constants = [f"export const {name}: Plain<Dashboard> = {json.dumps(board)};" for name, board in boards.items()]
    (folder / "boards.ts").write_text(TYPES + "\n".join(constants))
    done = subprocess.run([compiler, *OPTIONS, "boards.ts"], cwd=folder, capture_output=True, text=True, timeout=240)
    return done.stdout.splitlines() if done.returncode else []


def built(folder: Path) -> dict[str, dict]:
    files = [path for path in build_dashboards(folder) if path.suffix == ".json"]
    return {path.stem.replace("-", "_"): json.loads(path.read_text()) for path in files}


def test_dashboards_fit_the_schema_of_grafana(tmp_path):
    boards = built(tmp_path / "out")
    assert len(boards) >= 7
    assert complaints(boards, tmp_path) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda board: board["panels"][1].update(unheardOf=1),
        lambda board: board["templating"]["list"][0].update(sort="up"),
        lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(color={"mode": "no-such-mode"}),
    ],
    ids=["unknown key", "other type", "other word"],
)
def test_a_spoiled_dashboard_does_not(tmp_path, spoil):
    board = built(tmp_path / "out")["sojourn_request"]
    spoil(board)
    assert complaints({"spoiled": board}, tmp_path) != []
