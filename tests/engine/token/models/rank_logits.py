"""What each rank computes in the tests of parallel models. Imports little: every process of the pool imports it."""

from pathlib import Path

import numpy as np
import torch

from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.backends import make_attention, make_operations
from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ONE_PROCESS
from sojourn.engine.compute.kv_cache import allocate
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.techniques.lora.checkpoint.checkpoint import describe
from sojourn.engine.techniques.lora.checkpoint.fit import AdaptedModel
from sojourn.engine.techniques.lora.kernels.backend import LinearAdapters, LoraBackend, tiles_of
from sojourn.engine.techniques.lora.kernels.backends import make_lora
from sojourn.engine.token.models.registry import load_model
from tests.engine.compute.attention_inputs import attention_inputs

CPU, BLOCK, VOCABULARY = torch.device("cpu"), 16, 320
# (new tokens, past ones) of two sequences: prompts, a decode beside a chunk, decodes. Decodes come first.
STEPS = (((37, 5), (0, 0)), ((1, 3), (37, 5)), ((1, 1), (38, 8)))


def logits_of(
    model, layout=ONE_PROCESS, communicators=None, *, kernels: bool = False, lora: LoraBackend | None = None
) -> torch.Tensor | None:
    """Of the last token of each sequence and step, on the ranks of the first stage. The first sequence has the adapter
    of slot 1, the second one that of slot 0."""
    cache = allocate(model.kv_layout, len(model.layers), 8, BLOCK, model.dtype, CPU)
    tables, found = torch.tensor([[3, 1, 6], [2, 0, 5]]), []
    chosen = ("auto", CPU, model.dtype, model.dtype)
    backends = (make_operations(*chosen), make_attention(*chosen)) if kernels else (Operations(), TorchAttention())
    with torch.inference_mode():
        for new, past in STEPS:
            owners = [row for row, count in enumerate(new) for _ in range(count)]
            positions = torch.tensor([begin + i for n, begin in zip(new, past, strict=True) for i in range(n)])
            slots = tables[owners, positions // BLOCK] * BLOCK + positions % BLOCK
            contexts = [n + begin for n, begin in zip(new, past, strict=True)]
            backends[1].begin(attention_inputs(list(new), contexts, slots, tables, BLOCK))
            ids = (positions * 7 + torch.tensor(owners)) % (VOCABULARY - 1)
            last = torch.tensor([new[0] - 1, new[0] + new[1] - 1])
            if lora is not None:
                lora.begin(tiles_of([1, 0], new, lora.tile_tokens))
            hidden = _pass(model, layout, communicators, ids, positions, slots, last, backends, cache)
            if layout.is_first_stage:
                found.append(model.logits(hidden))
    return torch.cat(found) if found else None


def _pass(model, layout, communicators, ids, positions, slots, last, backends, cache) -> torch.Tensor | None:
    """The hidden states of the chosen rows, which the last stage sends to the first."""
    if layout.pipeline_parallel == 1:
        return model(ids, positions, slots, *backends, cache)[last]
    pipeline, size = communicators.pipeline, model.config.hidden_size
    if layout.is_first_stage:
        residual = model.embed(ids)
    else:
        residual = pipeline.recv(torch.empty(len(ids), size), pipeline.rank - 1).wait()
    x = model.run_layers(residual, positions, slots, *backends, cache)
    if layout.is_last_stage:
        pipeline.send(x[last].contiguous(), 0)
        return None
    pipeline.send(x, pipeline.rank + 1)
    if not layout.is_first_stage:
        return None
    return pipeline.recv(torch.empty(len(last), size), layout.pipeline_parallel - 1).wait()


def on_rank(layout, communicators, folder: Path, weights: str | None, kernels: bool):
    model = load_model(folder, torch.float32, CPU, None, weights=weights, layout=layout, communicators=communicators)
    counts = {name: count.calls for name, count in communicators.counts().items()}
    assert not counts, "nothing is exchanged before the first pass"
    logits = logits_of(model, layout, communicators, kernels=kernels)
    return None if logits is None else logits.numpy(), model.num_parameters


def with_adapters(
    layout, communicators, cases: dict[str, tuple[Path, list[Path]]], kernels: bool
) -> dict[str, tuple[np.ndarray | None]]:
    """Case → logits with the two adapters of a model."""
    found = {}
    for name, (folder, adapters) in cases.items():
        model = load_model(folder, torch.float32, CPU, None, layout=layout, communicators=communicators)
        adapted = AdaptedModel(model)
        lora = make_lora("auto" if kernels else "off", CPU, torch.float32, 2, 8, adapted.layers)
        for index, linear in enumerate(adapted.linears):
            linear.addition = LinearAdapters(lora, index)
        for slot, adapter in enumerate(adapters):
            lora.install(slot, lora.pack(adapted.read(describe(adapter))))
        logits = logits_of(model, layout, communicators, kernels=kernels, lora=lora)
        found[name] = (None if logits is None else logits.numpy(),)
    return found


def several(layout, communicators, cases: list[tuple[str, Path]], weights: str | None = None, kernels: bool = False):
    return {name: on_rank(layout, communicators_of(communicators), folder, weights, kernels) for name, folder in cases}


def communicators_of(communicators: Communicators) -> Communicators:
    """Without the counts of earlier cases."""
    for each in communicators:
        if each.size > 1:
            each._counter.__init__()
    return communicators
