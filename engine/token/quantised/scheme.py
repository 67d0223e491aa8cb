"""What a checkpoint format is to the loader, and how its tensors are gathered into matrices."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.metrics.errors import ModelError

log = logging.getLogger(__name__)

# Of the KV cache: this engine's scales are those of each token and head.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".output_scale")
SMALL = (
    "g_idx",
    ".bias",
    ".weight_shape",
)  # endings of tensors that an outline reads: what becomes of their layer depends on them

Parts = dict[str, torch.Tensor]  # by suffix, such as ".qweight"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One checkpoint format, as the `quantization_config` of one checkpoint says it."""

    name: str  # such as awq
    suffixes: tuple[str, ...]  # of the tensors that only quantised modules have
    # (module, its tensors) → the matrix. Tensors may be of the meta device, but for SMALL ones. Raises ModelError.
    matrix: Callable[[str, Parts], QuantisedMatrix]
    # (module, outputs, inputs) → an outline of its matrix; None where the module is not quantised. For random weights.
    outline: Callable[[str, int, int], QuantisedMatrix | None]
    weight: str = ".weight"  # suffix of the weight's name; a tensor of that name is a part of a quantised module, too


def gathered(
    scheme: WeightScheme, names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | QuantisedMatrix]]:
    """Each tensor of a checkpoint with its name; those of one quantised module as one matrix. Raises ModelError."""
    names = list(names)
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if (suffix := next((s for s in scheme.suffixes if name.endswith(s)), None)) is not None:
            parts[name.removesuffix(suffix)].append(suffix)
    known = set(names)
    for module, suffixes in parts.items():
        if module + scheme.weight in known:
            suffixes.append(scheme.weight)
    done, cache_scales = set(), 0
    for name in names:
        module = next((name.removesuffix(s) for s in (*scheme.suffixes, scheme.weight) if name.endswith(s)), None)
        if module in parts:
            if module not in done:
                done.add(module)
                yield module + scheme.weight, _matrix(scheme, module, {s: read(module + s) for s in parts[module]})
        elif name.endswith(CACHE_SCALES):
            cache_scales += 1
        else:
            tensor = read(name)
            if tensor.element_size() == 1 and tensor.dim() > 1:
                raise ModelError(f"tensor {name} is {tensor.dtype}, but the checkpoint has no scales for it")
            yield name, tensor
    if cache_scales:
        log.info("%d scales of the KV cache are not used: kv_cache_dtype scales each token and head", cache_scales)


def _matrix(scheme: WeightScheme, module: str, tensors: Parts) -> QuantisedMatrix:
    matrix = scheme.matrix(module, tensors)
    matrix.check(module + scheme.weight)
    return matrix


def needed(
    module: str, tensors: Parts, suffix: str, dtype: torch.dtype | None = None, dim: int | None = 2
) -> torch.Tensor:
    """A part of a module. Raises ModelError where it is missing, or of another kind; `dim` None allows any."""
    tensor = tensors.get(suffix)
    if tensor is None:
        raise ModelError(f"tensor {module}{suffix} is missing; {', '.join(sorted(tensors))} of that layer are there")
    if dim is not None and tensor.dim() != dim:
        raise ModelError(f"tensor {module}{suffix} has shape {list(tensor.shape)}; expected are {dim} dimensions")
    if dtype is not None and tensor.dtype != dtype:
        raise ModelError(f"tensor {module}{suffix} is {tensor.dtype}, expected {dtype}")
    return tensor


def expect_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    if list(tensor.shape) != list(shape):
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")


def num_groups(module: str, inputs: int, group: int) -> int:
    if inputs % group:
        raise ModelError(f"layer {module} has {inputs} inputs, which its group size {group} does not divide")
    return inputs // group


def scale_grid(
    name: str, scales: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None = None
) -> tuple[torch.Tensor, int]:
    """Scales of a matrix, of one output, of blocks [outputs, inputs], or of groups → [out, in / group] float32, and the
    group. Raises ModelError."""
    outputs, inputs = shape
    scales = scales.float()
    if block is not None:
        expect_shape(name, scales, -(-outputs // block[0]), -(-inputs // block[1]))
        group = math.gcd(block[1], inputs)  # the last block may be narrower
        columns = scales.repeat_interleave(block[1] // group, dim=1)[:, : inputs // group]
        return columns.repeat_interleave(block[0], dim=0)[:outputs].contiguous(), group
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
    scales = scales[:, None] if scales.dim() == 1 else scales
    if scales.dim() != 2 or scales.shape[0] != outputs or inputs % scales.shape[1]:
        raise ModelError(
            f"tensor {name} has shape {list(scales.shape)}, which is no grid of scales for a weight of {list(shape)}"
        )
    return scales.contiguous(), inputs // scales.shape[1]


def outlined_matrix(
    outputs: int, inputs: int, dtype: torch.dtype, bits: int, group: int | None, *, zeros: bool = False,
    activations: str | None = None, static: bool = False,
) -> QuantisedMatrix:  # fmt: skip
    """A matrix of the meta device, for random weights; `group` None is one scale an output."""
    group = inputs if group is None else group
    if inputs % group:
        raise ModelError(f"group size {group} of config.json does not divide the {inputs} inputs of a layer")
    scales = torch.empty(outputs, inputs // group, device="meta")
    return QuantisedMatrix(
        torch.empty(outputs, inputs, dtype=dtype, device="meta"), scales, scales if zeros else None, group, bits,
        activations=activations, activation_scale=torch.empty((), device="meta") if static else None,
    )  # fmt: skip
