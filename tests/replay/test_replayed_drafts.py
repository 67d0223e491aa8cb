"""Drafts of a replay: what a run tells of them, and what they change."""

import numpy as np
import pandas as pd
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import ReplayError
from sojourn.replay.draft_odds import DraftModel, Odds, lookup_drafts, recorded_drafts
from sojourn.replay.load import BlockHashes, LoadChange, ReplayedLoad
from sojourn.replay.replayed_model import ReplayedDrafts
from sojourn.replay.replica import make_replica
from sojourn.replay.routing import RoundRobin
from sojourn.replay.settings import check_drafts
from tests.replay.simulated_run import Ask, random_asks
from tests.replay.test_replay_oracle import SimulatedTurns, recorded

ALWAYS, NEVER = Odds(1.0, (1.0,) * 16), Odds(1.0, (0.0,) * 16)


def replay(odds: Odds | None, asks: list[Ask]):
    """Without drafts where there are no odds; every request asks for them after each step."""
    speculation = {} if odds is None else {"speculation": "ngram", "speculation_adaptive": "off"}
    config = EngineConfig(
        model="", telemetry="off", max_num_seqs=8, block_size=4, max_num_batched_tokens=64, num_kv_blocks=512,
        **speculation,
    )  # fmt: skip
    load = ReplayedLoad(recorded(asks), LoadChange(), BlockHashes(4), max_waiting=10**6, pool_tokens=10**6)
    drafts = None if odds is None else ReplayedDrafts(DraftModel("ngram", odds), load.recorded_id)
    replica = make_replica(config, SimulatedTurns(), load, overlap=False, drafts=drafts)
    return load.run([replica], RoundRobin(1)), replica


def test_every_request_gets_its_tokens_whatever_is_accepted():
    asks = random_asks(3, 40)
    plain, none = replay(None, asks)
    for odds in (ALWAYS, NEVER, Odds(0.5, tuple(0.8**j for j in range(1, 17)))):
        sent, replica = replay(odds, asks)
        assert [each.output_tokens for each in sent] == [each.output_tokens for each in plain]
        assert all(each.status == "ok" for each in sent)
        assert (replica.num_steps < none.num_steps) == (odds is not NEVER)


def test_drafts_that_are_all_accepted_give_five_tokens_a_step():
    """A step verifies four drafts: 20 tokens need one step of the prompt and four more."""
    alone = random_asks(1, 1)
    alone[0].max_tokens = 21
    _, replica = replay(ALWAYS, alone)
    assert replica.num_steps == 5


def steps_of(rates: list[float], count: int = 2000) -> pd.DataFrame:
    """One sequence whose four drafts a step were accepted with such probabilities, given those before them."""
    rng, past, rows = np.random.default_rng(5), 100, []
    for _ in range(count):
        accepted = 0
        while accepted < 4 and rng.random() < rates[accepted]:
            accepted += 1
        rows.append((["r1"], [5], [past], ["verify"], 5, 4, 4, 30_000))
        past += accepted + 1
    names = ("request_ids", "new_tokens", "past_tokens", "kinds", "logit_rows", "drafted_tokens", "drafts_wanted",
             "draft_ns")  # fmt: skip
    return pd.DataFrame(rows, columns=names).assign(undrafted=[{}] * count)


def test_the_run_tells_acceptance_by_position():
    rates = [0.8, 0.6, 0.9, 0.5]
    model = recorded_drafts(steps_of(rates), "ngram")
    assert model.mean.accepted[:4] == pytest.approx(np.cumprod(rates), abs=0.03)
    assert model.requests["r1"].accepted[:4] == pytest.approx(np.cumprod(rates), abs=0.03)
    assert model.mean.accepted[5] == pytest.approx(model.mean.accepted[4] * model.mean.accepted[3]
                                                   / model.mean.accepted[2])  # fmt: skip
    assert model.mean.found == pytest.approx(1.0, abs=0.01) and model.known_positions == 4
    assert model.step_ns + 4 * model.token_ns == pytest.approx(30_000, rel=0.01)


def test_lookup_steps_tell_the_tokens_of_a_step():
    frame = pd.DataFrame({"request_id": ["a", "b"], "lookup_steps": [51, 101], "server_output_tokens": [151, 101]})
    model = lookup_drafts(frame)
    odds = model.requests["a"]  # 100 of the tokens were accepted in 50 steps
    assert odds.found * sum(odds.accepted[:4]) == pytest.approx(2.0, abs=0.01)
    assert model.requests["b"].found == 0 and model.sampled == 2
    assert lookup_drafts(frame.assign(lookup_steps=None)) is None


def test_what_the_run_does_not_tell_is_refused():
    plain = EngineConfig(model="")
    ngram = EngineConfig(model="", speculation="ngram")
    check_drafts(ngram, plain, None)
    known = DraftModel("ngram", ALWAYS)
    check_drafts(ngram, EngineConfig(model="", speculation="ngram", speculation_tokens=8), known)
    for before, after, model, words in (
        (plain, ngram, None, "lookup_steps"),
        (ngram, EngineConfig(model="", speculation="early-exit"), known, "depends on the text"),
        (ngram, EngineConfig(model="", speculation="ngram", speculation_ngram=2), known, "speculation_ngram changes"),
    ):
        with pytest.raises(ReplayError, match=words):
            check_drafts(before, after, model)
