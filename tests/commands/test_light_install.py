"""Without torch: each verb either does its work or names the smallest install that it needs, in one sentence."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from sojourn.commands.program import app
from sojourn.metrics.installed import EXTRAS, install_command
from tests.live.kv_lens.recorded_runs import run_of
from tests.metrics.memory.simulated_cache import chains
from tests.metrics.sampled_machine import known
from tests.metrics.synthetic import PLANTS, synthetic_run

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEAD = "http://127.0.0.1:9"  # no server answers there
NO_SERVER = "no server answers"
LOADGEN, UI, ENGINE, MCP, EVENTS = (
    f"pip install '.[{extra}]'" for extra in ("loadgen", "ui", "engine", "mcp", "kv-events")
)
BOTH = "pip install '.[engine,loadgen]'"
# The command line of each verb, the exit code of its work (1 where an install lacks), and what it says: a word of its
# answer, or the install that it names. The first is with the base install, the second with loadgen and ui; one that
# stands alone is of both.
VERBS: dict[str, tuple] = {
    "bench-serve": (f"bench-serve --model m --base-url {DEAD}", 1, LOADGEN, NO_SERVER),
    "calibrate client": ("calibrate client --help", 0, "load generator"),
    "calibrate device": ("calibrate device", 1, ENGINE),
    "capacity": (f"capacity steady-chat --rates 1 --base-url {DEAD}", 1, LOADGEN, NO_SERVER),
    "compare": ("compare runs/a runs/b", 1, "margin 5%"),
    "dev bench": ("dev bench offline", 1, ENGINE),
    "dev faults list": ("dev faults list", 0, "control: healthy"),
    "dev faults prove": ("dev faults prove none", 2, LOADGEN, "holds no run"),
    "dev faults run": ("dev faults run", 1, BOTH, ENGINE),
    "dev faults score": ("dev faults score none", 1, "holds no run"),
    "dev ladder": ("dev ladder", 1, BOTH, ENGINE),
    "diagnose": ("diagnose runs/a", 0, "max_num_seqs="),  # a fix with its predicted effect
    "explain": ("explain runs/a --slowest ttft", 0, "request.queue"),
    "export": ("export runs/a --to vllm --output exported.json", 0, "wrote"),
    "import": ("import exported.json --output imported", 0, "imported"),
    "join": ("join runs/a runs/b", 1, "records of a server already"),
    "kv-lens": ("kv-lens runs/cached", 0, "What another size would hit"),
    "lint": ("lint steady-chat", 0, LOADGEN, "nothing found|note"),
    "load": (f"load demo --base-url {DEAD}", 1, LOADGEN, NO_SERVER),
    "locust": ("locust", 1, LOADGEN),
    "mcp": ("mcp", 1, MCP),
    "plan": ("plan runs/small", 0, "walls at"),
    "record": ("record --base-url http://127.0.0.1:9 --for 2 --output rec", 1, "nothing was recorded"),
    "replay": ("replay runs/a --set max_num_seqs=18", 0, "max_num_seqs=18"),
    "report": ("report runs/a", 0, UI, "wrote"),
    "run": ("run demo", 1, BOTH, ENGINE),
    "runs": ("runs runs", 0, "run a|a · simulated"),
    "serve": ("serve tiny-model", 1, ENGINE),
    "server dashboards": ("server dashboards --output boards", 0, UI, "wrote boards"),
    "server dashboards up": ("server dashboards up --help", 0, "Grafana"),
    "server fleet replay": (
        "server fleet replay runs/a --trace AzureLLMInferenceTrace_code.csv --requests 20", 0, "routing +good/s",
    ),
    "server fleet up": ("server fleet up 2", 1, ENGINE),
    "server keys create": ("server keys create --tenant t --file keys.yaml", 0, "sk-"),
    "server keys list": ("server keys list --file keys.yaml", 0, "tenant +scope"),
    "server quantize": ("server quantize tiny-model --to int8 --out out", 1, ENGINE),
    "server usage": ("server usage runs/a", 1, "holds no usage files"),
    "size": ("size Llama-3.1-8B 512/32 --device h100_sxm --set max_num_seqs=8 --slo tpot:50", 0, "walls"),
    "triage": ("triage keys.yaml", 2, "no line of a known kind"),
    "ui": ("ui runs/none", 1, UI, "is not a folder"),
    "verify": ("verify runs/a runs/b", 0, "predicted by +a replay"),
    "watch": (f"watch {DEAD} --once --for 2", 3, NO_SERVER),
}  # fmt: skip
EXECS = "locust"  # which becomes another program where it is installed
LIVE_EVENTS = ("kv-lens tcp://127.0.0.1:9 --once --for 2", 1, EVENTS)
PORT = 21_780
FEW = """
description: a few requests
target: {api: chat}
arrivals: {process: constant, rate_rps: 10, duration_s: 3}
workload: {classes: [{klass: a, prompt_tokens: 20, output_tokens: 5}]}
objectives: [{klass: all, ttft_ms: 500, source: none}]
"""
# Runs command lines in an interpreter that cannot import some modules, and prints what they said.
INTERPRETER = """
import json, sys
blocked, lines = json.loads(sys.argv[1])
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in blocked else real(name, *rest)
from tests.commands.program import run_program
print(json.dumps([run_program(*line.split()) for line in lines]))
"""


@pytest.fixture
def runs(tmp_path) -> Path:
    folder = tmp_path / "light"
    few = replace(PLANTS["healthy"], settings=replace(PLANTS["healthy"].settings, max_num_seqs=2))
    many = replace(few, settings=replace(few.settings, max_num_seqs=18))
    for name, plant, requests in (("a", few, 40), ("b", many, 40), ("small", many, 10)):
        known(synthetic_run(folder / "runs" / name, plant=plant, requests=requests, name=name))
    run_of(folder / "runs" / "cached", chains(5, count=60), events=False)
    return folder


def verbs(group, path=()):
    for name, verb in group.commands.items():
        inner = hasattr(verb, "commands")
        if not inner or verb.invoke_without_command:
            yield " ".join((*path, name))
        if inner:
            yield from verbs(verb, (*path, name))


def distributions(extra: str | None) -> set[str]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[\[<>=;]", line)[0].strip().lower() for line in lines}


def test_the_table_of_extras_is_that_of_the_package():
    """Each module of an extra comes with a package of it; each package of an extra that runs our code is named."""
    of_module = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        if extra == "silicon" and not set(modules) <= set(of_module):
            continue  # 260 MB that only estimates of GPUs need
        given = {name.lower() for module in modules for name in of_module[module]}
        for module in modules:
            named = {name.lower() for name in of_module[module]}
            assert named & distributions(extra) or module in ("mcp_types", "google"), f"{extra} does not name {module}"
        assert distributions(extra) <= given, f"no module of {extra} stands for {distributions(extra) - given}"


@pytest.mark.parametrize(
    ("modules", "command"),
    [
        (["plotly"], UI), (["zmq"], EVENTS), (["tokenizers"], LOADGEN), (["jinja2", "tokenizers"], LOADGEN),
        (["torch", "zmq", "tokenizers"], ENGINE), (["locust", "plotly"], "pip install '.[loadgen,ui]'"),
        (["pandas"], "pip install ."),
    ],
)  # fmt: skip
def test_the_smallest_install_is_named(modules, command):
    assert install_command(modules) == command


@pytest.mark.server
@pytest.mark.parametrize(
    "installed", [(), pytest.param(("loadgen", "ui"), marks=pytest.mark.thorough)], ids=["base", "loadgen,ui"]
)
def test_each_verb_answers_or_names_the_smallest_install(runs, installed):
    missing = [module for extra, modules in EXTRAS.items() if extra not in installed for module in modules]
    present = [module for extra in installed for module in EXTRAS[extra]]
    present += ["zmq", "google"] if installed else []  # locust and streamlit bring them
    blocked = sorted({*missing, "transformers", "triton"} - set(present))
    assert sorted(verbs(typer.main.get_command(app))) == sorted(VERBS), "each verb stands in the table"
    lines = [line for verb, line in VERBS.items() if not (installed and verb == EXECS)]
    lines += [] if installed else [LIVE_EVENTS]
    given = json.dumps([blocked, [line for line, *_ in lines]])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETER, given], cwd=runs, env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (line, code, *says), answer in zip(lines, json.loads(done.stdout), strict=True):
        check(line, code, says[-1] if installed else says[0], *answer)


def check(line: str, ends: int, expected: str, code: int, out: str, err: str) -> None:
    lacks = "pip install" in expected
    assert "Traceback" not in out + err, f"{line}: {err}"
    assert re.search(re.escape(expected) if lacks else expected, out + err), f"{line}: {out}{err}"
    assert code == (1 if lacks else ends), f"{line}: {code}: {out}{err}"
    assert not lacks or (err.splitlines()[-1].startswith("sojourn: ") and not out), f"{line}: {out}{err}"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("extras", ["", "[loadgen,ui]"], ids=["base", "loadgen,ui"])
def test_a_new_environment_holds_a_whole_install(runs, tmp_path, extras):
    """`pip install '.[…]'` as a user types it. With -s it prints the figures of docs/install.md."""
    source, place = tmp_path / "source", tmp_path / "venv"
    ignored = shutil.ignore_patterns("__pycache__", ".venv", ".git", "runs", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    venv.create(place, with_pip=True)
    before, began = megabytes(place), time.monotonic()
    subprocess.run([place / "bin" / "pip", "install", "--quiet", f"{source}{extras}"], check=True)
    seconds, program = time.monotonic() - began, place / "bin" / "sojourn"
    listed = json.loads(said(place / "bin" / "pip", "list", "--format", "json"))
    print(f"\n{extras or 'base'}: {megabytes(place) - before:,.0f} MB, {len(listed)} packages, {seconds:.0f} s")
    assert "torch" not in {package["name"] for package in listed}
    for line, code, *says in VERBS.values():
        if line != EXECS or not extras:
            done = subprocess.run([program, *line.split()], cwd=runs, capture_output=True, text=True)
            check(line, code, says[-1] if extras else says[0], done.returncode, done.stdout, done.stderr)
    if extras:
        loads_and_shows(program, tmp_path)


def loads_and_shows(program: Path, folder: Path) -> None:
    (folder / "few.yaml").write_text(FEW)
    serve = [program.with_name("python"), "-m", "sojourn.loadgen.reference_server.server", "--port", str(PORT)]
    server = subprocess.Popen(serve, cwd=folder)
    app = None
    try:
        until_answers(f"http://127.0.0.1:{PORT}/v1/models")
        load = [program, "load", "few.yaml", "--base-url", f"127.0.0.1:{PORT}", "--output", "run"]
        done = subprocess.run(load, cwd=folder, capture_output=True, text=True)
        assert done.returncode in (0, 4), done.stdout + done.stderr
        assert {"diagnosis.json", "report.html"} <= {file.name for file in (folder / "run").iterdir()}
        app = subprocess.Popen([program, "ui", "run", "--port", str(PORT + 1)], cwd=folder)
        until_answers(f"http://127.0.0.1:{PORT + 1}")
    finally:
        for process in filter(None, (server, app)):
            process.terminate()
            process.wait()


def until_answers(url: str) -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"nobody answers at {url}")


def said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()) / 1e6
