"""The order of the packages: imports only go down, in no circle, and torch loads only where it computes."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The house from the ground to the roof. What stands on one line knows nothing of each other; a module belongs to the
# longest name that fits it, and may import what stands on lower lines.
FLOORS = (
    ("metrics",), ("interop",), ("engine",), ("replay",), ("diagnosis",), ("live",),
    ("loadgen", "dashboards", "triage"), ("ui",), ("scripting",), ("commands",), ("sojourn",),
)  # fmt: skip
ROOMS = tuple(room for floor in FLOORS for room in floor)
# The floors inside a room.
INSIDE = {
    "metrics": (
        ("errors", "whole_file", "cells", "field_table", "ledger", "version", "interrupts"),
        ("installed", "records", "statistics", "prediction", "time_limit", "usage"),
        ("steps", "machine", "compute.cost_model"),
        ("request.timeline",),
        ("request.waits",),
        ("request.stalls",),
        ("run",),
        ("memory", "compute"),
        ("request",),
        ("compare", "results", "catalog", "compute.speed_run"),
        ("compute.speed_facts",),
        ("compute.one_process",),
        ("compute.group_facts",),
    ),
    "interop": (
        ("probe", "sources"),
        ("imported", "exported", "queries"),
        ("held.given",),
        ("held.held",),
        ("held.literals", "held.summaries.figures"),
        ("held.summaries", "held.logs"),
        ("held",),
    ),
    "engine": (
        ("adapter", "kv_event_wire", "kv_source", "process", "sampling", "faults.plan"),
        ("messages", "memory", "faults.delay", "settings.panels", "settings.named_paths"),
        ("request", "faults.rank"),
        ("settings",),
        ("config",),
        ("options", "compute"),
        ("token",),
        ("telemetry",),
        ("loop",),
        ("runner", "server", "faults.core"),
        ("techniques",),
        ("profile_burst",),
        ("core", "llm_input", "llm_output"),
        ("llm", "faults"),
        ("measure_speed", "server.app"),
        ("server.api_reference", "server.serve"),
        ("check",),
        ("",),  # the package itself, which loads what is asked of it
    ),
    "engine.server": (
        ("errors", "settings_files"),
        ("body", "http", "middleware"),
        ("core", "fleet"),
        ("openai",),
        ("anthropic", "call_response", "gateway", "guests"),
        ("telemetry",),
        ("model",),
        ("models",),
        ("arrival",),
        ("submission",),
        ("intake",),
        ("front",),
        ("endpoints",),
        ("app",),
        ("api_reference", "serve"),
    ),
    "diagnosis": (
        ("chunk_facts", "client_stalls", "evidence_level", "explanation", "launch_facts", "memory_facts",
         "sensor_facts", "stall_facts", "step_facts", "verdict"),
        ("block_facts", "fleet_facts", "stop_facts", "stored"),
        ("kv_facts",),
        ("evidence", "run_lint", "shares"),
        ("capacity", "client_signs", "excess"),
        ("expectation", "foreign_server", "regained", "server_means", "symptoms"),
        ("validity",),
        ("state",),
        ("limits", "proposal", "repeat"),
        ("compare", "symptom_tree.reading"),
        ("cause",),
        ("statements",),
        ("causes",),
        ("proposals", "symptom_tree"),
        ("consequences", "server_proposals", "document"),
        ("suspects",),
        ("trials", "terminal"),
        ("adjudicate",),
        ("confidence",),
        ("findings", "score", "explain_request"),
        ("audit", "diagnose"),
    ),
    "live": (("watch.fetch",), ("sensors",), ("watch",), ("kv_lens", "record")),
    "triage": (
        ("document", "objectives", "summary_rules", "sweep"),
        ("series", "words", "decay", "event_rules", "sensor_rules"),
        ("together",),
        ("conclude", "terminal"),
        ("page",),
    ),
}  # fmt: skip
# What an engine needs for any model and load, and what may stand around it.
HEART = ("memory", "compute", "token", "request", "telemetry", "loop", "runner", "server")
TECHNIQUES = ("grammar", "lora", "speculation", "group", "tiers", "handover")
STANDS_ON = {"handover": "tiers"}
WITHOUT_TORCH = (
    "metrics", "interop", "replay", "diagnosis", "live", "dashboards", "engine.memory", "engine.request",
    "engine.server", "engine.telemetry", "engine.loop", "engine.faults", "engine.config", "engine.settings",
    "engine.process", "engine.core", "engine.techniques.tiers", "engine.techniques.handover",
    "engine.compute.communication.layout", "engine.compute.communication.communicator",
)  # fmt: skip
COMPUTES = ("locustfile", "tiers.build", "tiers.computing", "tiers.host_slots", "handover.build")
# A function of more is cut into parts that are named by what they do. Kernels are flat for their compilers.
MOST_COMPLEX = 20
KERNELS = ("engine/compute/triton/", "engine/compute/cpp/")
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)
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


def floor(module: str, floors: tuple[tuple[str, ...], ...]) -> tuple[int, str]:
    """(number of the floor, room) of a module, by the longest name that fits it."""
    fitting = [
        (len(room), number, room) for number, rooms in enumerate(floors) for room in rooms
        if module == room or not room or module.startswith(f"{room}.")
    ]  # fmt: skip
    assert fitting, f"{module} stands on no floor"
    return max(fitting)[1:]


def climbs(module: str, target: str, floors: tuple[tuple[str, ...], ...]) -> bool:
    (here, room), (there, other) = floor(module, floors), floor(target, floors)
    return room != other and there >= here


def of_heart(module: str) -> bool:
    return module.startswith("engine.") and module.split(".")[1] in HEART


def technique(module: str) -> str:
    """ "lora" of "engine.techniques.lora.slots"; "" of a module of no technique."""
    name = (module.split(".") + [""] * 2)[2]
    return name if module.startswith("engine.techniques.") and name in TECHNIQUES else ""


@cache
def edges() -> list[tuple[str, str]]:
    return [(module, target) for module, path in modules().items() for target in sorted(imports(path) - {module})]


def test_a_room_imports_lower_rooms_only():
    above = [f"{module} imports {target}" for module, target in edges() if climbs(module, target, FLOORS)]
    assert not above, "these imports reach up or across:\n" + "\n".join(above)


@pytest.mark.parametrize("room", INSIDE)
def test_inside_a_room_imports_go_down_too(room):
    inside = [
        (module.removeprefix(f"{room}."), target.removeprefix(f"{room}."))
        for module, target in edges() if module.startswith(f"{room}.") and target.startswith(f"{room}.")
        and not (of_heart(module) and technique(target))  # another rule says so
    ]  # fmt: skip
    above = [f"{module} imports {target}" for module, target in inside if climbs(module, target, INSIDE[room])]
    assert not above, "these imports reach up or across:\n" + "\n".join(above)


def test_the_heart_imports_no_technique():
    known = [f"{module} imports {target}" for module, target in edges() if of_heart(module) and technique(target)]
    assert not known, "\n".join(known)


def test_a_technique_imports_no_other_technique():
    both = [
        f"{module} imports {target}" for module, target in edges() if technique(module) and technique(target)
        and technique(target) not in (technique(module), STANDS_ON.get(technique(module)))
    ]  # fmt: skip
    assert not both, "\n".join(both)


def test_every_technique_has_its_folder():
    assert {technique(name) for name in modules()} - {""} == set(TECHNIQUES)


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


@pytest.mark.parametrize(
    ("first", "rooms"), [(RUN, ("loadgen",)), ("import tests.engine.simulated\n", WITHOUT_TORCH)],
    ids=["loadgen", "others"],
)  # fmt: skip
def test_rooms_import_without_torch(first, rooms):
    inside = [
        name for name in modules()
        if any(name == room or name.startswith(f"{room}.") for room in rooms) and not name.endswith(COMPUTES)
    ]  # fmt: skip
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n" + first
    code += "".join(f"import sojourn.{name}\n" for name in sorted(inside))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def complexity(function: ast.AST) -> int:
    """1, and 1 for each branch, loop, condition and handler; those of functions inside it are its own."""
    found = 1
    for node in ast.walk(function):
        found += isinstance(node, BRANCHES)
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        found += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return found


def test_no_function_has_many_branches():
    found = [
        f"{path.relative_to(ROOT)}: {node.name} has {complexity(node)}"
        for room in (*ROOMS, "bench", "scale") for path in sorted((ROOT / room).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(KERNELS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and complexity(node) > MOST_COMPLEX
    ]  # fmt: skip
    assert not found, "\n".join(found)


def test_nothing_is_unpickled():
    unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch.load"}
    for name, path in modules().items():
        assert not named_modules(path) & unsafe, f"{name} can execute what it reads"


def test_no_comment_goes_on_from_the_line_above():
    """A comment that begins with dots says nothing where it stands."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in modules().values()
        for line in path.read_text(encoding="utf-8").splitlines()
        if "# ... " in line
    ]
    assert not found
