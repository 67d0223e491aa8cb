"""The attention kernels compile for compute capability 9.0, and fit a multiprocessor with hardly a register spilled.

What the interpreter does not see: types that do not go together, and tiles that are too large.
"""

from dataclasses import asdict, replace

import pytest

from tests.engine.compute.triton_harness import SHARED_LIMIT_BYTES, Compilation, compile_for_hopper

pytest.importorskip("triton")

from sojourn.engine.compute.attention.triton_backend import Kind
from sojourn.engine.compute.triton.attention_tiles import Shape, Tiles, long_tiles, padded, short_tiles

REGISTERS = 65_536  # of a multiprocessor
SPILLED_BYTES = 64  # of a thread: a few registers that one of the supported compilers has not found room for
TYPES = {1: "fp8e4nv", 2: "bf16", 4: "fp32"}
BYTES = ((2, 2), (2, 1), (4, 4))
SIZES = [Shape(4, head_dim, head_dim, *sizes) for head_dim in (64, 80, 128, 256) for sizes in BYTES]
LATENT = [Shape(group, 576, 512, *sizes) for group in (16, 128) for sizes in BYTES]
USUAL = Shape(2, 128, 128, 2, 2)


def attend(
    shape: Shape,
    tiles: Tiles,
    window: int = 0,
    sloped: bool = False,
    block_size: int = 16,
    capped: bool = False,
    kv_format: int | None = None,
    sink_tokens: int = 0,
) -> Compilation:
    """What TritonAttention would have compiled."""
    latent = shape.value_dim < shape.head_dim
    if kv_format is None:
        kv_format = 1 if shape.kv_bytes == 1 else 0
    query = f"*{TYPES[shape.query_bytes]}:16"
    kept = (query, "*fp8e4nv:16", "*i8:16", "*u8:16")[kv_format]
    scales = (None, "*fp32:16", "*fp32:16", "*bf16:16")[kv_format]
    pointers = {
        "query": query, "keys": kept, "values": None if latent else kept,
        "key_scales": scales, "value_scales": scales,
        "slopes": "*fp32:16" if sloped else None, "sinks": query if capped else None, "output": query,
        "partial_output": "*fp32:16", "partial_lse": "*fp32:16", "arrivals": "*i32:16", "block_tables": "*i32",
        "table_rows": "*i32", "query_start": "*i32", "contexts": "*i32", "items": "*i32:16",
    }  # fmt: skip
    signature = {name: kind for name, kind in pointers.items() if kind is not None} | {
        "scale_log2": "fp32", "query_token_stride": "i32:16", "query_head_stride": "i32:16", "table_stride": "i32",
    }  # fmt: skip
    kind = Kind(tiles != long_tiles(shape), tiles, 1 if latent else 8, shape.group, padded(shape.value_dim), 0, 1, 1)
    constants = dict.fromkeys(name for name, kind in pointers.items() if kind is None) | {
        "NUM_KV_HEADS": 1 if latent else 8, "GROUP": shape.group, "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim, "MAIN": padded(shape.value_dim),
        "REST": padded(shape.head_dim - shape.value_dim) if latent else 0, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_SIZE": block_size, "TOKEN_STRIDE": 1,
        "HEAD_STRIDE": block_size, "WINDOW": window, "SINK_TOKENS": sink_tokens,
        "SOFT_CAP": 400.0 if capped else 0.0, "SLOPED": sloped,
        "LATENT": latent, "FORMAT": kv_format, "WIDE": shape.wide, "TWO_LOOPS": tiles.two_loops and window == 0,
        "ROWS": kind.combined[0], "SEGMENTS": kind.combined[1],
    }  # fmt: skip
    kernel = "sojourn.engine.compute.triton.attention:attend_kernel"
    return Compilation(kernel, signature, constants, tiles.num_warps, tiles.num_stages)


def plan(window: int, ragged: bool) -> Compilation:
    numbers = (
        "num_sequences", "least_new", "most_new", "target", "places", "least_tiles", "most_extra", "search_steps",
        "max_items",
    )  # fmt: skip
    signature = {"query_start": "*i32", "contexts": "*i32", "plan": "*i32:16", "items": "*i32:16"}
    constants = {"NUM_KV_HEADS": 8, "GROUP": 2, "BLOCK_M": 16, "BLOCK_N": 64, "WINDOW": window, "SLACK": 1,
                 "RAGGED": ragged, "CHUNK": 128}  # fmt: skip
    kernel = "sojourn.engine.compute.triton.attention_plan:plan_kernel"
    return Compilation(kernel, signature | dict.fromkeys(numbers, "i32"), constants)


def check(compilations: list[tuple[Compilation, int]]) -> None:
    """Compilations, and how many programs of each a multiprocessor is meant to hold."""
    found = compile_for_hopper([item for item, _ in compilations])
    unfit = [
        f"{asdict(item)}: {resources}"
        for (item, resident), resources in zip(compilations, found, strict=True)
        if resources.local_bytes > SPILLED_BYTES
        or resident * resources.shared_bytes > SHARED_LIMIT_BYTES
        or resident * item.num_warps * 32 * resources.registers > REGISTERS
    ]
    assert not unfit, "\n".join(unfit)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_choice_of_tiles_fits_the_device_and_hardly_spills():
    choices = []
    for shape in [*SIZES, *LATENT, replace(USUAL, wide=True)]:
        for tiles in dict.fromkeys([*(short_tiles(shape, num_new) for num_new in (1, 5, 8)), long_tiles(shape)]):
            choices.append((attend(shape, tiles), tiles.resident))
    for tiles in (short_tiles(USUAL, 1), long_tiles(USUAL)):
        choices.append((attend(USUAL, tiles, window=512), tiles.resident))
        choices.append((attend(USUAL, tiles, window=512, sink_tokens=4), tiles.resident))
        choices.append((attend(USUAL, tiles, window=512, capped=True), tiles.resident))
        choices.append((attend(replace(USUAL, group=3), tiles, sloped=True, block_size=64), tiles.resident))
    for kv_format in (2, 3):  # fp8 is in SIZES
        shape = replace(USUAL, kv_bytes=1)
        for tiles in (short_tiles(shape, 1), long_tiles(shape)):
            choices.append((attend(shape, tiles, kv_format=kv_format), tiles.resident))
    check(choices)


@pytest.mark.slow
def test_the_planning_kernel_compiles():
    check([(item, 1) for item in (plan(0, True), plan(512, True), plan(0, False))])


@pytest.mark.slow
def test_the_usual_shape_runs_on_tensor_cores_with_keys_and_values_on_their_way():
    short, long = short_tiles(USUAL, 1), long_tiles(USUAL)
    decode, prompt = compile_for_hopper([attend(USUAL, short), attend(USUAL, long)])
    assert decode.instructions["HMMA"] and prompt.instructions["HGMMA"]
    # Two tiles of keys and of values are held at once: one is read while the other comes.
    assert decode.shared_bytes >= 2 * 2 * short.block_n * 128 * 2
    assert prompt.shared_bytes >= 2 * 2 * long.block_n * 128 * 2
