"""The schema of a scenario file: blocks with units in the key names; unknown keys are refused.

`engine` configures our engine for `sojourn run`, `target` the requests, `arrivals` when they come, `workload` what they
ask for, `objectives` the bounds (with their source), `measure` what counts, `fleet` how many servers `run` starts.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from sojourn.live.watch.fetch import API_KEY_VARIABLE
from sojourn.loadgen.errors import ScenarioError, nearest
from sojourn.loadgen.scenario.arrivals import Arrivals
from sojourn.loadgen.scenario.distributions import Block, Number, Whole
from sojourn.loadgen.scenario.faults import UniqueKeys, describe_faults, describe_yaml_error
from sojourn.loadgen.scenario.fleet import FleetBlock
from sojourn.loadgen.scenario.workload import Workload
from sojourn.metrics.request.objectives import OBJECTIVES

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
WHOLLY_A_VARIABLE = re.compile(r"\$\{\w+\}")
OWN_HEADERS = frozenset((
    "host", "connection", "content-type", "content-length", "transfer-encoding", "accept", "accept-encoding", "te",
    "expect", "upgrade", "x-request-id", "traceparent", "x-session-id", "x-sojourn-class", "x-sojourn-tenant",
))  # fmt: skip
SUFFIXES = (".yaml", ".yml")
SCENARIO_FOLDER = Path(__file__).parents[2] / "scenarios"


class Target(Block):
    api: Literal["completions", "chat"] = Field("completions", description="which of OpenAI's two interfaces")
    stream: bool = Field(
        True, description="without streaming there is no first token, so only `e2e_ms` can be an objective"
    )
    usage: Literal["continuous", "final", "none"] = Field(
        "continuous", description="token counts to ask for: with every chunk, with the last one, or none"
    )
    timeout_s: Number = Field(120.0, gt=0, le=86_400, description="from the moment a request was due to its last byte")
    connect_timeout_s: Number | None = Field(
        None, gt=0, le=86_400, description="from dispatch to a connection, TLS included; by default only `timeout_s`"
    )
    first_byte_timeout_s: Number | None = Field(
        None, gt=0, le=86_400, description="from the request's last byte to the reply's first"
    )
    gap_timeout_s: Number | None = Field(None, gt=0, le=86_400, description="between two reads of a reply")
    connections: Literal["per_request", "reuse"] = Field(
        "per_request", description="a new connection for each request, or one that an earlier one left"
    )
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="key of the body that limits an answer; newer chat servers take the second alone"
    )
    headers: dict[str, str] = Field(
        default_factory=dict, description="sent with each request; `${NAME}` is replaced by that environment variable"
    )
    verify_tls: bool = Field(
        True, description="false takes any certificate, so that anybody may answer in the server's place"
    )
    traceparent: bool = Field(
        False, description="a W3C `traceparent` with each request, sampled: spans lead back to it"
    )
    stop_at_in_flight: Whole | None = Field(
        None, ge=1, le=100_000, description="send nothing more once so many are in flight and another is due"
    )
    stop_at_failures: Whole | None = Field(None, ge=1, description="send nothing more after so many failed requests")
    model: str | None = Field(
        None,
        min_length=1,
        description="of `load` only, by default the first one that the server names; `--model` overrides it",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="`tokenizer.json`, its folder, `tiny-model`, or `server`",
    )

    @field_validator("headers")
    @classmethod
    def _sendable(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not HEADER_NAME.fullmatch(name):
                raise ValueError(f"has {name!r}, which is no name of a header")
            if name.lower() in OWN_HEADERS:
                raise ValueError(f"has {name}, which is set by itself; leave it out")
            if name.lower() == "authorization" and not WHOLLY_A_VARIABLE.fullmatch(value):
                raise ValueError(f"has {name}, which runs would keep; set the environment variable {API_KEY_VARIABLE}")
            if not value.isprintable() or not value.isascii():
                raise ValueError(f"has a value of {name} with characters that no header may have")
        return headers


class Objective(Block):
    """Bounds for a class of requests, and their source."""

    klass: str = Field("all", description="whose bounds these are")
    ttft_ms: Number | None = Field(None, gt=0, description="time to first token, from when the request was due")
    ttfa_ms: Number | None = Field(
        None, gt=0, description="time to the first token of the answer, where the server sends reasoning apart from it"
    )
    tpot_ms: Number | None = Field(
        None, gt=0, description="time per output token, from the first read with text to the last"
    )
    e2e_ms: Number | None = Field(None, gt=0, description="time to the last byte, from when the request was due")
    ttft_ms_per_prompt_token: Number | None = Field(
        None,
        gt=0,
        le=10_000,
        description="beside `ttft_ms` and `tpot_ms`: added to the first deadline per prompt token (smooth goodput)",
    )
    source: str = Field(min_length=1, description="where the numbers come from, and how they were scaled")

    @model_validator(mode="after")
    def _names_a_bound(self):
        if all(getattr(self, name) is None for name in OBJECTIVES):
            raise ValueError(f"names no bound; give at least one of {', '.join(OBJECTIVES[:-1])} and {OBJECTIVES[-1]}")
        if self.ttft_ms_per_prompt_token is not None and (self.ttft_ms is None or self.tpot_ms is None):
            raise ValueError(
                f"has ttft_ms_per_prompt_token {self.ttft_ms_per_prompt_token:g}, but tokens have deadlines only where "
                "ttft_ms and tpot_ms stand too; add both, or leave it out"
            )
        return self


class Measure(Block):
    """What counts. Warm-up requests are sent and recorded, but no analysis includes them."""

    seed: Whole = Field(0, ge=0, lt=2**63, description="of arrivals, lengths and prompts; `--seed` overrides it")
    warmup_requests: Whole = Field(
        0, ge=0, le=10_000, description="sent one after another before the first arrival, classes in turn"
    )
    warmup_s: Number = Field(
        0.0, ge=0, le=86_400, description="requests due this soon after the first arrival are not measured"
    )
    usd_per_hour: Number | None = Field(
        None, gt=0, le=1_000_000, description="price of the server's machine: gives dollars per million tokens"
    )


class Scenario(Block):
    """One experiment. `name` is that of the file, without its ending."""

    name: str = Field(
        min_length=1,
        max_length=80,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="the file's name without its ending; leave it out",
    )
    description: str = Field(min_length=1, description="one sentence: what the experiment shows")
    engine: dict[str, Any] = Field(default_factory=dict, description="settings of our engine; `run` only")
    target: Target = Field(Target(), description="how to speak to the server")
    arrivals: Arrivals = Field(description="when requests come")
    workload: Workload = Field(description="what they ask for")
    objectives: list[Objective] = Field(min_length=1, description="what is good enough")
    measure: Measure = Field(Measure(), description="the seed, and what counts")
    fleet: FleetBlock | None = Field(None, description="several servers behind a router; `run` only")
    _path_or_name: str = PrivateAttr("")

    @property
    def path_or_name(self) -> str:
        """The argument of `load_scenario`: a path or a bundled name. The bare name without a file."""
        return self._path_or_name or self.name

    def with_path(self, path: Path) -> "Scenario":
        """The same scenario, as if read from that file: the command that repeats its run names it."""
        same = self.model_copy()
        same._path_or_name = str(path)
        return same

    @model_validator(mode="after")
    def _blocks_agree(self):
        """Raises one error with all faults between blocks, a line each."""
        if faults := "\n".join(self._disagreements()):
            raise ValueError(faults)
        return self

    def _disagreements(self) -> Iterator[str]:
        for key, value in self.engine.items():
            is_list = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
            if not is_list and not isinstance(value, bool | int | float | str):
                kinds = "a number, a text, a list of texts or true/false"
                yield f"`engine.{key}` is {value!r}; it must be {kinds}; or leave it out"
        if not self.target.stream:
            yield from self._objectives_of_a_stream()
        names = [each.klass for each in self.workload.classes]
        if len(set(names)) < len(names):
            yield f"workload.classes name {', '.join(names)}: a klass stands twice; give each its own name"
        if "all" in names:
            yield "workload.classes: klass `all` stands for every class; choose another name"
        for objective in self.objectives:
            if objective.klass not in ("all", *names):
                yield (
                    f"objectives: klass `{objective.klass}` is none of the workload's ({', '.join(names)}) nor `all`"
                    f"{nearest(objective.klass, [*names, 'all'])}"
                )
        yield from self._rows_from_nowhere()
        if self.workload.each_arrival == "every_class" and self.arrivals.closed_loop is not None:
            yield (
                f"`workload.each_arrival` is every_class, but arrivals.process is {self.arrivals.process}, a closed "
                "loop, whose slots send one request at a time; set each_arrival to one_class, which draws a class by "
                "weight, or take an open process"
            )

    def _rows_from_nowhere(self) -> Iterator[str]:
        if self.arrivals.process == "trace":
            return
        for each in self.workload.classes:
            lengths = (each.prompt_tokens.distribution, each.output_tokens.distribution)
            if each.from_file is None and ("trace" in lengths or each.content in ("blocks", "recorded")):
                what = f"content {each.content}" if "trace" not in lengths else "a length has distribution trace"
                yield (
                    f"workload: {what}, but arrivals.process is {self.arrivals.process} and class {each.klass} has no "
                    "from_file; set arrivals.process to trace, give the class a from_file, or take lengths from "
                    "another distribution"
                )

    def _objectives_of_a_stream(self) -> Iterator[str]:
        for position, objective in enumerate(self.objectives):
            for name in (each for each in OBJECTIVES if each != "e2e_ms"):
                if (bound := getattr(objective, name)) is not None:
                    yield (
                        f"`objectives[{position}].{name}` is {bound:g}, but `target.stream` is false: a reply that "
                        "comes as a whole has no first token; set e2e_ms instead, or target.stream to true"
                    )


def with_fleet(scenario: Scenario, replicas: int | None, router: str | None, policy: str | None) -> Scenario:
    """The scenario with so many servers; what is None stays as its `fleet` block has it. Raises ScenarioError."""
    if replicas == 1:
        if router or policy:
            raise ScenarioError("--router and --policy are of several servers; raise --replicas, or leave them out")
        return scenario.model_copy(update={"fleet": None})
    given = {"replicas": replicas, "router": router, "policy": policy}
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return scenario
    if replicas is None and scenario.fleet is None:
        raise ScenarioError("--router and --policy are of several servers; give --replicas")
    before = {} if scenario.fleet is None else scenario.fleet.model_dump()
    if router is not None and policy is None:
        before["policy"] = None  # another router has other policies
    try:
        return scenario.model_copy(update={"fleet": FleetBlock(**(before | chosen))})
    except ValidationError as error:
        raise ScenarioError(*[f"fleet: {fault}" for fault in describe_faults(error, FleetBlock)]) from None


def bundled_scenarios() -> list[str]:
    return sorted(path.stem for path in SCENARIO_FOLDER.glob("*.yaml"))


def is_scenario(path_or_name: str) -> bool:
    return Path(path_or_name).is_file() or path_or_name in bundled_scenarios()


def load_scenario(path_or_name: str | Path) -> Scenario:
    """Reads a scenario file, or a bundled one by its name. Raises ScenarioError, one sentence per fault."""
    path = find_scenario(str(path_or_name))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{path} is not UTF-8 text, so it is not a scenario file") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path.name}: {describe_yaml_error(error)}") from None
    if not isinstance(content, dict):
        raise ScenarioError(f"{path.name} holds no blocks; see scenarios/demo.yaml for the form")
    try:
        scenario = Scenario(**{"name": path.stem, **{str(key): value for key, value in content.items()}})
    except ValidationError as error:
        raise ScenarioError(*[f"{path.name}: {fault}" for fault in describe_faults(error, Scenario)]) from None
    scenario._path_or_name = str(path_or_name)
    return scenario


def find_scenario(path_or_name: str) -> Path:
    """The file of a scenario. Raises ScenarioError with the names that are near."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    known = bundled_scenarios()
    if path_or_name in known:
        return SCENARIO_FOLDER / f"{path_or_name}.yaml"
    if path.suffix in SUFFIXES or path.parent != Path():
        if not path.parent.is_dir():
            raise ScenarioError(f"the scenario file {path_or_name} does not exist: there is no folder {path.parent}")
        files = {each.stem: str(each) for each in path.parent.iterdir() if each.suffix in SUFFIXES}
        close = get_close_matches(path.stem, {**dict.fromkeys(known), **files}, n=1, cutoff=0.5)
        near = f"; did you mean `{files.get(close[0], close[0])}`?" if close else f"; bundled are: {', '.join(known)}"
        raise ScenarioError(f"the scenario file {path_or_name} does not exist{near}")
    raise ScenarioError(
        f"scenario {path_or_name!r} is neither a file nor bundled{nearest(path_or_name, known)}; bundled are: "
        f"{', '.join(known)}"
    )
