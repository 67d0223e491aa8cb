"""The clients of a replay on its virtual clock: when they send, when they leave, and what they see."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.memory.prefix import chain_hash
from sojourn.engine.messages import Ended, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.next_turn import NextTurn
from sojourn.replay.recorded import SESSION_BEGIN, RecordedLoad, RecordedRequest
from sojourn.replay.replica import Replica
from sojourn.replay.routing import RoutingPolicy

SEND, ARRIVE, LEAVE = range(3)
REPEATED_IDS = 1 << 40  # between the token ids of a chain and those of its repetition
TURNS_A_CHECK = 256  # of the time limit: some 10 ms
MOST_REPEATED = 20  # times as many requests as were recorded


@dataclass(slots=True)
class Sent:
    """One request in a replay. Moments are float ns of the virtual clock; None: it did not happen."""

    recorded: RecordedRequest
    due_ns: float
    hashes: list[bytes]
    status: str = "missing"
    first_ns: float | None = None  # read by the client
    last_text_ns: float | None = None
    last_ns: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    replica: int | None = None  # its place among the replicas
    output_tokens: int = 0
    open_choices: int = 1  # sequences that have not ended
    chain: "Chain | None" = None
    copy: int = 0


@dataclass(slots=True)
class Chain:
    """A session in progress with its sub-agents, or one request alone."""

    requests: list[RecordedRequest]
    slot: bool  # its end frees a slot of a closed loop
    copy: int
    places: list[int]  # of the requests, among all
    waits: dict[int, set[int]] = field(default_factory=dict)  # of those not sent yet: places that have not ended
    free_ns: dict[int, float] = field(default_factory=dict)  # of those: the last end so far
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class LoadChange:
    """What is different about the load and the way of its requests."""

    rate: float = 1.0
    even: bool = False
    removed: dict[str, float] = field(default_factory=dict)  # account → share of its time
    sessions: int | None = None  # slots of a closed loop; None: as recorded


class BlockHashes:
    """The chain hashes of recorded token ids, made once for a block size: a replay has the same tokens each time."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: dict[tuple[str, int], list[bytes]] = {}

    def of(self, request: RecordedRequest, copy: int, first_own: int) -> list[bytes]:
        key = (request.id, copy)
        if key not in self._known:
            ids = request.token_ids
            if copy:
                ids = [*ids[:first_own], *(each + copy * REPEATED_IDS for each in ids[first_own:])]
            hashes, parent, size = [], b"", self._size
            for begin in range(0, len(ids) - size + 1, size):
                parent = chain_hash(parent, ids[begin : begin + size])
                hashes.append(parent)
            self._known[key] = hashes
        return self._known[key]


class ReplayedLoad:
    """Owns the events of one replay, and sends to replicas. `run` returns all that was sent, in order."""

    def __init__(
        self, load: RecordedLoad, change: LoadChange, hashes: BlockHashes, *, max_waiting: int, pool_tokens: int
    ) -> None:
        self._load, self._change, self._hashes = load, change, hashes
        self._max_waiting, self._pool_tokens = max_waiting, pool_tokens
        self._events: list[tuple[float, int, int, int]] = []
        self._order = count()
        self.sent: list[Sent] = []
        self._kept = {name: 1 - share for name, share in change.removed.items()}
        self._chains = iter(self._all_chains())
        self.refused = 0
        self.repeated = 0

    def run(
        self, replicas: Sequence[Replica], routing: RoutingPolicy, placed: Mapping[str, int] | None = None,
        limit: TimeLimit | None = None,
    ) -> list[Sent]:  # fmt: skip
        """`placed`: request → its replica; `routing` chooses for all others. Raises OutOfTime beyond the limit."""
        self._replicas, self._routing, self._placed = replicas, routing, placed or {}
        self._turns = NextTurn(replicas)
        self._begin()
        events = self._events
        turns = 0
        while True:
            turns += 1
            if limit is not None and turns % TURNS_A_CHECK == 0:
                limit.check()
            cutoff_ns, first = self._turns.first()
            if events and events[0][0] <= cutoff_ns:
                now_ns, _, kind, place = heapq.heappop(events)
                if kind == ARRIVE:
                    self._arrive(place, now_ns)
                else:
                    self._leave(place, now_ns)
            elif cutoff_ns < float("inf"):
                replicas[first].turn()
                self._turns.changed(first)
            else:
                return self.sent

    def first_token(self, request_id: str, now_ns: float) -> None:
        sent = self._of(request_id)
        if sent.first_ns is None:
            sent.first_ns = now_ns + self._way(sent.recorded.first_out)

    def ended(self, ended: Ended, now_ns: float) -> None:
        sent = self._of(ended.request_id)
        recorded = sent.recorded
        sent.preemptions += ended.preemptions
        sent.cached_tokens += ended.cached_tokens
        sent.output_tokens += recorded.tokens_of_choice
        sent.open_choices -= 1
        if sent.open_choices:
            return
        way_ns, recorded_way_ns = self._way(recorded.last_out), sum(recorded.last_out.values())
        last_ns = now_ns + way_ns
        if sent.status != "missing":  # its client has left
            return
        self._routing.ended(sent.replica)
        if last_ns > (leaves_ns := self._times_out_ns(sent)):
            sent.status, last_ns = "timeout", leaves_ns
            sent.last_ns = last_ns
        else:
            sent.status, sent.last_ns = "ok", last_ns
            sent.last_text_ns = now_ns + recorded.last_text_ns - (recorded_way_ns - way_ns)
        self._follow(sent, last_ns)

    def _begin(self) -> None:
        load, change = self._load, self._change
        if load.slots is not None:
            self._send_preludes()
            firsts = [next(self._chains, None) for _ in range(change.sessions or load.slots)]
            begins = self._begins_ns(len(firsts))
            for chain, begin_ns in zip(firsts, begins, strict=True):
                if chain is not None:
                    self._start(chain, begin_ns)
            return
        chains = list(self._all_chains())
        due: list[float] = [chain.requests[0].due_ns for chain in chains]
        if change.even and len(due) > 1:
            gap = (max(due) - min(due)) / (len(due) - 1)
            due = [min(due) + gap * place for place in range(len(due))]
        self._send_preludes()
        for chain, moment in zip(chains, due, strict=True):
            self._start(chain, moment / change.rate)

    def _send_preludes(self) -> None:
        for request in self._load.requests:
            if request.is_prelude:
                self._send(request, float(request.due_ns), None)

    def _begins_ns(self, slots: int) -> list[float]:
        """When the first request of each slot is due: as recorded, and further slots spread evenly between those."""
        load = self._load
        recorded = [float(chain.requests[0].due_ns) for chain in islice(self._all_chains(), load.slots)]
        if self._change.sessions is None or len(recorded) < 2:
            return (recorded + [recorded[-1]] * slots)[:slots] if recorded else [0.0] * slots
        first_ns, last_ns = min(recorded), max(recorded)
        return [first_ns + (last_ns - first_ns) * slot / max(1, slots - 1) for slot in range(slots)]

    def _all_chains(self) -> Iterator[Chain]:
        """Sessions, or single requests, in the order of the schedule; again and again in a closed loop that was not
        given a count, or is replayed with another number of slots (each as often as in the run, of a count)."""
        load, sessions = self._load, self._change.sessions
        members: dict[int, list[int]] = {}
        for place, request in enumerate(load.requests):
            if not request.is_prelude:
                members.setdefault(place if request.head < 0 else request.head, []).append(place)
        ordered = sorted(members.values(), key=lambda places: load.requests[places[0]].position)
        most = len(ordered)
        if load.may_repeat:
            most *= MOST_REPEATED if sessions is None else max(MOST_REPEATED, 2 * sessions)
        elif sessions is not None:
            most = math.ceil(most * sessions / load.slots)
        for number in range(most):
            copy, place = divmod(number, len(ordered))
            places = ordered[place]
            yield Chain([load.requests[each] for each in places], load.slots is not None, copy, places)

    def _start(self, chain: Chain, due_ns: float) -> None:
        """Sends the first request of a chain, and those that wait for nothing but that moment."""
        for place, request in zip(chain.places[1:], chain.requests[1:], strict=True):
            chain.waits[place] = {*request.waits_for}
        self._send(chain.requests[0], due_ns, chain)
        self._release(chain, SESSION_BEGIN, due_ns)

    def _release(self, chain: Chain, ended_place: int, free_ns: float) -> None:
        """Sends what waited for this end alone, or for it as the last."""
        until = self._load.until_ns if self._load.until_ns is not None else float("inf")
        for place, missing in list(chain.waits.items()):
            if ended_place not in missing:
                continue
            missing.discard(ended_place)
            chain.free_ns[place] = max(free_ns, chain.free_ns.get(place, free_ns))
            due_ns = chain.free_ns[place] + self._load.requests[place].pause_ns
            if not missing and due_ns < until:
                del chain.waits[place]
                self._send(self._load.requests[place], due_ns, chain)

    def _send(self, recorded: RecordedRequest, due_ns: float, chain: Chain | None) -> None:
        copy = 0 if chain is None else chain.copy
        hashes = self._hashes.of(recorded, copy, recorded.foreign_tokens)
        sent = Sent(recorded, due_ns, hashes, chain=chain, copy=copy)
        if chain is not None:
            chain.in_flight += 1
        self.repeated += copy > 0
        place = len(self.sent)
        self.sent.append(sent)
        self._push(due_ns + self._way(recorded.way_in), ARRIVE, place)
        if recorded.patience_ns is not None:
            self._push(due_ns + recorded.patience_ns, LEAVE, place)
        elif self._load.timeout_ns is not None:
            self._push(self._times_out_ns(sent), LEAVE, place)

    def _follow(self, sent: Sent, free_ns: float) -> None:
        """What is due after an end: the rest of its session, or the next one of its slot."""
        chain = sent.chain
        if chain is None:
            return
        chain.in_flight -= 1
        if chain.waits and sent.status == "ok":
            self._release(chain, sent.recorded.place, free_ns)
        elif chain.waits:
            chain.waits.clear()
        if not chain.slot or chain.in_flight or chain.waits:
            return
        until = self._load.until_ns if self._load.until_ns is not None else float("inf")
        following = next(self._chains, None)
        if following is not None and (due_ns := free_ns + following.requests[0].pause_ns) < until:
            self._start(following, due_ns)

    def _arrive(self, place: int, now_ns: float) -> None:
        sent = self.sent[place]
        recorded = sent.recorded
        if sent.status != "missing":
            return
        if recorded.prompt_tokens + recorded.output_tokens > self._pool_tokens:
            self._refuse(sent, now_ns)
            return
        chosen = self._placed.get(recorded.id)
        if chosen is None:
            chosen = self._routing.choose(b"%s#%d" % (recorded.session.encode(), sent.copy), sent.hashes)
        replica = self._replicas[chosen]
        scheduler = replica.scheduler
        free = 0 if replica.waiting else scheduler.max_num_seqs - len(scheduler.running)
        if replica.waiting + recorded.choices > self._max_waiting + free:
            self._routing.ended(chosen)
            self._refuse(sent, now_ns)
            return
        sent.replica, sent.open_choices = chosen, recorded.choices
        ids = [0] * recorded.prompt_tokens if recorded.choices == 1 else recorded.token_ids[: recorded.prompt_tokens]
        sampling = SamplingParams(max_tokens=recorded.tokens_of_choice, ignore_eos=True)
        for choice in range(recorded.choices):
            message = Submit(
                request_id=_sequence_id(place, choice),
                prompt_token_ids=ids,
                sampling=sampling,
                encoded_ns=round(now_ns),
                tenant=recorded.tenant,
                weight=recorded.weight,
                priority=recorded.priority,
                adapter=_adapter(recorded.adapter),
                fork_of=_sequence_id(place, 0) if choice else None,
            )
            replica.submit(message, now_ns)
        self._turns.changed(chosen)

    def recorded_id(self, sequence: str) -> str:
        """Of the recorded request that a sequence of this replay repeats."""
        return self._of(sequence).recorded.id

    def hashes_of(self, sequence: str) -> list[bytes] | None:
        """Of all the blocks that it will ever fill; None of one of several choices, whose outputs differ."""
        sent = self._of(sequence)
        return sent.hashes if sent.recorded.choices == 1 else None

    def _of(self, sequence: str) -> Sent:
        return self.sent[int(sequence.partition(".")[0])]

    def _refuse(self, sent: Sent, now_ns: float) -> None:
        sent.status, sent.last_ns = "error", now_ns
        self.refused += 1
        self._follow(sent, now_ns)

    def _leave(self, place: int, now_ns: float) -> None:
        """The client's patience, or its time limit, is over."""
        sent = self.sent[place]
        if sent.status != "missing":
            return
        recorded = sent.recorded
        is_patience = recorded.patience_ns is not None
        waits_for_first = is_patience and recorded.patience_for == "first_token"
        if waits_for_first and sent.first_ns is not None and sent.first_ns <= now_ns:
            return
        sent.status, sent.last_ns = "cancelled" if is_patience else "timeout", now_ns
        if sent.replica is not None:
            self._routing.ended(sent.replica)
            for choice in range(recorded.choices):
                self._replicas[sent.replica].abort(_sequence_id(place, choice), now_ns)
            self._turns.changed(sent.replica)
        self._follow(sent, now_ns)

    def _times_out_ns(self, sent: Sent) -> float:
        """The client's time limit begins when it sends."""
        timeout = self._load.timeout_ns
        return float("inf") if timeout is None else sent.due_ns + sent.recorded.way_in["client.lag"] + timeout

    def _way(self, accounts: dict[str, float]) -> float:
        if not self._kept:
            return sum(accounts.values())
        return sum(ns * self._kept.get(account, 1.0) for account, ns in accounts.items())

    def _push(self, moment_ns: float, kind: int, place: int) -> None:
        heapq.heappush(self._events, (moment_ns, next(self._order), kind, place))


def _sequence_id(place: int, choice: int) -> str:
    return f"{place}.{choice}"


def _adapter(name: str | None) -> AdapterReference | None:
    """Its slot counts; its work and its first reading are in the recorded times."""
    return None if name is None else AdapterReference(name, "", "", 0, 0, 0)
