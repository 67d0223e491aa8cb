"""The record of one engine step: what every step has, and parts that only some steps have.

A part is a column family of the table `steps`: a step without it has the default in each of its columns.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec


class Part(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """Columns that stand and fall together."""


class Costs(Part):
    """The core leaves them out: they are set where the record arrives (metrics/compute/step_costs.py)."""

    flops: int = 0
    bytes: int = 0
    predicted_ns: int | None = None  # device time that the step model expects; None until it has seen enough steps
    flops_attention: int = 0  # its projections, scores and mixing; the three parts sum to `flops`
    flops_mlp: int = 0  # routers and the chosen experts too
    flops_head: int = 0


class Preemptions(Part):
    """Of each of `preempted_ids`: the request that needed the blocks (itself, if nobody else could give way), and the
    computed positions that were in them."""

    preempted_ids: list[str] = []
    preempted_for: list[str] = []
    preempted_tokens: list[int] = []


class Reuse(Part):
    """Since the step before, of a sample of the cached prefix blocks: last reader gone → read again; other blocks in
    use or given back meanwhile, when one was asked for again; filled → evicted; last reader gone → evicted."""

    reuse_gap_ns: list[int] = []
    reuse_distance_blocks: list[int] = []
    evicted_age_ns: list[int] = []
    evicted_idle_ns: list[int] = []
    shadow_evicted_blocks: int = 0  # known prefixes that the shadow index had no room for any more


class Distribution(Part):
    """Of sampled tokens: see engine/token/sampling/entropy.py."""

    entropy_millinats: list[int] = []
    nucleus_mass_ppm: list[int] = []  # what truncation left of the distribution


class Drafts(Part):
    """Speculation: the drafts that the step verified, at the first, second … position behind a known token; what came
    of them; and what the step asked the proposer for. `draft_ns` lies behind the device's time and before the gap."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = []
    accepted_by_position: list[int] = []
    drafts_wanted: int = 0  # for the next step, at most
    draft_ns: int = 0  # of the proposer
    draft_flops: int = 0  # its work, which is not in `flops`
    draft_bytes: int = 0  # that it moved at least; not in `bytes`
    undrafted: dict[str, int] = {}  # of UNDRAFTED → requests that sampled and were given no drafts


class Adapters(Part):
    """LoRA adapters of its tokens: how many, those that it put into a slot, and those that left one for them; their
    part of `flops` and of `bytes`."""

    adapter_slots: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    flops_adapters: int = 0
    adapter_bytes: int = 0


class Tiers(Part):
    """KV tiers: parts of the device's time, for blocks from and to host memory; and by tier, since the step before:
    bytes and nanoseconds of its reads and writes, those that failed, and the blocks that it holds now."""

    load_ns: int = 0
    store_ns: int = 0
    tier_loaded_bytes: dict[str, int] = {}
    tier_stored_bytes: dict[str, int] = {}
    tier_load_ns: dict[str, int] = {}
    tier_store_ns: dict[str, int] = {}
    tier_failures: dict[str, int] = {}
    tier_refused: dict[str, int] = {}  # blocks for which a tier had no room
    tier_blocks: dict[str, int] = {}
    leases_ended: dict[str, int] = {}  # of LEASE_ENDS → leases


class Group(Part):
    """A parallel group: parts of the device's time of rank 0 for exchanges with other ranks, and for waiting until the
    stages behind the first are done; by COLLECTIVES the bytes and nanoseconds of its exchanges, and the hidden ones.
    And by rank what it reported since the step before: nanoseconds in which it computed, exchanged, and waited for a
    stage.

    An exchange is hidden while it is under way and neither of its two ranks stands for it. Only those count that both
    ranks reported since the step before.
    """

    communication_ns: int = 0
    bubble_ns: int = 0
    exchanged_bytes: dict[str, int] = {}
    exchange_ns: dict[str, int] = {}
    exchange_hidden_ns: dict[str, int] = {}
    rank_busy_ns: list[int] = []
    rank_communication_ns: list[int] = []
    rank_bubble_ns: list[int] = []


class Experts(Part):
    """Of a sample of the steps: tokens that each routed expert got, all layers together; and by layer the most that an
    expert got over the mean."""

    expert_tokens: list[int] = []
    expert_imbalance_percent: list[int] = []


class StepRecord(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """One engine step. `stages` are exclusive host times in the order of STAGES and sum to `end_ns - begin_ns`.

    Where steps overlap, the stages are those of the turns in which this step was read: `schedule` to `launch` are of
    the step after it. The device's time is its own; with the gaps before it, it sums over steps to the wall time.

    Columns of parts can be read as attributes, also where the step lacks the part. They are set in the parts.
    """

    step: int
    begin_ns: int
    end_ns: int
    stages: list[int]
    device_ns: int
    request_ids: list[str]
    new_tokens: list[int]
    past_tokens: list[int]
    kinds: list[str]
    padding_tokens: int
    graph: str  # "eager", or the bucket that was replayed
    budget: int  # tokens that the step could have held
    waiting: int  # requests not admitted when the step was planned
    refusals: dict[str, int]  # reason → waiting requests that it held back
    evicted_blocks: int
    blocks_free: int
    blocks_active: int
    blocks_reusable: int
    gap_ns: int = 0  # before it the device had nothing to do, since its last step or since the loop awoke
    overrun_tokens: int = 0  # computed for requests that had ended: their next token was under way already
    emitted_tokens: int = 0  # that it gave to requests
    slots_written: int = 0  # token positions written in active blocks, shared ones once: of blocks_active * block size
    planned_ns: int | None = None  # when it was decided what it holds
    device_end_ns: int | None = None  # when the device was done with it
    sampling_ns: int | None = None  # the last part of the device's time: logits → ids; a graph draws within itself
    logit_rows: int = 0  # rows of logits that were computed: of draws, and of prompt tokens that are scored
    costs: Costs | None = None
    preemptions: Preemptions | None = None
    reuse: Reuse | None = None
    distribution: Distribution | None = None
    drafts: Drafts | None = None
    adapters: Adapters | None = None
    tiers: Tiers | None = None
    group: Group | None = None
    experts: Experts | None = None

    def __getattr__(self, name: str) -> Any:
        """A column of a part."""
        try:
            part = getattr(self, PART_OF[name])
        except KeyError:
            raise AttributeError(f"a step record has no {name}") from None
        return default_of(name) if part is None else getattr(part, name)

    @classmethod
    def of(cls, **columns: Any) -> "StepRecord":
        """From its columns, those of parts among them."""
        parts: dict[str, dict[str, Any]] = {}
        for name in [name for name in columns if name in PART_OF]:
            parts.setdefault(PART_OF[name], {})[name] = columns.pop(name)
        columns |= {part: PARTS[part](**values) for part, values in parts.items()}
        return cls(**columns)

    def columns(self) -> dict[str, Any]:
        """By COLUMNS."""
        return {name: getattr(self, name) for name in COLUMNS}

    def with_columns(self, **changes: Any) -> "StepRecord":
        """A copy with other values in these columns."""
        return StepRecord.of(**(self.columns() | changes))


def _part_type(field: msgspec.structs.FieldInfo) -> type[Part] | None:
    named = getattr(field.type, "__args__", ())
    return next((each for each in named if isinstance(each, type) and issubclass(each, Part)), None)


_FIELDS = msgspec.structs.fields(StepRecord)
PARTS: dict[str, type[Part]] = {field.name: part for field in _FIELDS if (part := _part_type(field)) is not None}
PART_OF = {column: name for name, part in PARTS.items() for column in part.__struct_fields__}
_CORE = tuple(field.name for field in _FIELDS if field.name not in PARTS)
COLUMNS = (*_CORE, *PART_OF)
_RECORDS: list[type[msgspec.Struct]] = [StepRecord, *PARTS.values()]
TYPES = {
    field.name: field.type for record in _RECORDS for field in msgspec.structs.fields(record)
    if field.name not in PARTS
}  # fmt: skip
_ABSENT = {name: part() for name, part in PARTS.items()}


def default_of(column: str) -> Any:
    """Of a column of a part that a step lacks. A container is a new one."""
    value = getattr(_ABSENT[PART_OF[column]], column)
    return type(value)() if isinstance(value, list | dict) else value


def values_of(records: Sequence[StepRecord], column: str) -> Iterable[Any] | None:
    """One column of many records. None: it belongs to a part that all of them lack."""
    if column not in PART_OF:
        return map(attrgetter(column), records)
    parts = list(map(attrgetter(PART_OF[column]), records))
    missing = parts.count(None)
    if missing == len(parts):
        return None
    if missing:
        absent = _ABSENT[PART_OF[column]]
        parts = [part or absent for part in parts]
    return map(attrgetter(column), parts)
