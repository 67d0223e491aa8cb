"""FLOPs of the cost model against what torch counts while the models really compute, and bytes against real tensors.

torch counts the products of whatever is multiplied, masked or not, so attention is given here as its definition: each
query is multiplied by the keys that it sees and by no others. Everything else is the engine's own code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.kv_cache import KVCache, LayerCache, allocate, bytes_per_token
from sojourn.engine.compute.kv_formats import KV_FP8
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.registry import load_model
from sojourn.metrics.compute.cost_model import decode_flops, request_flops, step_cost, step_work
from sojourn.metrics.errors import ModelError
from tests.engine.compute.attention_inputs import attention_inputs
from tests.engine.compute.test_attention import seen_keys
from tests.engine.families import FAMILIES
from tests.engine.harness import drain, hand_over, make_engine, submit

CPU = torch.device("cpu")
BLOCK = 16
# (new, past) of each sequence; those with one new token stand first
STEPS = {
    "prefill": [(20, 0)],
    "chunks with a past": [(2, 5), (9, 41), (7, 50)],
    "a long chunk with a past": [(1, 3), (40, 20), (60, 41)],
    "decode": [(1, 0), (1, 7), (1, 63)],
    "verify": [(4, 20), (4, 61)],
    "mixed, with a tail of one token": [(1, 70), (1, 31), (4, 20), (6, 41), (10, 0)],
}
EVERY_STEP = ("llama", "qwen2-windows", "deepseek-v3")  # of the other families only the mixed one


class DefinedAttention:
    """softmax(q k / scale) v, query by query over the visible keys alone."""

    def reserve(self, max_sequences: int, max_tokens: int) -> None: ...

    def another(self) -> "DefinedAttention":
        return DefinedAttention()

    def begin(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        with _disable_current_modes():  # a counter takes long over what is no product
            queries = list(self._queries(query, layer_cache, spec))
        scores = [torch.bmm(folded, keys) for folded, keys, _, _ in queries]
        with _disable_current_modes():
            weights = [_weights(score, bias, spec) for score, (*_, bias) in zip(scores, queries, strict=True)]
        mixed = [torch.bmm(weight, values) for weight, (_, _, values, _) in zip(weights, queries, strict=True)]
        with _disable_current_modes():
            return torch.stack([heads.flatten(0, 1) for heads in mixed])

    def _queries(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> Iterator[tuple]:
        """Of each new token: the query [kv_heads, group, head_dim], the keys [kv_heads, head_dim, seen] and values
        [kv_heads, seen, value_dim] that it sees, and what is added to their products."""
        inputs, planes = self.inputs, layer_cache.values.flatten(1, 2).unbind(0)
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
        bounds = pairwise(accumulate(inputs.query_lens, initial=0))
        for (begin, end), context, blocks in zip(bounds, inputs.context_lens, inputs.block_tables, strict=True):
            slots = (blocks.long()[:, None] * inputs.block_size + torch.arange(inputs.block_size)).flatten()[:context]
            for row in range(begin, end):
                last = context - (end - row)
                seen = torch.tensor(seen_keys(last, spec))
                keys = planes[0][slots[seen]].transpose(0, 1)
                values = planes[1][slots[seen]].transpose(0, 1) if len(planes) == 2 else keys
                distances = seen - last
                bias = 0 if slopes is None else slopes.view(keys.shape[0], -1, 1) * distances
                folded = query[row].unflatten(0, (keys.shape[0], -1))
                yield folded, keys.transpose(1, 2), values[..., : spec.value_dim], bias


def _weights(scores: torch.Tensor, bias, spec: AttentionSpec) -> torch.Tensor:
    """scores [kv_heads, group, seen], not scaled → the share of each key."""
    scores = scores * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores + bias
    if spec.sink_logits is None:
        return scores.softmax(-1)
    return torch.cat((scores, spec.sink_logits.view(*scores.shape[:2], 1)), dim=-1).softmax(-1)[..., :-1]


@dataclass
class Counted:
    flops: int
    parts: dict[str, int]


def count(model, sequences: list[tuple[int, int]]) -> Counted:
    """What torch counts in one step whose sequences all draw, by module."""
    width = max(-(-(new + past) // BLOCK) for new, past in sequences)
    tables = torch.arange(len(sequences) * width).view(len(sequences), width)
    positions = [torch.arange(past, past + new) for new, past in sequences]
    slots = torch.cat([table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)])
    new, contexts = [new for new, _ in sequences], [new + past for new, past in sequences]
    attention = DefinedAttention()
    attention.begin(attention_inputs(new, contexts, slots, tables, BLOCK))
    cache = allocate(model.kv_layout, len(model.layers), tables.numel(), BLOCK, model.norm.dtype, CPU)
    cache.values.normal_()
    at = torch.cat(positions)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hidden = model(at % 300 + 3, at, slots, Operations(), attention, cache)
        model.logits(hidden[torch.tensor(new).cumsum(0) - 1])
    parts = {"attention": 0, "mlp": 0}
    for name, counts in counter.get_flop_counts().items():
        for part in parts:
            if name.endswith(f".{part}"):
                parts[part] += sum(counts.values())
    return Counted(counter.get_total_flops(), parts)


@pytest.mark.parametrize("window", [(3, 2), (7, 20), (1000, 4)])
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v2-lite", "mpt"])
def test_flops_of_a_window_with_sink_tokens_are_those_that_torch_counts(family, window, checkpoints):
    model = load_model(checkpoints[family], torch.float32, CPU, None, window=window)
    sequences = list(STEPS.values())[-1]
    new, past = zip(*sequences, strict=True)
    assert (
        step_cost(model.shape(), step_work(model.shape(), new, past, len(new))).flops == count(model, sequences).flops
    )
    assert model.shape().longest_window == window[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_exactly_those_that_torch_counts(family, checkpoints):
    model = load_model(checkpoints[family], torch.float32, CPU, None)
    shape = model.shape()
    for name in STEPS if family in EVERY_STEP else list(STEPS)[-1:]:
        sequences = STEPS[name]
        counted = count(model, sequences)
        new, past = zip(*sequences, strict=True)
        cost = step_cost(shape, step_work(shape, new, past, len(new)))
        assert cost.flops == counted.flops, name
        assert {"attention": cost.attention, "mlp": cost.mlp} == counted.parts, name
        assert cost.flops == sum(request_flops(shape, *sequence, 1) for sequence in sequences)
        if set(new) == {1}:
            assert cost.flops == decode_flops(shape, past)


def test_a_defined_attention_gives_the_numbers_of_the_reference(checkpoints):
    """Else what it counts would be the FLOPs of something else."""
    from sojourn.engine.compute.attention.torch_backend import TorchAttention

    for family in ("qwen2-windows", "mpt", "deepseek-v3", "gemma2"):
        model = load_model(checkpoints[family], torch.float32, CPU, None)
        cache: KVCache = allocate(model.kv_layout, len(model.layers), 4, BLOCK, torch.float32, CPU)
        cache.values.normal_()
        at = torch.arange(40, 60)
        inputs = attention_inputs([20], [60], at, torch.arange(4)[None], BLOCK)
        found = []
        for backend in (DefinedAttention(), TorchAttention()):
            backend.begin(inputs)
            with torch.inference_mode():
                found.append(model(at % 300 + 3, at, at, Operations(), backend, cache))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_tensors(family, checkpoints):
    model = load_model(checkpoints[family], torch.float32, CPU, None)
    shape = model.shape()
    stored = {}
    for path in checkpoints[family].glob("*.safetensors"):
        stored |= load_file(path)
    routed = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    # Tied embeddings are stored once and read as the head; else the embedding table is there, and not read as a whole.
    gathered = 0 if model.config.tie_embeddings else 320 * shape.hidden_size * 4
    assert shape.weight_bytes == sum(tensor.nbytes for tensor in stored.values()) - routed - gathered
    if routed:
        experts = shape.experts
        assert experts.num_layers * experts.num_experts * experts.expert_bytes == routed


@pytest.mark.compiler
@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3-moe"])
def test_packed_weights_are_counted_at_the_width_they_are_stored_in(family, weights, checkpoints):
    """Everything that a step reads is a tensor somewhere in the model: those of our kernels hide in their objects."""
    try:
        model = load_model(checkpoints[family], torch.float32, CPU, None, weights=weights)
    except ModelError as unsupported:
        pytest.skip(str(unsupported))
    shape, experts = model.shape(), model.shape().experts
    held = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(model, {})}
    everything = sum(held.values())
    routed = 0 if experts is None else experts.num_layers * experts.num_experts * experts.expert_bytes
    assert shape.weight_bytes + routed + model.embedding.nbytes == everything
    assert (
        shape.attention_parameters
        == load_model(checkpoints[family], torch.float32, CPU, None).shape().attention_parameters
    )


def _tensors(thing, known: dict[int, object]):
    """All tensors that an object holds, but for the rotations, which are no weights."""
    if id(thing) in known:
        return
    known[id(thing)] = thing  # held, so that nothing else gets its id
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for name, value in thing.items():
            if name not in ("rope_tables", "_joined"):
                yield from _tensors(value, known)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _tensors(value, known)
    elif type(thing).__module__.startswith(("sojourn.engine.token.models", "sojourn.engine.compute", "torch.nn")):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from _tensors(getattr(thing, "__dict__", None) or {name: getattr(thing, name) for name in slots}, known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, KV_FP8])
@pytest.mark.parametrize("family", ["llama", "llama-one-kv-head", "deepseek-v3"])
def test_kv_is_counted_at_the_width_it_is_stored_in(family, dtype, checkpoints):
    model = load_model(checkpoints[family], torch.float32, CPU, None)
    cache = allocate(model.kv_layout, len(model.layers), 6, BLOCK, dtype, CPU)
    shape = model.shape(dtype)
    assert shape.kv_bytes_per_token == bytes_per_token(model.kv_layout, len(model.layers), dtype)
    assert cache.nbytes == 6 * BLOCK * shape.kv_bytes_per_token
    read = step_cost(shape, step_work(shape, [1], [95], 1)).moved_bytes - shape.weight_bytes
    if shape.experts is None:
        assert read == cache.nbytes + shape.kv_bytes_per_token  # all that it holds is read, one token is written


@pytest.mark.parametrize("settings", [{}, {"overlap": "on", "max_num_batched_tokens": 24}])
def test_records_tell_the_rows_of_logits_that_the_head_computed(settings, checkpoints):
    engine, published = make_engine(checkpoints["llama"], **settings)
    computed = []
    head = engine.runner.eager.model.head
    forward = head.forward
    head.forward = lambda x: computed.append(len(x)) or forward(x)
    hand_over(engine, [submit("a", [5] * 30, 6), submit("b", [7] * 11, 3, prompt_logprobs=1), submit("c", [9], 5)])
    drain(engine)
    assert sum(step.logit_rows for step in published.records) == sum(computed)
    assert sum(computed) == 6 + 3 + 5 + 10 + sum(step.overrun_tokens for step in published.records)
