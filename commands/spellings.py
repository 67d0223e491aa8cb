"""Options by the names that people type first: old ones of ours, and those of GuideLLM, k6 and vllm bench serve.

OPTIONS has the one name of each meaning that several verbs share; a test holds every verb to it. Another spelling goes
on working where it means the same, with a hint on stderr, and is answered by a sentence where it does not.
"""

import sys
from collections.abc import Collection, Sequence

from sojourn.metrics.errors import InputError

# Name → spellings that mean it.
OPTIONS: dict[str, tuple[str, ...]] = {
    "--output": ("--out", "--dir", "--run-dir", "--sweep-dir", "--search-dir", "--output-dir", "--output-path",
                 "--result-dir"),
    "--set": (),  # and each setting of the engine by its own name, see `_setting`
    "--slo": ("--goodput",),
    "--rate": ("--request-rate", "--qps", "--rps", "--start"),
    "--duration": ("--max-seconds", "--max-duration", "--seconds", "--trial-s"),
    "--requests": ("--num-prompts", "--num-requests", "--max-requests", "--iterations", "--request-count",
                   "--trial-requests"),
    "--prompt-tokens": ("--input-len", "--random-input-len", "--isl", "--input-tokens"),
    "--output-tokens": ("--output-len", "--random-output-len", "--osl", "--max-tokens"),
    "--header": ("--headers",),
    "--base-url": ("--url", "--target", "--host"),
    "--model": ("--served-model-name",),
    "--tokenizer": ("--processor",),
    "--server-run": (),
    "--seed": ("--random-seed",),
    "--json": (),
}  # fmt: skip
MEANT = {spelling: name for name, spellings in OPTIONS.items() for spelling in spellings}
_CLOSED = (
    "keeps requests back while the server is slow, which hides the delay; give --rate for an open load, or take "
    "`sojourn bench-serve --max-concurrency N`, or arrivals of the process `concurrency` in a scenario file"
)
# Spellings of other load generators that mean what no option of ours does, and the way to it.
ELSEWHERE = {
    **dict.fromkeys(("--vus", "--users", "--concurrency", "--max-concurrency"), _CLOSED),
    **dict.fromkeys(
        ("--rate-type", "--profile", "--strategy"),
        "chooses a kind of load: --rate gives Poisson arrivals, `sojourn capacity --rates 1,2,4` several, and "
        "`sojourn capacity` searches the largest; see docs/scenarios.md for others",
    ),
    **dict.fromkeys(
        ("--data", "--dataset-name", "--dataset-path"),
        "names the prompts: give --prompt-tokens and --output-tokens, a scenario file with `from_file`, or take "
        "`sojourn bench-serve --dataset-name`",
    ),
    **dict.fromkeys(("--stage", "--stages"), "is a scenario with arrivals of the process `phases` or `ramp` here"),
    **dict.fromkeys(
        ("--backend", "--endpoint", "--endpoint-type"),
        "is `target.api` of a scenario file, completions or chat; or take `sojourn bench-serve --backend`",
    ),
    "--port": "belongs to the address: give HOST:PORT as the first word, or --base-url HOST:PORT",
    "--api-key": "would stand in the list of processes; set the environment variable SOJOURN_API_KEY",
}


def respelled(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a verb with the options `known` to it, each option by its own name. A hint on stderr says what was
    read as what. Raises InputError for an option of another load generator that no option here means."""
    words: list[str] = []
    upcoming = iter(arguments)
    for word in upcoming:
        if word == "--":
            return [*words, word, *upcoming]
        name, equals, value = word.partition("=")
        if name in known or not name.startswith("--"):
            words.append(word)
        elif MEANT.get(name) in known:
            _hint(name, MEANT[name])
            words.append(f"{MEANT[name]}{equals}{value}")
        elif name in ELSEWHERE and "--rate" in known:
            raise InputError(f"{name} {ELSEWHERE[name]}")
        elif "--set" in known and (setting := _setting(name)) is not None:
            key, switched = setting
            chosen = switched or (value if equals else next(upcoming, None))
            if chosen is None:
                raise InputError(f"{name} has no value; add it")
            _hint(name, f"--set {key}={chosen}")
            words += ["--set", f"{key}={chosen}"]
        else:
            words.append(word)
    return words


def _hint(given: str, meant: str) -> None:
    print(f"sojourn: {given} is read as {meant}", file=sys.stderr)


def _setting(name: str) -> tuple[str, str] | None:
    """The setting of the engine that an option of `serve` sets, and its value where the option takes none."""
    from sojourn.engine.config import EngineConfig
    from sojourn.engine.options import is_switch

    key = name.removeprefix("--").replace("-", "_")
    switches = {each for each, field in EngineConfig.model_fields.items() if is_switch(field)}
    if key.removeprefix("no_") in switches and key not in EngineConfig.model_fields:
        return key.removeprefix("no_"), "false"
    return (key, "true" if key in switches else "") if key in EngineConfig.model_fields and key != "model" else None
