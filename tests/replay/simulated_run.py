"""Runs of the engine over the simulated device, driven as the core drives it, and the records of them."""

import random
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.memory.prefix_outcomes import PrefixReport
from sojourn.metrics.records import ClientRecord, RequestRecord
from sojourn.metrics.records.tables import columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table
from sojourn.replay.recorded import SCHEDULE_FILE
from tests.engine.simulated import Simulation

TICK = 1000  # ns of the virtual clock between two readings
OPTIONAL = ("max_prefill_chunk_tokens", "prefill_patience")
DEFAULTS = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@dataclass
class Ask:
    """One request of a client. Moments are ns."""

    id: str
    due_ns: int
    prompt: list[int]
    max_tokens: int
    leaves_ns: int | None = None  # after its due moment, unless the answer has ended
    priority: int = 0
    choices: int = 1  # sequences of this prompt, of `max_tokens` each
    tenant: str = ""
    klass: str = "all"

    @property
    def sequences(self) -> list[str]:
        return [self.id, *(f"{self.id}#{choice}" for choice in range(1, self.choices))]


@dataclass
class Seen:
    """What the engine did for it."""

    token_ns: list[int] = field(default_factory=list)  # of all sequences


def random_asks(
    seed: int, count: int, *, mean_gap_ns: int = 2_000_000, leaving: float = 0.0, longest: int = 24
) -> list[Ask]:
    """Prompts that share beginnings, as conversations and templates do; each ends in tokens of its own."""
    rng = random.Random(seed)
    stems = [[1000 * (stem + 1) + place for place in range(rng.randint(4, 24))] for stem in range(3)]
    due_ns, asks = 0, []
    for index in range(count):
        due_ns += round(rng.expovariate(1 / mean_gap_ns))
        stem = rng.choice(stems)
        own = [100_000 + 1000 * index + place for place in range(rng.randint(1, 20))]
        leaves = rng.randint(1, 40_000_000) if rng.random() < leaving else None
        asks.append(
            Ask(f"r{index:04d}", due_ns, stem[: rng.randint(0, len(stem))] + own, rng.randint(1, longest), leaves)
        )
    return asks


def drive(asks: list[Ask], **settings) -> tuple[Simulation, dict[str, Seen]]:
    """One turn after the other: what came until the turn looked at its messages is received before it."""
    simulation = Simulation(**DEFAULTS | settings)
    engine, clock = simulation.engine, simulation.clock
    seen = {ask.id: Seen() for ask in asks}
    owner = {sequence: ask.id for ask in asks for sequence in ask.sequences}
    published = engine.publish

    def publish(message):
        for output in getattr(message, "outputs", ()):
            seen[owner[output.request_id]].token_ns.append(message.committed_ns)
        published(message)

    engine.publish = publish
    events = [(ask.due_ns, 0, place, ask) for place, ask in enumerate(asks)]
    events += [(a.due_ns + a.leaves_ns, 1, i, a) for i, a in enumerate(asks) if a.leaves_ns is not None]
    events.sort(key=lambda event: event[:3])
    while events or engine.has_work:
        if not engine.has_work:
            clock.now_ns = max(clock.now_ns, events[0][0])
            until_ns = clock.now_ns + 2 * TICK
        else:
            until_ns = simulation._begin_ns + TICK
        messages = []
        while events and events[0][0] <= until_ns:
            now_ns, is_leaving, _, ask = events.pop(0)
            if not is_leaving:
                params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
                first, *others = ask.sequences
                messages += [
                    Submit(request_id=sequence, prompt_token_ids=ask.prompt, sampling=params, encoded_ns=now_ns,
                           priority=ask.priority, tenant=ask.tenant, fork_of=None if sequence == first else first)
                    for sequence in (first, *others)
                ]  # fmt: skip
            elif len(seen[ask.id].token_ns) < ask.max_tokens * ask.choices:
                messages += map(Abort, ask.sequences)
        simulation.receive(*messages)
        if engine.has_work:
            simulation.step()
    engine.flush()
    return simulation, seen


def _call(report: PrefixReport | None) -> str | None:
    """The call whose first sequence is the source."""
    return None if report is None or report.prefix_source is None else report.prefix_source.partition("#")[0]


def write_run(path, asks: list[Ask], *, objectives=(), **settings) -> RunDirectory:
    """A run directory of a simulated run: a client beside the core, whose ways take no time."""
    simulation, seen = drive(asks, **settings)
    settings |= settings.get("knobs") or {}
    settings = DEFAULTS | settings
    engine = {"model": "tiny-model", "port": 0, "overlap": "on" if settings.get("overlap") else "off"}
    engine |= {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
    engine |= {"num_kv_blocks": settings["num_blocks"], "policy": settings.get("policy", "fcfs")}
    engine |= {name: settings[name] for name in OPTIONAL if name in settings}
    run = RunDirectory.create(
        path,
        {
            "scenario": {"name": "simulated", "arrivals": {"process": "times"}, "measure": {}}, "seed": 1,
            "engine": engine | {"served": {"engine": engine, "max_model_len": 4096}}, "hardware": hardware(),
            "versions": {}, "wall_anchor": {}, "objectives": list(objectives), "client_error": {}, "valid": True,
            "arrivals": {"loop": "open"}, "core": {"device": "cpu", "num_kv_blocks": settings["num_blocks"]},
        },
    )  # fmt: skip
    clients, requests = [], []
    for ask in asks:
        stamps = seen[ask.id].token_ns
        ended = simulation.published.ended[ask.sequences[0]]
        last = stamps[-1] if stamps else ask.due_ns
        clients.append(
            ClientRecord(
                ask.id, "simulated", ask.due_ns, "ok", sent_ns=ask.due_ns, first_token_ns=stamps[0], last_byte_ns=last,
                prompt_tokens=len(ask.prompt), output_tokens=len(stamps), chunk_ns=stamps,
                chunk_tokens=[1] * len(stamps), klass=ask.klass, tenant=ask.tenant,
            )
        )  # fmt: skip
        report = ended.prefix
        requests.append(
            RequestRecord(
                ask.id, ask.due_ns, last, prompt_tokens=len(ask.prompt), output_tokens=len(stamps), token_ns=stamps,
                written_ns=last, first_written_ns=stamps[0], encoded_ns=ask.due_ns, queued_ns=ended.queued_ns,
                scheduled_ns=ended.scheduled_ns, longest_output_tokens=len(stamps), finish_reason=ended.reason,
                preemptions=ended.preemptions, prefix_source=_call(report),
                prefix_shared_tokens=report.prefix_shared_tokens if report else 0, tenant=ask.tenant, klass=ask.klass,
                ledger=ended.ledger, waits=ended.waits, ttft=simulation.published.ledgers[ask.sequences[0]][0][1],
            )
        )  # fmt: skip
    steps = columns("steps", simulation.published.records)
    for table, content in (("client", columns("client", clients)), ("requests", columns("requests", requests)),
                           ("steps", steps)):  # fmt: skip
        replace_table(run.path / f"{table}.parquet", content)
    if any(ask.priority for ask in asks):  # only the schedule knows them
        schedule = {"request_id": [ask.id for ask in asks], "priority": [ask.priority for ask in asks]}
        pq.write_table(pa.table(schedule), run.path / SCHEDULE_FILE)
    return run
