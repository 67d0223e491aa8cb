"""Tokens that travel to the ranks of their experts come back as a sum over ranks would have made them."""

from functools import partial

import pytest
import torch

from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.expert_exchange import exchanged
from sojourn.engine.token.models.moe import MixtureOfExperts, softmax_top_k
from sojourn.metrics.compute.communication import GroupShape, cheaper_exchange
from sojourn.metrics.compute.link import LinkTime, fitted_link

HIDDEN, INNER, EXPERTS, CHOSEN, SHARED = 32, 24, 8, 2, 16
STEPS = (1, 3, 400)  # of fewer tokens than ranks, too
ROUTE = partial(softmax_top_k, num_chosen=CHOSEN, normalise=True)


def mixture_of(layout: ParallelLayout, shared: int) -> MixtureOfExperts:
    """A rank's part of one mixture with random weights."""
    whole = MixtureOfExperts(HIDDEN, INNER, EXPERTS, CHOSEN, ROUTE, shared_intermediate_size=shared)
    dice = torch.Generator().manual_seed(7)
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, generator=dice)
    if layout.size == 1:
        return whole
    part = MixtureOfExperts(HIDDEN, INNER, EXPERTS, CHOSEN, ROUTE, shared_intermediate_size=shared, layout=layout)
    state, held = whole.state_dict(), slice(part.held.start, part.held.stop)
    state |= {name: state[name][held] for name in ("gate_up", "down")}
    part.load_state_dict({name: state[name] for name in part.state_dict()})
    return part


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


def travel(layout, communicators, shared: int):
    """Outputs and expert tokens of each step, and what the last one exchanged."""
    mixture, stage, found, counted = mixture_of(layout, shared), communicators.stage, [], []
    mixture.watch = lambda experts: counted.append(len(experts))
    with torch.inference_mode():
        for count in STEPS:
            before = stage.counts()
            found.append(exchanged(mixture, tokens(count), Operations(), stage).numpy())
    counts = stage.counts()
    last = {name: (each.calls - before[name].calls, each.bytes - before[name].bytes) for name, each in counts.items()}
    return found, counted, last


@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_come_back_with_what_their_experts_gave(ranks, size, shared):
    alone = mixture_of(ONE_PROCESS, shared)
    for found, counted, last in ranks.run(travel, ParallelLayout(1, 1, size, divides_tokens=True), shared):
        assert counted == list(STEPS), "each rank counts the experts of all tokens"
        for count, output in zip(STEPS, found, strict=True):
            expected = alone(tokens(count), Operations()).detach()
            torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-3)  # of hundreds
        group = GroupShape(1, 1, size, 1, 1, HIDDEN, 99, 4, CHOSEN, divides_tokens=True)
        for name, each in group.exchanges(STEPS[-1], 0).items():
            calls, num_bytes = last[name]
            assert calls == each.calls and num_bytes == pytest.approx(each.bytes, rel=0.15), name


def sums(layout, communicators):
    mixture = mixture_of(layout, SHARED)
    with torch.inference_mode():
        return communicators.stage.all_reduce(mixture(tokens(400), Operations())).numpy()


def test_two_ranks_give_the_same_numbers_either_way(ranks):
    """So that the choice of an exchange changes no token."""
    summed = ranks.run(sums, ParallelLayout(1, 1, 2))[0]
    travelled = ranks.run(travel, ParallelLayout(1, 1, 2, divides_tokens=True), SHARED)[0][0][-1]
    assert (summed == travelled).all()


def test_the_exchange_is_chosen_by_the_link():
    def links(latency_ns: float):
        """Of two ranks: a sum moves all bytes both ways, the others half of them."""
        moved = {"all_reduce": 1 << 24, "all_gather": 1 << 23, "all_to_all": 1 << 23}
        return [fitted_link(name, "nccl", 2, [LinkTime(1, latency_ns), LinkTime(1 << 24, latency_ns + ns)])
                for name, ns in moved.items()]  # fmt: skip

    def chosen(ranks: int, latency_ns: float, steps=(256, 2048)) -> str:
        return cheaper_exchange(GroupShape(1, 1, ranks, 8, 8, 4096, 99, 2, CHOSEN), links(latency_ns), steps)

    assert chosen(16, 1.0) == "all-to-all", "most ranks hold no expert of a token"
    assert chosen(2, 1.0) == "all-reduce", "two ranks hold nearly all of them"
    assert chosen(16, 1e6) == "all-reduce", "one exchange waits once"
    assert cheaper_exchange(GroupShape(1, 1, 16, 8, 8, 4096, 99, 2, CHOSEN), [], (256,)) == "all-reduce"
