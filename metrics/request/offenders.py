"""What a blame matrix is computed from: a run's steps and waits, and who is to blame for what in each step."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sojourn.metrics.compute.cost_model import ModelShape, shape_from
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNT_BY_NAME
from sojourn.metrics.request.stalls import Stalls, stalls_of
from sojourn.metrics.request.timeline import NOBODY, Timeline, prompt_flops, timeline
from sojourn.metrics.request.waits import Family, Waits, next_preemption, waits
from sojourn.metrics.run.directory import RunDirectory, engine_settings

WAIT_ACCOUNTS = ("request.queue", "memory.blocked", "request.interference", "memory.preempted")
BLOCK_SIZE = 16  # where run.json names none
BANDS = (128, 512, 2048, 8192)  # prompt tokens: upper bounds
BAND_NAMES = [f"{below + 1:,} to {above:,} tokens" for below, above in pairwise((0, *BANDS))]
BAND_NAMES.append(f"over {BANDS[-1]:,} tokens")
MOST_ENTRIES = 10_000_000  # requests in steps, summed over the steps: some 2.5 GB of memory


class TooLarge(RunDataError):
    """A run whose book would not fit in memory."""


@dataclass(frozen=True, slots=True)
class Book:
    """Made by `open_book`; `metrics.request.blame` reads it.

    The timeline, the waits and the requests of `clocked` are on a clock that stands while the engine does (`stalls`).
    Entries are those of the timeline, and one for each step that a running request had no part in, in the order of
    steps. Shares sum to 1 over the entries of a step, or to 0 where nobody is to blame.
    """

    line: Timeline
    waits: Waits
    stalls: Stalls
    requests: pd.DataFrame
    clocked: pd.DataFrame  # the requests
    booked_ns: np.ndarray  # [R, 4] the ledger's WAIT_ACCOUNTS
    at: np.ndarray  # [E] step
    who: np.ndarray  # [E] sequence
    inter_ns: np.ndarray  # [E] of the step's work that is this entry's prompt: what it costs every other member
    share: dict[Family, np.ndarray]  # [E] each
    own_ns: np.ndarray  # [R] what a victim's prompts cost itself


def book_of(run: RunDirectory, steps: pa.Table | None = None) -> Book | None:
    """The book of a run directory; None where its server recorded no step or no request. `steps` stands in for its own.

    Raises RunDataError where it cannot be read, and TooLarge above MOST_ENTRIES."""
    if steps is None:
        _refuse_too_large(run, sum(map(_written_entries, run.sources("steps"))))
    steps, meta = run.arrow("steps") if steps is None else steps, run.meta()
    if not len(steps):
        return None
    _refuse_too_large(run, pc.sum(pc.list_value_length(steps["request_ids"])).as_py() or 0)
    requests = run.table("requests")
    if not len(requests):
        return None
    requests = requests.drop_duplicates("request_id", keep="last", ignore_index=True)
    try:
        shape = shape_from(meta)
    except msgspec.ValidationError:  # of another version: tokens stand in
        shape = None
    return open_book(steps, requests, shape, engine_settings(meta).get("block_size") or BLOCK_SIZE)


def _refuse_too_large(run: RunDirectory, entries: int) -> None:
    if entries > MOST_ENTRIES:
        raise TooLarge(
            f"{run.path} has {entries:,} shares of requests in steps, and who delayed whom is worked out for at most "
            f"{MOST_ENTRIES:,}: record a shorter run"
        )


def _written_entries(file: Path) -> int:
    """Requests in the steps of a Parquet file, by what it says of itself: at least, and 0 of a file of another kind."""
    if file.suffix != ".parquet":
        return 0
    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return 0  # whoever reads its rows says what is wrong
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    counts = ((group.column(place), group.num_rows) for group in groups for place in range(group.num_columns))
    return sum(column.num_values - rows for column, rows in counts if column.path_in_schema.startswith("request_ids."))


def open_book(steps: pa.Table, requests: pd.DataFrame, shape: ModelShape | None, block_size: int = BLOCK_SIZE) -> Book:
    """Reads a `steps` table, and `requests` as a run directory gives them: the time of stalls is in `compute.stall`.
    `shape` gives the FLOPs of prompts; without it tokens stand in."""
    line, clocked = timeline(steps), requests
    stalls = stalls_of(line, steps)
    if len(stalls):
        line, clocked = stalls.off(line), stalls.off_requests(requests)
    found = waits(line, clocked)
    prompts = dict(zip(requests.request_id, requests.prompt_tokens.fillna(0).astype("int64"), strict=True))
    flops = prompt_flops(line, shape, prompts)
    at, who, place = _with_absent(line)
    real = len(line.at)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros(len(at) - real)])

    def shares(weights: np.ndarray) -> np.ndarray:
        total = np.bincount(at, weights=weights, minlength=len(line))[at]
        return np.divide(weights, total, out=np.zeros(len(at)), where=total > 0)

    prompt_work = np.bincount(line.at, weights=flops, minlength=len(line))
    decodes = np.bincount(line.at, weights=~line.is_prompt, minlength=len(line))
    decode_work = np.maximum(line.flops - prompt_work, 0) / np.maximum(decodes, 1)
    work = np.where(line.is_prompt, flops, decode_work[line.at])
    total = np.maximum(line.flops, prompt_work)[line.at]
    inter_ns = line.work_ns[line.at] * np.divide(flops, total, out=np.zeros(real), where=total > 0)
    blocks = -(-(line.past + line.new)[place] // block_size)
    tokens, prompting = padded(line.new), padded(np.where(line.is_prompt, line.new, 0))
    places = np.ones(len(at))
    has_prompts = np.bincount(at, weights=prompting, minlength=len(line)) > 0
    prompts_or_all = np.where(has_prompts[at], prompting, places)
    of_reason = {"batch_cap": places, "token_budget": tokens, "kv_blocks": blocks, "policy": prompts_or_all}
    in_line = np.zeros(len(at))
    for reason, weights in of_reason.items():
        chosen = (line.reason == reason)[at]
        in_line[chosen] = weights[chosen]
    by_family = {
        Family.LINE: in_line,
        Family.ASIDE: prompts_or_all,
        Family.SLOT: places,
        Family.UNDER_WAY: padded(work),
        Family.PREEMPTED: blocks.astype("float64"),
    }
    columns = [f"ledger_{ACCOUNT_BY_NAME[name].column}" for name in WAIT_ACCOUNTS]
    order = np.argsort(at, kind="stable")
    return Book(
        line=line,
        waits=found,
        stalls=stalls,
        requests=requests,
        clocked=clocked,
        booked_ns=requests[columns].astype("float64").fillna(0).to_numpy(),
        at=at[order],
        who=who[order],
        inter_ns=padded(inter_ns)[order],
        share={family: shares(weights)[order] for family, weights in by_family.items()},
        own_ns=np.bincount(found.entry_victim, weights=inter_ns[found.entry], minlength=len(requests)),
    )


def _with_absent(line: Timeline) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries for everybody who had a place: step and sequence, and the entry of the timeline that tells what it holds.

    Who is not in a step and had not lost his place before it was absent.
    """
    order = np.lexsort((line.at, line.who))
    at, who = line.at[order], line.who[order]
    last = np.diff(who, append=NOBODY) != 0
    until = np.minimum(np.where(last, at + 1, np.append(at[1:], 0)), next_preemption(line, who, at))
    absent = np.maximum(until - at - 1, 0)
    which = np.repeat(np.arange(len(at)), absent)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(absent) - absent, absent)
    place = np.concatenate([np.arange(len(line.at)), order[which]])
    return np.concatenate([line.at, at[which] + 1 + nth]), np.concatenate([line.who, who[which]]), place


def described(requests: pd.DataFrame) -> pd.DataFrame:
    """Tenant, class, prompt tokens and their band of each request, by its id."""
    tokens = requests.prompt_tokens.astype("float64")
    facts = {"tenant": requests.tenant.fillna(""), "klass": requests.klass.fillna(""), "prompt_tokens": tokens}
    facts["band"] = pd.cut(tokens.fillna(0), (-np.inf, *BANDS, np.inf), labels=BAND_NAMES).astype(object)
    return pd.DataFrame(facts).set_index(pd.Index(requests.request_id, name="request_id"))


@dataclass(frozen=True, slots=True)
class Places:
    """Spans of waiting on an axis of slices: the shares of step k hold through its slice, until that of k + 1."""

    victim: np.ndarray
    length_ns: np.ndarray  # [N] of the slices
    first: np.ndarray  # [spans] slice of the begin
    first_ns: np.ndarray  # [spans] how far the begin lies in its slice
    last: np.ndarray
    last_ns: np.ndarray

    def integral(self, rate: np.ndarray) -> np.ndarray:
        """[spans] nanoseconds of a share [N] that holds through each slice."""
        upto = np.append(0.0, np.cumsum(rate * self.length_ns))
        return upto[self.last] - upto[self.first] + self.last_ns * rate[self.last] - self.first_ns * rate[self.first]

    def covered_ns(self) -> np.ndarray:
        """[N] time of all victims together in each slice."""
        size = len(self.length_ns)
        through = np.cumsum(np.bincount(self.first, minlength=size) - np.bincount(self.last, minlength=size))
        before = np.bincount(self.first, weights=self.first_ns, minlength=size)
        return through * self.length_ns - before + np.bincount(self.last, weights=self.last_ns, minlength=size)


def slices(line: Timeline, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Begin and length [N] of the slices of a family, in ns: its shares change with each plan, but those of a step
    under way hold until the device is done with it."""
    if family is Family.UNDER_WAY:
        begins, end = np.append(line.device_begin_ns[:1], line.device_end_ns[:-1]), line.device_end_ns[-1:]
    else:
        begins, end = line.planned_ns, np.maximum(line.end_ns[-1:], line.planned_ns[-1:])
    return begins, np.diff(np.append(begins, end))


def places(book: Book, family: Family) -> Places:
    """Where the spans of a family lie, but for those that one request alone is the reason of."""
    spans = book.waits.spans
    spans = spans[(spans.family == family) & (spans.taker == NOBODY)]
    begins, length = slices(book.line, family)

    def place(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.clip(np.searchsorted(begins, moments, side="right") - 1, 0, len(begins) - 1)
        return at, np.clip(moments - begins[at], 0, length[at])

    return Places(spans.victim, length, *place(spans.begin_ns), *place(spans.end_ns))
