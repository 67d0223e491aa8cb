"""Logits → ids on the device, without a sort: as engine.token.sampling.sampler draws, for the same ids.

Two launches. The first looks at chunks of the vocabulary, many at once: best logit, sum of weights, moments. The
second, a program a row, knows from those what may be left of the row, keeps it, and finds the thresholds of top-k and
top-p and then the drawn token by bisection: a token that stands at a given place, by number or by weight, in the order
from the most to the least probable, is found without putting the others in order. Weights are exp(logit - best) in
float32, their sums float64 in a fixed order: a row draws the same token in any company. The sampler's own weights are
float64: where its sum passes the target within some 1e-7 of a token's edge, the ids may differ.
"""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.logits import OVERFLOWED
from sojourn.engine.compute.triton.order import (
    above_key,
    key_of,
    least_key,
    place_by_rank,
    place_in_order,
    scale_of,
    weights_of,
)

CHUNK = 2048  # logits that one program looks at
CAPACITY = 8192  # logits that a row keeps aside at most; beyond, each pass reads the whole row
# Of a row of parameters, 64 bits each: temperature (0 is greedy), top_p, min_p and top_n_sigma (0 keeps all) as
# float64, top_k (0 keeps all) and seed as int64, and two unused.
COLUMNS = 8

_COLUMNS = tl.constexpr(COLUMNS)
_OVERFLOWED = tl.constexpr(OVERFLOWED)
_NONE = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _uniform(seed, position):
    """engine.token.sampling.sampler.uniform: the same bits."""
    state = seed.to(tl.uint64) * 0x9E3779B97F4A7C15 + (position + 1).to(tl.uint64) * 0xD1B54A32D192ED03
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return ((state ^ (state >> 31)) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _parameter(parameters_pointer, place, COLUMN: tl.constexpr):
    return tl.load(parameters_pointer + place * _COLUMNS + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def _select(values, low, maxima_pointer, num_chunks, vocab_size, selected_pointer, index_pointer, CHUNK: tl.constexpr,
          CAPACITY: tl.constexpr):  # fmt: skip
    """Writes the values from key `low` on, and their indices, in order; how many there are, though not all may fit."""
    size = tl.zeros((), tl.int32)
    for chunk in range(0, num_chunks):
        if key_of(tl.load(maxima_pointer + chunk)) >= low:
            offsets = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(values + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
            selected = key_of(x) >= low
            places = size + tl.cumsum(selected.to(tl.int32), axis=0) - 1
            fits = selected & (places < CAPACITY)
            tl.store(selected_pointer + places, x, mask=fits)
            tl.store(index_pointer + places, offsets, mask=fits)
            size += tl.sum(selected.to(tl.int32), axis=0)
    return size


@triton.jit
def _sigma(moments_pointer, chunks, inside):
    """Standard deviation of the finite logits of a row, out of number, mean and squared deviations of its chunks."""
    count = tl.load(moments_pointer + 3 * chunks, mask=inside, other=0.0)
    mean = tl.load(moments_pointer + 3 * chunks + 1, mask=inside, other=0.0)
    squares = tl.load(moments_pointer + 3 * chunks + 2, mask=inside, other=0.0)
    number = tl.sum(count, axis=0)
    center = tl.sum(count * mean, axis=0) / number
    return tl.sqrt(tl.sum(squares + count * (mean - center) * (mean - center), axis=0) / number)


@triton.jit(do_not_specialize_on_alignment=["rows_pointer"])  # or it would be compiled again while requests wait
def chunk_kernel(
    logits_pointer, edited_pointer, edited_rows_pointer, rows_pointer, parameters_pointer,
    maxima_pointer, best_pointer, masses_pointer, moments_pointer,
    vocab_size, logits_stride, num_chunks,
    EDITED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a row: its best logit and where it stands first, its sum of weights, and moments if asked for."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.load(rows_pointer + row).to(tl.int64)
    if place >= 0:
        offsets = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = offsets < vocab_size
        values = logits_pointer + row * logits_stride
        if EDITED:
            edited = tl.load(edited_rows_pointer + row).to(tl.int64)
            if edited >= 0:
                values = edited_pointer + edited * vocab_size
        x = tl.load(values + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.max(x, axis=0)
        first = tl.min(tl.where((x == best) & inside, offsets, vocab_size - 1), axis=0)
        scale = scale_of(_parameter(parameters_pointer, place, 0))
        finite = x > float("-inf")
        out = row * num_chunks + chunk
        tl.store(maxima_pointer + out, best)
        tl.store(best_pointer + out, first)
        tl.store(masses_pointer + out, tl.sum(weights_of(x, finite, best, scale), axis=0))
        sigmas = _parameter(parameters_pointer, place, 3)
        if (sigmas > 0) & (sigmas < float("inf")):
            wide = tl.where(finite, x, 0.0).to(tl.float64)
            count = tl.sum(finite.to(tl.int32), axis=0).to(tl.float64)
            mean = tl.sum(wide, axis=0) / tl.maximum(count, 1.0)
            squares = tl.sum(tl.where(finite, (wide - mean) * (wide - mean), 0.0), axis=0)
            tl.store(moments_pointer + 3 * out, count)
            tl.store(moments_pointer + 3 * out + 1, mean)
            tl.store(moments_pointer + 3 * out + 2, squares)


@triton.jit(do_not_specialize_on_alignment=["rows_pointer", "positions_pointer", "owners_pointer"])
def draw_kernel(
    logits_pointer, edited_pointer, edited_rows_pointer, rows_pointer, positions_pointer, parameters_pointer,
    maxima_pointer, best_pointer, masses_pointer, moments_pointer, selected_pointer, index_pointer, ids_pointer,
    owners_pointer, last_ids_pointer, vocab_size, logits_stride, num_chunks,
    EDITED: tl.constexpr, REMEMBER: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Draws the token of a row: -1 where nothing is left, OVERFLOWED where its logits are no numbers. REMEMBER writes
    it to the table of last ids, at the row that owns it, for the next step."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_pointer + row).to(tl.int64)
    token = tl.full((), -1, tl.int32)
    if place >= 0:
        values = logits_pointer + row * logits_stride
        if EDITED:
            edited = tl.load(edited_rows_pointer + row).to(tl.int64)
            if edited >= 0:
                values = edited_pointer + edited * vocab_size
        chunks = tl.arange(0, CHUNKS)
        inside = chunks < num_chunks
        maxima_row = maxima_pointer + row * num_chunks
        maxima = tl.load(maxima_row + chunks, mask=inside, other=float("-inf"))
        best = tl.max(maxima, axis=0)
        temperature = _parameter(parameters_pointer, place, 0)
        if best > float("-inf"):  # else its masks leave nothing
            if temperature == 0:
                firsts = tl.load(best_pointer + row * num_chunks + chunks, mask=inside, other=0)
                token = tl.min(tl.where((maxima == best) & inside, firsts, vocab_size - 1), axis=0)
            else:
                top_p = _parameter(parameters_pointer, place, 1)
                min_p = _parameter(parameters_pointer, place, 2)
                sigmas = _parameter(parameters_pointer, place, 3)
                top_k = tl.load(parameters_pointer + place * _COLUMNS + 4)
                seed = tl.load(parameters_pointer + place * _COLUMNS + 5)
                draw = _uniform(seed, tl.load(positions_pointer + row).to(tl.int64))
                scale = scale_of(temperature)
                masses = tl.load(masses_pointer + row * num_chunks + chunks, mask=inside, other=0.0)
                masses *= tl.exp2((maxima - best) * scale)
                mass = tl.sum(masses, axis=0)
                floors = (min_p > 0) | ((sigmas > 0) & (sigmas < float("inf")))
                if (top_k > 0) | (top_p < 1) | floors:
                    wide = best.to(tl.float64)
                    low = tl.full((), _NONE + 1, tl.int64)
                    if min_p > 0:
                        low = tl.maximum(low, least_key(wide + temperature * tl.log(min_p)))
                    if (sigmas > 0) & (sigmas < float("inf")):
                        sigma = _sigma(moments_pointer + row * num_chunks * 3, chunks, inside)
                        low = tl.maximum(low, least_key(wide - sigmas * sigma))
                    high = key_of(best) + 1
                    all_weight = tl.zeros((), tl.float64)
                    if (top_k > 0) & (top_k <= num_chunks):
                        # As many chunks have a token that is as good: what is below is not among the best.
                        least = tl.full((), _NONE, tl.int64)
                        most = high
                        while most - least > 1:
                            middle = least + (most - least) // 2
                            enough = tl.sum((key_of(maxima) >= middle).to(tl.int64), axis=0) >= top_k
                            least = tl.where(enough, middle, least)
                            most = tl.where(enough, most, middle)
                        low = tl.maximum(low, least)
                    elif (top_k == 0) & (top_p < 1) & (not floors):
                        # All tokens that are less probable than this, taken together, are less than top-p may cut.
                        # Half of it, so that no rounding matters.
                        all_weight = mass
                        share = 0.5 * (1.0 - top_p) * mass / vocab_size
                        low = tl.maximum(low, least_key(wide + tl.log(share) * temperature))
                    selected_row = selected_pointer + row * CAPACITY
                    index_row = index_pointer + row * CAPACITY
                    size = _select(
                        values, low, maxima_row, num_chunks, vocab_size, selected_row, index_row, CHUNK, CAPACITY
                    )
                    tl.debug_barrier()  # what some threads have written, others read
                    fits = size <= CAPACITY
                    if not fits:
                        size = vocab_size
                    if (top_k > 0) | (top_p < 1):
                        found = place_by_rank(
                            values,
                            selected_row,
                            fits,
                            size,
                            low,
                            high,
                            top_k,
                            top_p,
                            all_weight,
                            draw,
                            best,
                            scale,
                            CHUNK,
                        )
                    else:
                        weight, _ = above_key(values, selected_row, fits, size, low - 1, best, scale, CHUNK)
                        found = place_in_order(values, selected_row, fits, size, low, draw * weight, best, scale, CHUNK)
                    token = tl.where(fits, tl.load(index_row + found, mask=fits, other=0), found)
                else:
                    # First the chunk in which the sum of weights passes the target, then the place in it.
                    target = draw * mass
                    sums = tl.cumsum(masses, axis=0)
                    chunk = tl.min(tl.where((sums > target) & (masses > 0), chunks, CHUNKS), axis=0)
                    chunk = tl.minimum(chunk, tl.max(tl.where(masses > 0, chunks, 0), axis=0))
                    mine = chunks == chunk
                    before = tl.sum(tl.where(mine, sums - masses, 0.0), axis=0)
                    own_best = tl.max(tl.where(mine, maxima, float("-inf")), axis=0)
                    rest = (target - before) / tl.exp2((own_best - best) * scale)
                    begin = chunk * CHUNK
                    size = tl.minimum(vocab_size - begin, CHUNK)
                    token = begin + place_in_order(
                        values + begin, selected_pointer, False, size, _NONE + 1, rest, own_best, scale, CHUNK
                    )
            token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)  # whatever numbers the model gave
        # A hidden state that is no number makes every logit of its row none: two of them tell.
        own = logits_pointer + row * logits_stride
        first, last = tl.load(own).to(tl.float32), tl.load(own + vocab_size - 1).to(tl.float32)
        token = tl.where((first != first) & (last != last), _OVERFLOWED, token)
    tl.store(ids_pointer + row, token.to(tl.int64))
    if REMEMBER:
        owner = tl.load(owners_pointer + row).to(tl.int64)
        tl.store(last_ids_pointer + owner, tl.maximum(token, 0), mask=owner >= 0)


def draw_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: torch.Tensor,
    edited: torch.Tensor | None = None,
    edited_rows: torch.Tensor | None = None,
    *,
    remember: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk: int = CHUNK,
    capacity: int = CAPACITY,
) -> torch.Tensor:
    """Logits [rows, vocab_size] → ids [rows] int64: -1 where nothing is left to draw, OVERFLOWED where the logits are
    no numbers. Logits that are edited are float32; others may have 16 bits.

    `rows` [rows]: where each finds its controls in `parameters` [max_rows, COLUMNS] int64; -1 is padding and draws -1.
    `positions` [rows]: where the drawn tokens will stand in their sequences. `edited` [edited, vocab_size] takes the
    place of the logits of row i where `edited_rows` [rows] int32 says which of its rows does, and not -1. `remember`
    are owners [rows] int32 and a table [max_rows] int32, which gets each owner's id, or 0 for an id below 0. The grid
    depends on the shapes alone and nothing waits for the device, so that a CUDA graph can hold it.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return ids
    assert logits.stride(1) == 1 and (edited is None or logits.dtype == torch.float32), "rows of neighbours"
    owners, last_ids = remember or (None, None)
    num_chunks = triton.cdiv(vocab_size, chunk)

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    maxima, best = room(torch.float32, num_chunks), room(torch.int32, num_chunks)
    masses, moments = room(torch.float64, num_chunks), room(torch.float64, num_chunks, 3)
    selected, index = room(torch.float32, capacity), room(torch.int32, capacity)
    chunk_kernel[(num_rows, num_chunks)](
        logits, edited, edited_rows, rows, parameters, maxima, best, masses, moments,
        vocab_size, logits.stride(0), num_chunks, EDITED=edited is not None, CHUNK=chunk,
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, edited, edited_rows, rows, positions, parameters, maxima, best, masses, moments, selected, index, ids,
        owners, last_ids, vocab_size, logits.stride(0), num_chunks,
        EDITED=edited is not None, REMEMBER=remember is not None, CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(num_chunks), CAPACITY=capacity,
        num_warps=8,
    )  # fmt: skip
    return ids
