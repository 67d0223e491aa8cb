"""The verbs of the program, by group, and their old names. Help, completion and the loading of a verb follow these
tables; `tests/commands/test_verbs.py` holds docs/commands.md and every printed command to them."""

from collections.abc import Mapping
from typing import NamedTuple


class Verb(NamedTuple):
    """What one types after `sojourn`: one word, or a group and a word."""

    name: str
    summary: str  # one line of --help
    is_main: bool = False  # on the first page of --help
    module: str = ""  # in commands/, whose function of the same name it is; by default the last word of the name
    has_own_parser: bool = False  # it parses its arguments itself, --help among them

    @property
    def function(self) -> str:
        return self.module or self.name.split()[-1].replace("-", "_")


MAIN = True

GROUPS: Mapping[str, tuple[Verb, ...]] = {
    "Measure": (
        Verb("watch", "what live servers suffer from now, without any load", MAIN),
        Verb("load", "send a load to a running server, and diagnose the run", MAIN),
        Verb("run", "serve a model, send it a load, and diagnose the run", MAIN),
        Verb("capacity", "the largest rate that meets the SLO, or goodput by rate"),
        Verb("record", "a server while others use it: pages, log, records"),
        Verb("locust", "Locust with our timing: own tasks, or a scenario", has_own_parser=True),
        Verb("bench-serve", "a load with the flags of vllm bench serve", has_own_parser=True),
    ),
    "Explain": (
        Verb("diagnose", "the causes of a run's latency, with evidence and fixes", MAIN),
        Verb("explain", "where the time of one request went", MAIN),
        Verb("triage", "what a log, a page or a summary shows"),
        Verb("kv-lens", "what a KV cache holds, evicts and misses"),
        Verb("lint", "prompts that a cache cannot use, panels without data"),
        Verb("runs", "the runs of a folder"),
        Verb("mcp", "the runs of a folder as tools for agents"),
    ),
    "Predict": (
        Verb("replay", "what a run would have been with other settings", MAIN),
        Verb("plan", "which settings serve the most within the SLO", MAIN),
        Verb("size", "which devices a model needs, before a server exists", MAIN),
        Verb("verify", "whether a second run did what was predicted"),
    ),
    "Compare and share": (
        Verb("compare", "whether run B is worse than run A", MAIN),
        Verb("report", "a run or a sweep as one HTML file", MAIN),
        Verb("ui", "the app: all runs, in the browser", MAIN),
        Verb("export", "a run as a trace, a page or another tool's file"),
        Verb("import", "another tool's result file as a run", module="import_result"),
        Verb("join", "the records of a server, joined to a client's run"),
    ),
    "Serve": (
        Verb("serve", "serve a model: OpenAI-compatible API and metrics"),
        Verb("server keys", "API keys of a server"),
        Verb("server usage", "who used what, and what it costs"),
        Verb("server quantize", "a checkpoint with 8 or 4 bits per weight"),
        Verb("server dashboards", "Grafana dashboards, Prometheus rules and alerts"),
        Verb("server fleet", "several servers behind a router"),
    ),
    "Calibrate": (
        Verb("calibrate client", "the load generator's own timing error", module="calibrate"),
        Verb("calibrate device", "a device's limits, or a model's normal speed", module="calibrate_device"),
    ),
    "Develop": (
        Verb("dev bench", "the engine beside other engines and the device", has_own_parser=True),
        Verb("dev faults", "planted faults that score the diagnosis"),
        Verb("dev ladder", "what each technique of an engine gives"),
    ),
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)

# First words that only hold further ones, and what they hold.
HOLDERS = {
    "server": "What belongs to running a server: keys, usage, checkpoints, dashboards, fleets.",
    "calibrate": "Measure what this machine can do: the load generator's error, the device's limits.",
    "dev": "Measure Sojourn itself: its engine, its diagnosis, its techniques.",
}


class Renamed(NamedTuple):
    """How one says today what once was `sojourn NAME`."""

    to: str
    options: Mapping[str, str] = {}  # an option's old name, and its new one
    one_of: tuple[str, ...] = ()  # options without which the old verb did nothing


OLD_NAMES: Mapping[str, Renamed] = {
    "demo": Renamed("run demo"),
    "sweep": Renamed("capacity", one_of=("--rates", "--rate-from")),
    "trace": Renamed("export --to perfetto", {"--to": "--until"}),
    "export": Renamed("export", {"--format": "--to"}),
    "otlp receive": Renamed("join --receive"),
    "otlp join": Renamed("join"),
    "calibrate": Renamed("calibrate client"),
    "calibrate-device": Renamed("calibrate device"),
    **{name: Renamed(f"dev {name}") for name in ("bench", "faults", "ladder")},
    **{name: Renamed(f"server {name}") for name in ("keys", "usage", "quantize", "dashboards", "fleet")},
}
