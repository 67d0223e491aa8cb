"""`sojourn server fleet replay`: how a large fleet would serve the traffic of a trace, by a run's step times."""

from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import RunArgument, open_run, out, print_json, rounded, table
from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import ROUTINGS
from sojourn.scripting.changes import grid, label

if TYPE_CHECKING:
    from sojourn.replay.fleet.answer import FleetAnswer

MOST_REQUESTS = 10_000_000


def replay(
    run: RunArgument,
    trace: Annotated[str, typer.Option(help="trace file, or the name of one in scenarios/traces")],
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="engines behind the router")] = 2,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MOST_REQUESTS, help="by default those of the trace, once")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="requests per second of the fleet; by default the trace's own")
    ] = None,
    routing: Annotated[
        str, typer.Option(help=f"policies of the router, with commas, or all: {', '.join(ROUTINGS)}")
    ] = "all",
    block_tokens: Annotated[
        int | None, typer.Option(min=8, max=65_536, help="that a block of the trace becomes; prompts shrink with it")
    ] = None,
    output_scale: Annotated[float, typer.Option(min=1e-3, max=100, help="of the trace's output lengths")] = 1.0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a change, as in sojourn replay; repeatable")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the answers as JSON")] = False,
    processes: Annotated[int, typer.Option(min=0, max=256, help="0 is one for each core")] = 0,
) -> None:
    """Replay a fleet of one run's engine under a trace's traffic, with each routing policy.

    The steps take as long as those of RUN, without its accidents. Starts no server and computes nothing with the model.
    """
    from sojourn.loadgen.schedule.sized import traced_requests
    from sojourn.metrics.machine.host import usable_cores
    from sojourn.metrics.run.fleet import refuse_fleet
    from sojourn.replay.fleet.answer import FleetQuestion, fleet_answers
    from sojourn.replay.fleet.settings import fleet_settings
    from sojourn.replay.fleet.simulate import RecordedServers
    from sojourn.replay.predictor import predictor_of

    routings = _routings(routing)
    changes = grid(set_ or [])
    if len(changes) > 1:
        raise InputError("--set takes one value a key here; compare settings by several calls")
    rows, named_tokens = traced_requests(trace, block_tokens, output_scale)
    recorded = open_run(run)
    refuse_fleet(recorded, "the replay of a trace")
    predictor = predictor_of(recorded)
    change = changes[0] if changes else None
    config, change = fleet_settings(predictor, change, named_tokens)
    question = FleetQuestion(
        replicas=replicas, num_requests=requests or len(rows), rate=rate, change=change,
        objectives=predictor.objectives,
    )  # fmt: skip
    answers = fleet_answers(
        RecordedServers(predictor.material), config, rows, question, routings, processes or usable_cores()
    )
    if json:
        print_json({"run": str(predictor.run.path), "trace": trace, "change": change, "answers": answers})
        return
    what = "" if label(change) == "unchanged" else f", {label(change)}"
    out.print(f"{replicas:,} replicas of {predictor.run.name}{what}; {question.num_requests:,} requests of {trace} at "
              f"{answers[0].rate_rps:.4g}/s", markup=False, soft_wrap=True)  # fmt: skip
    _print(answers)


def _routings(text: str) -> list[str]:
    names = list(ROUTINGS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ROUTINGS:
            raise InputError(f"--routing {name!r} is not known; give some of {', '.join(ROUTINGS)}, or all")
    if not names or len(set(names)) < len(names):
        raise InputError(f"--routing {text!r} must name each policy once; give some of {', '.join(ROUTINGS)}")
    return names


def _print(answers: "list[FleetAnswer]") -> None:
    shown = table("routing", "good/s", "kept", "TTFT p50", "p99", "TPOT p50", "p99", "hits", "busiest",
                  text=("routing",))  # fmt: skip
    for each in answers:
        shown.add_row(
            each.routing, f"{each.goodput_rps:,.4g}", f"{each.attainment:.1%}",
            *(rounded(found[quantile]) for found in (each.ttft_ms, each.tpot_ms) for quantile in ("p50", "p99")),
            f"{each.hit_rate:.1%}", f"{each.load_max_over_mean:.2f}",
        )  # fmt: skip
    out.print(shown)
    pooled = answers[0].pooled_hit_rate
    out.print(
        "latencies in ms; hits: cached over all prompt tokens, "
        f"{pooled:.1%} in one cache of all replicas without eviction; busiest: requests of the busiest replica over "
        "the mean",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    for each in answers:
        if each.refused:
            out.print(f"! {each.routing}: {each.refused:,} requests refused; a queue was full, or they were larger "
                      "than the KV pool", markup=False, soft_wrap=True)  # fmt: skip
    if (beyond := max(each.extrapolated for each in answers)) > 0.3:
        out.print(f"! {beyond:.0%} of the device's time is in steps larger or smaller than those of the run; the times "
                  "of such steps are a guess", markup=False, soft_wrap=True)  # fmt: skip
    out.print(f"replayed in {max(each.replay_seconds for each in answers):.0f} s a policy", markup=False)
