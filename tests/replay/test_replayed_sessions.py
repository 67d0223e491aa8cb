"""Sessions with sub-agents in a replay: who waits for whom, another number of them, and what their copies share."""

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change
from sojourn.replay.load import BlockHashes, LoadChange, ReplayedLoad
from sojourn.replay.recorded import SESSION_BEGIN, RecordedLoad
from sojourn.replay.replica import make_replica
from sojourn.replay.routing import make_routing
from sojourn.replay.settings import check
from tests.replay.test_replay_oracle import Ask, SimulatedTurns, recorded

MS = 1_000_000
# Of each session: its begin, two sub-agents after it, one beside it from the begin on, and the join of all.
WAITS = ((), (0,), (0,), (SESSION_BEGIN,), (1, 2, 3))
PAUSES = (0, 2 * MS, 50 * MS, 30 * MS, 5 * MS)


def sessions(count: int, slots: int, until_ns: int | None = None) -> RecordedLoad:
    """Prompts of 16 tokens: four that all have, four of the session, and eight of their own."""
    asks = []
    for session in range(count):
        own = [100 + session] * 4
        asks += [Ask(f"{session}.{each}", 0, [7] * 4 + own + [1000 * session + each + 9] * 8, 2) for each in range(5)]
    load = recorded(asks)
    for place, request in enumerate(load.requests):
        head, each = place // 5 * 5, place % 5
        request.position = request.place = place
        request.waits_for = tuple(w if w == SESSION_BEGIN else head + w for w in WAITS[each])
        request.head, request.pause_ns, request.due_ns = head, PAUSES[each], 0
        request.shared_tokens, request.foreign_tokens = (4, 4) if not each else (8, 4)
    load.slots, load.until_ns, load.may_repeat = slots, until_ns, until_ns is not None
    return load


def run(load: RecordedLoad, change: LoadChange):
    config = EngineConfig(model="", telemetry="off", max_num_seqs=64, block_size=4, num_kv_blocks=4096)
    replayed = ReplayedLoad(load, change, BlockHashes(4), max_waiting=10**6, pool_tokens=10**6)
    replica = make_replica(config, SimulatedTurns(), replayed, overlap=False)
    return replayed.run([replica], make_routing("round-robin", 1, max_num_seqs=64, num_blocks=4096))


def test_join_waits_for_the_last_of_its_sub_agents_and_a_slot_for_the_whole_session():
    sent = run(sessions(2, 1), LoadChange())
    by_id = {each.recorded.id: each for each in sent}
    assert all(each.status == "ok" for each in sent) and len(sent) == 10
    first = by_id["0.0"]
    assert [by_id[f"0.{each}"].due_ns for each in (1, 2)] == [first.last_ns + 2 * MS, first.last_ns + 50 * MS]
    assert by_id["0.3"].due_ns == first.due_ns + 30 * MS
    assert by_id["0.4"].due_ns == max(by_id[f"0.{each}"].last_ns for each in (1, 2, 3)) + 5 * MS
    assert by_id["1.0"].due_ns == by_id["0.4"].last_ns


@pytest.mark.parametrize("slots", [1, 3])
def test_another_number_of_sessions_runs_side_by_side(slots):
    sent = run(sessions(4, 2, until_ns=200 * MS), LoadChange(sessions=slots))
    begins = [each for each in sent if each.recorded.id.endswith(".0")]
    assert len([each for each in begins if each.due_ns == 0]) == slots
    assert any(each.copy for each in sent) == (slots > 1)


def test_copy_of_a_session_shares_with_it_only_what_all_sessions_share():
    sent = run(sessions(1, 1, until_ns=300 * MS), LoadChange())
    original = next(each for each in sent if each.recorded.id == "0.4" and not each.copy)
    copy = [each for each in sent if each.copy == 1]
    assert {each.hashes[0] for each in copy} == {original.hashes[0]}  # four tokens that all have
    assert len({each.hashes[1] for each in copy}) == 1 and copy[0].hashes[1] != original.hashes[1]


def test_sessions_are_refused_of_an_open_load_and_of_none():
    for change, closed in ((Change(sessions=3), False), (Change(sessions=0), True)):
        with pytest.raises(ReplayError, match="the number of users or requests in flight of a closed loop, from 1"):
            check(change, is_closed=closed)
