"""The order of the packages: imports only go down, in no circle, and torch loads only where it computes."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("commands", "scripting", "ui", "loadgen", "dashboards", "engine", "metrics", "sojourn")

# room → the rooms that it may import, itself left out. The longest name that fits a module counts.
MAY_IMPORT = {
    "sojourn": {"commands", "scripting", "ui", "loadgen", "dashboards", "engine", "metrics"},
    "commands": {"scripting", "ui", "loadgen", "dashboards", "engine", "metrics"},
    "scripting": {"ui", "loadgen", "engine", "metrics"},
    "ui": {"metrics"},
    "loadgen": {"metrics"},
    "dashboards": {"metrics"},
    "metrics": set(),  # the package itself; each of its rooms stands below the rooms that import it
    "metrics.errors": set(),
    "metrics.whole_file": set(),
    "metrics.cells": set(),
    "metrics.statistics": {"metrics.cells"},
    "metrics.ledger": set(),
    "metrics.records": {"metrics.ledger"},
    "metrics.machine": {"metrics.records", "metrics.errors", "metrics.whole_file"},
    "metrics.steps": {"metrics.records"},
    "metrics.run": {
        "metrics.cells", "metrics.steps", "metrics.records", "metrics.ledger",
        "metrics.errors", "metrics.whole_file",
    },
    "metrics.compute": {
        "metrics.cells", "metrics.steps", "metrics.machine", "metrics.records", "metrics.statistics", "metrics.errors",
    },
    "metrics.request": {
        "metrics.cells",
        "metrics.compute", "metrics.run", "metrics.records", "metrics.ledger", "metrics.statistics", "metrics.errors",
    },
    "metrics.memory": {"metrics.run", "metrics.records", "metrics.statistics", "metrics.errors"},
    "metrics.kv_lens": {
        "metrics.memory", "metrics.sources", "metrics.live", "metrics.request", "metrics.replay", "metrics.run",
        "metrics.machine", "metrics.diagnosis.terminal", "metrics.records", "metrics.statistics", "metrics.errors",
    },
    "metrics.probe": {
        "metrics.memory", "metrics.compute", "metrics.run", "metrics.machine", "metrics.steps",
        "metrics.records",
        "metrics.ledger", "metrics.errors",
    },
    "metrics.compare": {
        "metrics.cells", "metrics.compute",
        "metrics.memory", "metrics.request", "metrics.run", "metrics.machine", "metrics.records", "metrics.ledger",
        "metrics.statistics", "metrics.errors",
    },
    "metrics.results": {
        "metrics.memory", "metrics.request", "metrics.run", "metrics.machine", "metrics.records", "metrics.statistics",
    },
    "metrics.usage": {"metrics.errors"},
    "metrics.imported": {
        "metrics.probe", "metrics.run", "metrics.records", "metrics.errors",
    },
    "metrics.catalog": {"metrics.memory", "metrics.compute", "metrics.machine", "metrics.records", "metrics.ledger"},
    "metrics.sources": {"metrics.catalog", "metrics.run", "metrics.ledger", "metrics.errors"},
    "metrics.diagnosis": {
        "metrics.cells",
        "metrics.sources", "metrics.results", "metrics.request", "metrics.run", "metrics.machine", "metrics.records",
        "metrics.memory", "metrics.compute", "metrics.replay", "metrics.steps", "metrics.ledger",
        "metrics.statistics", "metrics.errors",
    },
    "metrics.live": {
        "metrics.diagnosis", "metrics.sources", "metrics.probe", "metrics.request", "metrics.run", "metrics.records",
        "metrics.machine", "metrics.replay", "metrics.ledger", "metrics.errors",
    },
    "metrics.diagnosis.score": {
        "metrics.diagnosis", "metrics.replay", "metrics.sources", "metrics.request", "metrics.run", "metrics.ledger",
        "metrics.statistics", "metrics.errors", "metrics.whole_file",
    },
    "metrics.replay": {
        "metrics.compare", "metrics.compute", "metrics.request", "metrics.results", "metrics.run", "metrics.steps",
        "metrics.errors",
    },
    "metrics.search": {
        "metrics.results", "metrics.memory", "metrics.request", "metrics.run", "metrics.machine", "metrics.statistics",
        "metrics.errors",
    },
    "metrics.export": {
        "metrics.catalog", "metrics.results", "metrics.request", "metrics.memory", "metrics.compute", "metrics.run",
        "metrics.steps", "metrics.machine", "metrics.records", "metrics.ledger", "metrics.errors",
    },
    "engine.faults.plan": set(),
    "engine.faults": {"engine.server", "engine.engine", "engine.memory.window", "metrics.errors"},
    "engine.settings": {"engine.memory.eviction"},
    "engine.config": {"engine.request.policies", "engine.settings", "engine.faults.plan"},
    "engine.options": {"engine.config", "metrics.errors"},
    "engine.sampling": set(),
    "engine.adapter": set(),
    "engine.process": set(),
    "engine.messages": {"engine.adapter", "engine.kv_source", "engine.sampling", "metrics"},
    "engine.kv_event_wire": set(),
    "engine.kv_source": set(),
    "engine.memory": {"engine.kv_event_wire", "engine.kv_source", "metrics"},
    "engine.request": {"engine.memory", "engine.adapter", "engine.kv_source", "engine.sampling", "metrics"},
    "engine.compute.communication.layout": {"metrics.errors"},
    "engine.compute.communication.communicator": set(),
    "engine.compute": {"engine.config", "engine.process", "metrics"},
    "engine.token": {
        "engine.compute", "engine.adapter", "engine.sampling", "engine.settings", "engine.config", "metrics",
    },
    "engine.runner": {
        "engine.token", "engine.compute", "engine.request.plan", "engine.request.request", "engine.memory.adapters",
        "engine.memory.window",
        "engine.memory.tiers", "engine.memory.transfer", "engine.adapter", "engine.kv_source", "engine.config",
        "engine.settings", "engine.sampling", "engine.process", "metrics",
    },
    "engine.token.speculation.ngram_index": set(),
    "engine.telemetry": {
        "engine.request", "engine.memory", "engine.token.speculation.ngram_index", "engine.messages", "engine.config",
        "metrics",
    },
    "engine.scheduling": {"engine.request", "engine.memory", "engine.config", "engine.settings"},
    "engine.engine": {"engine.telemetry", "engine.request", "engine.memory", "engine.messages", "metrics"},
    "engine.profile_burst": {
        "engine.engine", "engine.runner", "engine.request.plan", "engine.compute", "engine.messages", "metrics",
    },
    "engine.replay": {
        "engine.engine", "engine.scheduling", "engine.adapter", "engine.request", "engine.memory", "engine.sampling",
        "engine.config", "engine.settings", "metrics",
    },
    "engine.group": {
        "engine.runner", "engine.compute", "engine.config", "engine.process", "engine.faults.plan",
        "engine.faults.rank", "metrics.compute.startup", "metrics.errors",
    },
    "engine.core": {
        "engine.group", "engine.telemetry", "engine.engine", "engine.scheduling", "engine.request.token_budget",
        "engine.profile_burst",
        "engine.runner", "engine.messages",
        "engine.faults", "engine.config", "engine.process", "metrics.compute.startup", "metrics.errors",
    },
    "engine.llm": {
        "engine.core", "engine.engine", "engine.llm_output", "engine.messages", "engine.telemetry", "engine.config",
        "engine.sampling", "engine.token.checkpoint", "engine.token.generation_config", "engine.token.text",
        "engine.token.lora.checkpoint", "metrics",
    },
    "engine.measure_speed": {"engine.llm", "engine.config", "engine.sampling", "engine.process", "metrics"},
    "engine.llm_output": {"engine.messages", "engine.sampling", "engine.token.text", "metrics"},
    "engine.server": {
        "engine.token.text", "engine.token.checkpoint", "engine.token.generation_config", "engine.token.tools",
        "engine.token.grammar.grammar",
        "engine.token.lora.checkpoint", "engine.adapter", "engine.settings",
        "engine.messages", "engine.sampling", "engine.config", "engine.process", "engine.kv_event_wire",
        "engine.kv_source", "metrics",
    },
    "engine.server.serve": {"engine.server", "engine.faults", "engine.config", "engine.process", "metrics.errors"},
    "engine.check": {
        "engine.server", "engine.runner", "engine.memory.tiers", "engine.token.text", "engine.token.generation_config",
        "engine.config", "metrics",
    },
}  # fmt: skip
WITHOUT_TORCH = (
    "metrics", "dashboards", "engine.memory", "engine.request", "engine.server", "engine.telemetry",
    "engine.faults", "engine.replay", "engine.config", "engine.settings", "engine.process", "engine.core",
    "engine.compute.communication.layout", "engine.compute.communication.communicator",
)  # fmt: skip
# What `sojourn run` imports. Locust patches the interpreter when it is imported: clients have processes of their own.
RUN = """
import sojourn.loadgen.run.experiment, sojourn.loadgen.run.replay, sojourn.loadgen.run.run_files
assert not any(
    name.removeprefix("sojourn.").split(".")[0] in ("engine", "locust", "ui", "duckdb") for name in sys.modules
)
"""


@cache
def modules() -> dict[str, Path]:
    found = {"sojourn": ROOT / "sojourn" / "__init__.py"}
    for room in ROOMS[:-1]:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache  # each file is parsed once
def named_modules(path: Path) -> set[str]:
    """Every module, or name in one, that a file imports, wherever the import stands."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            named |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return named


def imports(path: Path) -> set[str]:
    """The modules of the house that a file imports."""
    inside = {name.removeprefix("sojourn.") for name in named_modules(path) if name.startswith("sojourn.")}
    return {name for name in inside if name in modules()}


def room_of(module: str) -> str:
    return max((room for room in MAY_IMPORT if module == room or module.startswith(f"{room}.")), key=len, default="")


def allowed(module: str, target: str) -> bool:
    home = room_of(module)
    return any(target == room or target.startswith(f"{room}.") for room in MAY_IMPORT[home] | {home}) or (
        target == "engine"  # the package itself, which holds nothing
    )


def test_imports_go_down_only():
    above = [
        f"{module} imports {target}"
        for module, path in modules().items()
        if room_of(module)
        for target in sorted(imports(path))
        if not allowed(module, target)
    ]
    assert not above, "these imports reach up or across:\n" + "\n".join(above)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others: the strongly connected components (Tarjan)."""
    number, low, path, found = {}, {}, [], []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        path.append(module)
        for target in graph[module]:
            if target not in number:
                visit(target)
            if target in path:
                low[module] = min(low[module], low[target])
        if low[module] == number[module]:
            members = path[path.index(module) :]
            del path[path.index(module) :]
            if len(members) > 1:
                found.append(sorted(members))

    for module in graph:
        if module not in number:
            visit(module)
    return sorted(found)


def test_no_module_imports_itself_through_others():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}) == [["a", "b", "c"]]
    # `engine` itself holds nothing: it loads its members when they are used.
    graph = {name: imports(path) - {name, "engine"} for name, path in modules().items() if name != "engine"}
    assert circles(graph) == []


def test_every_module_has_its_floor():
    homeless = [name for name in modules() if not room_of(name) and name != "engine"]
    assert not homeless


@pytest.mark.parametrize(
    ("first", "rooms"), [(RUN, ("loadgen",)), ("import tests.engine.simulated\n", WITHOUT_TORCH)],
    ids=["loadgen", "others"],
)  # fmt: skip
def test_rooms_import_without_torch(first, rooms):
    inside = [
        name for name in modules()
        if any(name == room or name.startswith(f"{room}.") for room in rooms) and not name.endswith("locustfile")
    ]  # fmt: skip
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n" + first
    code += "".join(f"import sojourn.{name}\n" for name in sorted(inside))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_nothing_is_unpickled():
    unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch.load"}
    for name, path in modules().items():
        assert not named_modules(path) & unsafe, f"{name} can execute what it reads"
