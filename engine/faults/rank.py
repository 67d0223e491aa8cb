"""Faults of one process that computes: of a rank of a parallel group, or of the only one."""

from collections.abc import Callable
from typing import Any

from sojourn.engine.faults.delay import Window, before, spend
from sojourn.engine.faults.plan import Fault, RankFault, SkewedRouter, SlowRank
from sojourn.metrics.errors import ModelError

FAR = 1e4  # above all logits of a router


def plant_in_rank(runner: Any, faults: list[Fault]) -> None:
    """Wraps the parts of a ModelRunner. Raises ModelError for a fault without its object."""
    for fault in faults:
        if isinstance(fault, RankFault):
            PLANTS[type(fault)](runner, fault)


def slow_rank(runner: Any, fault: SlowRank) -> None:
    """The other ranks wait for it in their next exchange."""
    layout = runner.placed.model.layout
    size = layout.size
    if size == 1 or fault.rank >= size:
        raise ModelError(
            f"the fault slow_rank names rank {fault.rank} of a parallel group, and there are {size} ranks, numbered "
            "from 0; name one of several, or leave it out"
        )
    if layout.rank != fault.rank:
        return
    window = Window(fault)

    def cost(*_: Any) -> None:
        if window.is_open():
            spend(fault.ms / 1e3, fault.by)

    runner.eager.inputs = before(runner.eager.inputs, cost)


def skewed_router(runner: Any, fault: SkewedRouter) -> None:
    mixtures = [layer.mlp for layer in runner.placed.model.layers if hasattr(layer.mlp, "route")]
    if not mixtures:
        raise ModelError("the fault skewed_router needs a model with routed experts; serve one, or leave it out")
    window = Window(fault)

    def skewed(route: Callable[..., Any], num_chosen: int) -> Callable[..., Any]:
        def choose(logits: Any, bias: Any) -> Any:
            if window.is_open():
                logits = logits.clone()
                logits[: round(fault.share * len(logits)), :num_chosen] += FAR
            return route(logits, bias)

        return choose

    for mixture in mixtures:
        mixture.route = skewed(mixture.route, mixture.num_chosen)


PLANTS: dict[type[RankFault], Callable[[Any, Any], None]] = {
    SlowRank: slow_rank,
    SkewedRouter: skewed_router,
}
