"""A load that is stated by options, without a file: a scenario made of them, or a scenario with them in place of its
own fields. Either way the run records the scenario that was sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pydantic import ValidationError

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.arrivals import PROCESSES_WITH_RATE
from sojourn.loadgen.scenario.faults import describe_faults
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.metrics.errors import InputError
from sojourn.metrics.request.objectives import NO_SLO

RATE_RPS, DURATION_S, PROMPT_TOKENS, OUTPUT_TOKENS = 1.0, 30.0, 256, 64  # where an option is not given
SLO_SOURCE = "given on the command line"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What was given; None and empty where nothing was. `slo` in ms; values of `headers` as a scenario has them."""

    slo: Mapping[str, float] = field(default_factory=dict)
    slo_source: str = SLO_SOURCE
    rate: float | None = None
    duration_s: float | None = None
    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def states_a_load(self) -> bool:
        """Whether it says how much is sent, and not only to whom and of which form."""
        return not (self.rate is None and self.duration_s is None and self.requests is None)

    @property
    def changes_anything(self) -> bool:
        return self != LoadOptions()


def made_scenario(asked: LoadOptions, engine: Mapping[str, Any] | None = None, name: str = "load") -> Scenario:
    """The scenario that the options say, at Poisson arrivals. Raises ScenarioError."""
    bounded = asked.duration_s is not None or asked.requests is not None
    arrivals = {
        "process": "poisson", "rate_rps": RATE_RPS if asked.rate is None else asked.rate,
        "duration_s": asked.duration_s if bounded else DURATION_S, "count": asked.requests,
    }  # fmt: skip
    objective = {**asked.slo, "source": asked.slo_source} if asked.slo else {"ttft_ms": 2000.0, "tpot_ms": 100.0,
                                                                       "source": NO_SLO}  # fmt: skip
    return _checked({
        "name": name,
        "description": "Made of the options of the command line.",
        "engine": dict(engine or {}),
        # Some servers refuse any other key of stream_options than that of the usage of the whole answer.
        "target": {"usage": "final", "headers": dict(asked.headers)},
        "arrivals": arrivals,
        "workload": {"classes": [{
            "klass": "all-requests", "prompt_tokens": asked.prompt_tokens or PROMPT_TOKENS,
            "output_tokens": asked.output_tokens or OUTPUT_TOKENS, "ignore_eos": True,
        }]},
        "objectives": [{"klass": "all", **objective}],
    })  # fmt: skip


def with_options(scenario: Scenario, asked: LoadOptions) -> Scenario:
    """The scenario with the given options in place of the fields of the same meaning. Raises InputError for a field
    that it has not, and ScenarioError where the values do not fit each other."""
    if not asked.changes_anything:
        return scenario
    document = scenario.model_dump(mode="json")
    if asked.slo:
        if not scenario.target.stream and set(asked.slo) & {"ttft_ms", "tpot_ms"}:
            raise InputError(f"--slo: scenario {scenario.name} does not stream, so only e2e can be bounded")
        document["objectives"] = [{"klass": "all", **asked.slo, "source": asked.slo_source}]
    document["target"]["headers"] |= asked.headers
    _change_arrivals(scenario, asked, document["arrivals"])
    for option, key, tokens in (
        ("--prompt-tokens", "prompt_tokens", asked.prompt_tokens),
        ("--output-tokens", "output_tokens", asked.output_tokens),
    ):
        if tokens is not None:
            _change_lengths(scenario, document["workload"]["classes"], option, key, tokens)
    return _checked(document)


def _change_arrivals(scenario: Scenario, asked: LoadOptions, arrivals: dict[str, Any]) -> None:
    """One bound replaces the other: who asks for 1,000 requests does not want those of the first 45 s."""
    process = scenario.arrivals.process
    if asked.rate is not None:
        if process not in PROCESSES_WITH_RATE:
            of_trace = "; `arrivals.speedup` of a scenario file replays a trace faster" if process == "trace" else ""
            _refuse(scenario, "--rate", f"the process {process}, which has no rate{of_trace}")
        arrivals["rate_rps"] = asked.rate
    if asked.duration_s is not None:
        if "duration_s" not in arrivals:
            _refuse(scenario, "--duration", f"the process {process}, which has no duration")
        arrivals["duration_s"] = asked.duration_s * (arrivals["speedup"] if process == "trace" else 1)
    if asked.requests is not None:
        if "count" not in arrivals:
            _refuse(scenario, "--requests", f"the process {process}, which has no count")
        arrivals["count"] = asked.requests
    if process in ("trace", "at_once"):  # the one is a slice of a file, the other takes no time
        return
    if asked.duration_s is not None and asked.requests is None and "count" in arrivals:
        arrivals["count"] = None
    if asked.requests is not None and asked.duration_s is None and "duration_s" in arrivals:
        arrivals["duration_s"] = None


def _change_lengths(
    scenario: Scenario, classes: list[dict[str, Any]], option: str, key: str, tokens: int
) -> None:  # fmt: skip
    for klass in classes:
        recorded = key == "prompt_tokens" and klass["content"] in ("blocks", "recorded")
        if recorded or klass[key]["distribution"] == "trace":
            raise InputError(
                f"{option} {tokens}: the requests of class {klass['klass']} of scenario {scenario.name} are as long as "
                f"its trace says; leave {option} out, or leave the scenario out and send requests of one length"
            )
        klass[key] = {"distribution": "fixed", "tokens": tokens}


def _refuse(scenario: Scenario, option: str, why: str) -> NoReturn:
    raise InputError(
        f"{option}: the arrivals of scenario {scenario.name} are of {why}; leave {option} out, or leave the scenario "
        "out and give --rate and --duration"
    )


OPTION_OF = {
    "arrivals.rate_rps": "--rate", "arrivals.duration_s": "--duration", "arrivals.count": "--requests",
    "workload.classes[0].prompt_tokens.tokens": "--prompt-tokens", "target.headers": "--header",
    "workload.classes[0].output_tokens.tokens": "--output-tokens",
}  # fmt: skip


def _checked(document: dict[str, Any]) -> Scenario:
    try:
        return Scenario(**document)
    except ValidationError as error:
        faults = describe_faults(error, Scenario)
    for key, option in OPTION_OF.items():
        faults = [fault.replace(f"`{key}`", option) for fault in faults]
    raise ScenarioError(*[f"with these options: {fault}" for fault in faults])
