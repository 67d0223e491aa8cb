"""Causes of the front, the client, the machine and the pool: present where they are, absent where they look alike."""

from dataclasses import replace

import pandas as pd
import pytest

from sojourn.diagnosis.causes.slow_sampler import dear_parameters
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import SERVED, excesses, losses
from sojourn.diagnosis.launch_facts import Launches
from sojourn.diagnosis.proposal import ADMISSION
from sojourn.diagnosis.proposals import proposals
from sojourn.loadgen.scenario.workload import RequestClass, Variant
from tests.metrics.sampled_machine import turns, with_requests, with_system
from tests.metrics.simulated_server import Device
from tests.metrics.synthetic import PLANTS, Plant, synthetic_run

BUSY_MS = 600  # of each second, the loop is held


def keys_of(facts) -> set[str]:
    return {proposal.key for excess in excesses(facts) for proposal in proposals(facts, excess)}


def front_run(path, **work_ns: int):
    """A front that is held in every second; of each request its own work, in nanoseconds."""
    run = with_system(synthetic_run(path, plant="slow_stream", requests=60), **turns(1.0, BUSY_MS))
    usual = {"encoding_ns": 100_000, "decoding_ns": 400_000, "writing_ns": 1_000_000} | work_ns
    texts = {name: (lambda rows, ns=ns: ns) for name, ns in usual.items()}
    return with_requests(run, prompt_characters=lambda rows: 4 * rows.prompt_tokens, **texts)


@pytest.mark.parametrize(("work", "key"), [
    ("encoding_ns", "slow_tokeniser"), ("decoding_ns", "slow_detokeniser"), ("writing_ns", "slow_writer"),
])  # fmt: skip
def test_the_work_that_holds_the_loop_beyond_its_normal_cost_is_named(tmp_path, work, key):
    facts = read_evidence(front_run(tmp_path / "run", **{work: 85_000_000}))  # 60 requests in some 10 s of 0.6 s each
    assert getattr(facts.machine.front, work.removesuffix("_ns")) > 0.5
    found = keys_of(facts) & {"slow_tokeniser", "slow_detokeniser", "slow_writer", "blocked_front"}
    assert found == {key}


def test_a_loop_whose_own_work_is_normal_is_held_by_something_else(tmp_path):
    found = keys_of(read_evidence(front_run(tmp_path / "run")))
    assert "blocked_front" in found and not found & {"slow_tokeniser", "slow_detokeniser", "slow_writer"}


def test_writes_to_few_clients_are_slow_readers_only_where_their_buffers_are_full(tmp_path):
    few = {"writing_ns": lambda rows: [int(ns) if ns > rows.ledger_request_stream_ns.quantile(0.6) else 0
                                       for ns in rows.ledger_request_stream_ns]}  # fmt: skip
    run = with_system(synthetic_run(tmp_path / "run", plant="slow_stream", requests=60), **turns(1.0, 20.0))
    facts = read_evidence(with_requests(run, **few))
    assert "slow_writer" in keys_of(facts) and "slow_reader" not in keys_of(facts)
    rows = facts.rows.assign(last_byte_ns=facts.rows.last_byte_ns + facts.rows.writing_ns)
    drained = replace(facts, rows=rows)
    assert "slow_writer" not in keys_of(drained)


def test_parameters_that_make_draws_dearer_are_those_of_the_scenario(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", requests=20))
    plain = RequestClass(klass="a", prompt_tokens=9, output_tokens=9, top_p=1, repetition_penalty=1)
    asks = RequestClass(klass="b", prompt_tokens=9, output_tokens=9, min_p=0.1, extra_body={"logprobs": True},
                        variants=[Variant(presence_penalty=0.5)])  # fmt: skip

    def named(*classes: RequestClass) -> list[str]:
        workload = {"classes": [each.model_dump(mode="json") for each in classes]}
        return dear_parameters(replace(facts, meta=facts.meta | {"scenario": {"workload": workload}}))

    assert named(plain) == [] and named(plain, asks) == ["logprobs", "min_p", "presence_penalty"]


def test_what_waited_for_the_fronts_loop_is_no_queue(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="overload"))
    excess = excesses(facts)[0]
    free = {each.key: each.claims for each in proposals(facts, excess)}
    rows = facts.rows.assign(front_turns_ns=facts.rows.ledger_request_admission_ns)
    held = {each.key: each.claims for each in proposals(replace(facts, rows=rows), excess)}
    assert free["overload"][ADMISSION] == 1.0 and held["overload"][ADMISSION] == 0.0


@pytest.mark.parametrize("launch_share", [1.0, 0.3])
def test_launches_that_the_device_waits_for_are_named(tmp_path, launch_share):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="slow_model"))
    found = replace(facts, launches=Launches(1.0, launch_share, 0.9, 60.0))
    assert ("launch_bound" in keys_of(found)) == (launch_share > 0.8)


def test_connections_that_end_while_others_are_served_are_named(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant=Plant(failing_share=0.3), requests=60))
    loss = losses(facts)[0]
    assert loss.objective == SERVED
    assert [each.key for each in proposals(facts, loss)] == ["broken_connections"]


REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
LATE = "no complete reply within target.timeout_s, 40 s from when it was due"


@pytest.mark.parametrize(("error", "from_then_on", "key"), [
    (REFUSED, True, "core_death"), (REFUSED, False, "broken_connections"), (LATE, True, "engine_stall"),
    (LATE, False, ""),
])  # fmt: skip
def test_what_ends_all_requests_from_one_moment_on_is_the_server(tmp_path, error, from_then_on, key):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant=Plant(), requests=60))
    rows = facts.rows.sort_values("due_ns").copy()
    lost = rows.index[30:] if from_then_on else rows.index[::3]
    rows.loc[lost, "status"], rows.loc[lost, "error"] = "error", error
    if from_then_on:
        last_ns = rows.loc[rows.index[:30], "last_byte_ns"].max()
        rows = rows.loc[(rows.index < 0) | ~rows.index.isin(lost) | (rows.sent_ns > last_ns)]
        lost = lost.intersection(rows.index)
    rows.loc[lost, ["first_token_ns"]] = pd.NA
    rows.loc[lost, "last_byte_ns"] = rows.loc[lost, "due_ns"] + 40 * 10**9
    found = replace(facts, rows=rows)
    keys = [each.key for loss in losses(found) for each in proposals(found, loss)]
    assert (keys == [key]) if key else ("engine_stall" not in keys)


def test_an_answer_that_comes_whole_is_buffered_and_no_long_way(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="slow_network", requests=60))
    assert "slow_network" in keys_of(facts) and "buffered_stream" not in keys_of(facts)
    rows = facts.rows.copy()
    rows["last_byte_ns"] = rows.last_byte_ns + 2 * 10**9
    rows["first_token_ns"] = rows.last_byte_ns
    rows["ttft_ms"] = (rows.first_token_ns.astype("float64") - rows.due_ns.astype("float64")) / 1e6
    found = replace(facts, rows=rows)
    assert "slow_network" not in keys_of(found)


def test_a_step_of_python_is_no_slow_host_where_no_reference_tells(tmp_path):
    slow = read_evidence(synthetic_run(tmp_path / "slow", plant="slow_host"))
    short = Device(step_ns=2_000_000, host_ns=1_500_000, token_ns=100_000)
    usual = read_evidence(synthetic_run(tmp_path / "usual", plant=Plant(rate_rps=40.0, device=short), requests=100))
    assert "slow_host" in keys_of(slow) and usual.steps.host_share > 0.1 and "slow_host" not in keys_of(usual)


def test_a_pool_whose_steps_are_not_read_has_the_size_that_the_core_told(tmp_path):
    run = synthetic_run(tmp_path / "run", plant=PLANTS["tiny_kv"], requests=40)
    run.update_meta(core={"num_kv_blocks": 64})
    assert read_evidence(run, "requests").kv().pool_blocks == read_evidence(run).kv().pool_blocks == 64
