"""The options that say a load on the command line, for every verb that sends one. They are declared here once."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sojourn.commands.cli import bounds_of, header_variable, hidden_header, out, slo_option
from sojourn.live.watch.fetch import is_address, name_cut
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.scenario.options import LoadOptions
    from sojourn.loadgen.scenario.scenario import Scenario

PANEL = "The load: in place of a scenario, or of its fields"
UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)")
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCENARIO|URL]", help="a bundled scenario or a scenario file; or the address of a running server"
    ),
]
OtherArgument = Annotated[str | None, typer.Argument(metavar="[URL|SCENARIO]", help="the other of the two")]


def _declared(
    slo: Annotated[
        str | None, slo_option("objectives in ms for every class, in place of the scenario's")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="requests per second; without a scenario by default 1")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="of the load: seconds, or 30s, 5m, 1h; by default 30 s")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="number of requests; ends the load as well")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of each prompt; by default 256")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of each answer; by default 64")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="'Name: value'",
                     help="sent with each request; run files keep its name alone; repeatable"),
    ] = None,
) -> "LoadOptions":  # fmt: skip
    from sojourn.loadgen.scenario.options import SLO_SOURCE, LoadOptions
    from sojourn.metrics.request.objectives import source_of

    return LoadOptions(
        slo=bounds_of(slo), slo_source=source_of(slo or "", SLO_SOURCE), rate=rate,
        duration_s=None if duration is None else _seconds(duration), requests=requests,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, headers=_headers(header or ()),
    )  # fmt: skip


def load_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb these options. It takes them as the parameter `asked`, a LoadOptions."""
    declared = dict(inspect.signature(_declared).parameters)
    for name, each in declared.items():
        kind, option = each.annotation.__metadata__ and each.annotation.__args__[0], each.annotation.__metadata__[0]
        option.rich_help_panel = PANEL
        declared[name] = each.replace(annotation=Annotated[kind, option], kind=inspect.Parameter.KEYWORD_ONLY)
    own = [each for each in inspect.signature(verb).parameters.values() if each.name != "asked"]
    shown = inspect.Signature([*own, *declared.values()])

    @functools.wraps(verb)
    def command(*positional: Any, **given: Any) -> None:
        bound = shown.bind(*positional, **given)
        bound.apply_defaults()
        asked = _declared(**{name: bound.arguments.pop(name) for name in declared})
        return verb(**bound.arguments, asked=asked)

    del command.__wrapped__
    command.__signature__ = shown  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in shown.parameters.items()}
    return command


def scenario_and_server(words: Sequence[str | None], base_url: str | None) -> tuple[str | None, str | None]:
    """The scenario and the address, each once and in any order. Raises InputError for two of a kind, and ScenarioError
    for a word that is neither."""
    from sojourn.loadgen.scenario.scenario import find_scenario, is_scenario

    given = [word for word in words if word is not None]
    urls = [word for word in given if is_address(word) and not is_scenario(word)]
    scenarios = [word for word in given if word not in urls]
    for word in scenarios:
        find_scenario(word)
    if len(scenarios) > 1:
        raise InputError(f"{' and '.join(scenarios)} are two scenarios; keep one")
    if len(urls) + (base_url is not None) > 1:
        raise InputError(f"{' and '.join([*urls, *([f'--base-url {base_url}'] if base_url else [])])} are two "
                         "addresses; keep one")  # fmt: skip
    url = urls[0] if urls else base_url
    if url is not None and (cut := name_cut(url)):
        print(f"sojourn: {cut}", file=sys.stderr)
    return (scenarios[0] if scenarios else None), url


def stated_scenario(named: str | None, asked: "LoadOptions", engine: Mapping[str, Any] | None = None) -> "Scenario":
    """The scenario of that name with the options in it, or one that is made of them. Raises ScenarioError."""
    from sojourn.loadgen.scenario.options import made_scenario, with_options
    from sojourn.loadgen.scenario.scenario import load_scenario

    return made_scenario(asked, engine) if named is None else with_options(load_scenario(named), asked)


def print_load(scenario: "Scenario", seed: int | None) -> None:
    """How much a scenario is about to send; of a replay of a trace, what was understood of its times too."""
    from sojourn.loadgen.schedule.extent import extent_of
    from sojourn.loadgen.schedule.facts import rate_to_come

    seed = scenario.measure.seed if seed is None else seed
    requests, tokens = extent_of(scenario, seed).sentences()
    out.print(f"sends          {requests}:\n{tokens:>{15 + len(tokens)}}", markup=False)
    if (sentence := rate_to_come(scenario, seed)) is not None:
        out.print(f"replay         {sentence}", markup=False)


def _seconds(text: str) -> float:
    found = DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise InputError(f"--duration: {text!r} is no time; give seconds above 0, or 30s, 5m, 1h")
    return float(found[1]) * UNITS_S[found[2]]


def _headers(given: Sequence[str]) -> dict[str, str]:
    """`Name: value` each → the name, and the environment variable that has the value from now on: no file of a run and
    no list of processes shows it. A value that is a variable already stays. Raises InputError."""
    headers: dict[str, str] = {}
    for each in given:
        name, colon, value = (part.strip() for part in each.partition(":"))
        if not colon or not name or not value:
            raise InputError(f"--header {name!r} has no value; give it as 'Name: value'")
        if not value.isprintable() or not value.isascii():
            raise InputError(f"--header {name!r} has characters in its value that no header may have")
        if name.lower() in (known.lower() for known in headers):
            raise InputError(f"--header {name!r} is given twice; keep one")
        _, headers[name] = hidden_header(each)
        if headers[name] != value:
            os.environ[header_variable(name)] = value
    return headers
