"""Whether B is worse than A, on runs whose truth is known: how often it errs, and what it can see."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace as replace_record

from sojourn.metrics.compare.dependence import series_evidence
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import alike_steps, read_run
from sojourn.metrics.compare.verdict import (
    Compared,
    counting_error,
    runs_evidence,
    statistic,
    together,
    weigh,
)
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from tests.further import further
from tests.metrics.synthetic import PLANTS, Plant, synthetic_run, with_steal

USUAL = replace(PLANTS["healthy"], rate_rps=8.0)
TENTH_SLOWED = replace(USUAL, device=replace(USUAL.device, stretched_share=0.1, stretch=1.2))
E2E = METRICS["e2e_mean"]


def run_of(folder, plant: Plant, seed: int, noise: int, requests: int = 150) -> RunDirectory:
    return synthetic_run(folder, plant=plant, seed=seed, device_seed=noise, requests=requests)


def windows(random: np.random.Generator, scale: float = 1.0, count: int = 20, each: int = 10) -> np.ndarray:
    """Latencies whose windows hang together: a window shares half of its variance."""
    shared = random.normal(0, 0.15, count).repeat(each)
    return 100 * scale * np.exp(shared + random.normal(0, 0.15, count * each))


@pytest.mark.parametrize("name", ["e2e_mean", *further("e2e_p50", "e2e_p90")])
def test_at_the_margin_itself_each_verdict_is_as_rare_as_the_confidence_says(name):
    """B is truly worse by exactly the margin: both verdicts are wrong, at most 5 % of the time each."""
    metric, told, random = METRICS[name], Counter(), np.random.default_rng(5)
    for _ in range(300):
        a, b = windows(random), windows(random, scale=1.1)
        told[weigh(name, metric, series_evidence(a, b, metric), 0.1, 0.95).verdict] += 1
    assert told["worse"] <= 27 and told["no worse"] <= 27, told  # 15 expected; 27 has a chance of 0.3 %


@pytest.mark.parametrize("runs", [2, *further(3, 5)])
@pytest.mark.parametrize("paired", [True, False])
def test_few_runs_a_side_do_not_make_it_sure_of_itself(runs, paired):
    told, random = Counter(), np.random.default_rng(runs)
    for _ in range(1_000):
        a, b = np.exp(random.normal(0, 0.1, runs)), 1.1 * np.exp(random.normal(0, 0.1, runs))
        told[weigh("e2e_mean", E2E, runs_evidence(a, b, E2E, paired), 0.1, 0.95).verdict] += 1
    assert told["worse"] <= 75 and told["no worse"] <= 75, told  # 50 expected; 75 has a chance of 0.02 %


def test_requests_that_share_a_queue_count_once():
    """Were they independent, the error of the mean would be half of what it truly is: as in any other order."""
    random = np.random.default_rng(1)

    def error(shuffled: bool) -> float:
        sides = [windows(random) for _ in range(2)]
        return series_evidence(*(random.permutation(side) if shuffled else side for side in sides), E2E).error

    truth = float(np.std([math.log(statistic(windows(random), E2E)) for _ in range(400)])) * math.sqrt(2)
    assert 0.8 * truth < np.median([error(False) for _ in range(40)]) < 1.4 * truth
    assert np.median([error(True) for _ in range(40)]) < 0.7 * truth


def test_shares_that_agree_by_chance_are_no_surer_than_counting_allows():
    """B truly keeps 1/1.05 of A's share; of 40 requests in each of two runs all may well be good all the same."""
    metric, told, random = METRICS["attainment"], Counter(), np.random.default_rng(3)
    for _ in range(1_000):
        good = random.random((2, 2, 40)) < np.array([1.0, 1 / 1.05])[:, None, None]
        evidence = runs_evidence(*good.mean(axis=2), metric, False)
        counted = counting_error(*good.reshape(2, -1), False)
        told[weigh("attainment", metric, evidence, 0.05, 0.95, counted).verdict] += 1
    assert told["no worse"] <= 75, told
    for count, verdict in ((20, "cannot tell"), (300, "no worse")):
        all_good = np.ones(count)
        for paired in (True, False):
            evidence = series_evidence(all_good, all_good, metric)
            counted = counting_error(all_good, all_good, paired)
            assert weigh("attainment", metric, evidence, 0.05, 0.95, counted).verdict == verdict


@pytest.mark.parametrize("sent", [2, 3, 9])
def test_a_side_that_could_send_little_is_worse_and_not_unknown(sent):
    """In a closed loop a slow server gets fewer requests than there are windows."""
    random = np.random.default_rng(4)
    a, b = windows(random), 40.0 * windows(random)[:sent]
    assert weigh("e2e_mean", E2E, series_evidence(a, b, E2E), 0.05, 0.95).verdict == "worse"


def test_the_ratio_is_of_b_to_a_and_worse_is_less_where_more_is_better():
    a = np.array([1.0, 0.9] * 20)
    b = a / 2
    for name, verdict in (("e2e_mean", "no worse"), ("attainment", "worse"), ("tokens_per_s", "worse")):
        metric = METRICS[name]
        found = weigh(name, metric, series_evidence(a, b, metric), 0.05, 0.95)
        assert found.ratio == pytest.approx(0.5) and found.low <= 0.5 <= found.high and found.verdict == verdict


def test_a_failed_request_is_slower_than_all_and_half_of_them_leave_no_median():
    some = np.array([1.0, 2.0, 3.0, math.inf])
    assert statistic(some, METRICS["e2e_p50"]) == 2.0 and statistic(some, METRICS["e2e_p90"]) == math.inf


def test_failures_do_not_make_a_run_faster(tmp_path):
    a = run_of(tmp_path / "a", USUAL, 1, 1)
    failing = run_of(tmp_path / "b", replace(USUAL, failing_share=0.3), 1, 2)
    found = {each.metric: each for each in compare_runs([a], [failing], metrics=["e2e_p90", "attainment"]).metrics}
    assert found["e2e_p90"].b == math.inf and "too many requests failed" in found["e2e_p90"].reason
    assert found["attainment"].verdict == "worse"


def verdict_of(name: str, verdict: str, p_worse: float) -> Compared:
    return Compared(metric=name, verdict=verdict, a=1.0, b=1.0, ratio=1.0, low=0.9, high=1.1, margin=0.05, paired=True,
                    clusters=20, p_worse=p_worse)  # fmt: skip


def test_one_metric_among_many_must_be_surer_and_no_worse_takes_all_of_them():
    fine = [verdict_of(f"fine{place}", "no worse", 0.9) for place in range(4)]
    alone = verdict_of("slow", "worse", 0.03)
    assert together([alone], 0.05, 0.95).verdict == "worse"
    among = together([*fine, alone], 0.05, 0.95)
    assert among.verdict == "cannot tell" and among.metrics[-1].reason.startswith("worse on its own")
    assert among.metrics[-1].needs is None  # nothing was computed of how much more it takes
    assert together([*fine, verdict_of("slow", "worse", 0.009)], 0.05, 0.95).verdict == "worse"
    # Holm: the second is held to a fourth of the error once the first is through
    both = together([*fine[:3], verdict_of("a", "worse", 0.001), verdict_of("b", "worse", 0.012)], 0.05, 0.95)
    assert [each.verdict for each in both.metrics[-2:]] == ["worse", "worse"]
    assert together(fine, 0.05, 0.95).verdict == "no worse"
    assert together([*fine, verdict_of("wide", "cannot tell", 0.4)], 0.05, 0.95).verdict == "cannot tell"


def test_the_same_system_is_no_worse_and_a_tenth_of_the_steps_slowed_by_a_fifth_is(tmp_path):
    """Few of the seeds of the test below."""
    a = run_of(tmp_path / "a", USUAL, 1, 100)
    same, slowed = (run_of(tmp_path / name, plant, 1, 200) for name, plant in (("s", USUAL), ("w", TENTH_SLOWED)))
    found = compare_runs([a], [same])
    assert found.verdict == "no worse", found
    assert all(each.paired == (METRICS[each.metric].source == "requests") for each in found.metrics)
    worse = compare_runs([a], [slowed])
    assert worse.verdict == "worse", worse
    by_name = {each.metric: each for each in worse.metrics}
    assert by_name["steady_steps"].verdict == "worse" and by_name["steady_steps"].ratio < 0.92
    (tail,) = compare_runs([a], [slowed], metrics=["step_p95"]).metrics
    assert tail.verdict == "worse" and tail.ratio > 1.1
    assert by_name["e2e_mean"].verdict == "no worse" and by_name["e2e_mean"].ratio == pytest.approx(1.02, abs=0.015)
    other = run_of(tmp_path / "o", USUAL, 2, 100)
    assert not any(each.paired for each in compare_runs([a], [other]).metrics)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_false_alarms_and_power_over_many_seeds(tmp_path):
    """The same system: never worse in more than 5 % of pairs, no worse in 95 %; slowed: worse in 95 %."""
    told = {"same": Counter(), "slowed": Counter()}
    for seed in range(60):
        a = run_of(tmp_path / f"a{seed}", USUAL, seed, 1_000 + seed, 250)
        for name, plant in (("same", USUAL), ("slowed", TENTH_SLOWED)):
            told[name][compare_runs([a], [run_of(tmp_path / f"{name}{seed}", plant, seed, seed, 250)]).verdict] += 1
    assert told["same"]["worse"] <= 3 and told["same"]["no worse"] >= 57, told
    assert told["slowed"]["worse"] >= 57, told


def test_several_runs_a_side_are_weighed_by_their_runs(tmp_path):
    sides = [
        [run_of(tmp_path / f"{name}{seed}", plant, seed, noise + seed, 60) for seed in range(3)]
        for name, plant, noise in (("a", USUAL, 10), ("b", TENTH_SLOWED, 20))
    ]
    found = compare_runs(*sides, metrics=["step_p95", "e2e_mean"])
    assert found.verdict == "worse" and [each.clusters for each in found.metrics] == [3, 3]
    with pytest.raises(InputError, match="A has 3 runs and B has 1"):
        compare_runs(sides[0], sides[1][:1])


def test_a_step_is_steady_beside_those_around_it():
    """Whatever the steps hold, and whatever lasts: a host that is busy for a while is no step that sticks out, and one
    that took the core for two steps is not either."""
    took = np.where(np.arange(300) % 2, 1e6, 3e6)  # two kinds of steps, in turns
    took[100:] *= 1.5
    took[50::50] *= 1.2
    took[75:77] *= 3
    steps = pd.DataFrame(
        {"begin_ns": np.arange(300.0), "took_ns": took, "like": np.where(np.arange(300) % 2, "a", "b")}
    )
    ((alike,), (same,)), share = alike_steps([[steps.sample(frac=1, random_state=0)], [steps]])
    sticks_out = [place in (50, 100, 150, 200, 250) for place in range(300)]
    assert share == 1 and (~alike.steady).tolist() == (~same.steady).tolist() == sticks_out


def test_steps_that_are_all_steady_are_no_surer_than_counting_allows(tmp_path):
    noiseless = replace(USUAL, device=replace(USUAL.device, noise=0.0))
    a, b = (run_of(tmp_path / name, noiseless, 1, 1, 110) for name in "ab")
    (found,) = compare_runs([a], [b], metrics=["steady_steps"]).metrics
    assert found.ratio == 1 and found.low < 1 < found.high, found


def test_a_metric_may_have_a_margin_of_its_own(tmp_path):
    a, slowed = (run_of(tmp_path / name, plant, 1, 100) for name, plant in (("a", USUAL), ("w", TENTH_SLOWED)))
    found = compare_runs([a], [slowed], metrics=["e2e_mean", "steady_steps"], margins={"steady_steps": 0.3})
    assert [each.margin for each in found.metrics] == [0.05, 0.3] and found.verdict == "no worse", found
    assert compare_runs([a], [slowed], margin=0.3, margins={"steady_steps": 0.05}).verdict == "worse"
    served = compare_runs([a], [slowed], margin=0.3, margins={"served": 0.1}).metrics[-1]  # though none failed
    assert served.metric == "served" and served.margin == 0.1
    with pytest.raises(InputError, match="step_p95 has a margin and is not compared; compared are e2e_mean"):
        compare_runs([a], [slowed], metrics=["e2e_mean"], margins={"step_p95": 0.1})
    with pytest.raises(InputError, match="no metric nonsense"):
        compare_runs([a], [slowed], margins={"nonsense": 0.1})


def test_runs_that_are_not_alike_or_not_valid_are_refused_and_told(tmp_path):
    a = run_of(tmp_path / "a", USUAL, 1, 1, 110)
    faster = run_of(tmp_path / "b", replace(USUAL, rate_rps=9.0), 1, 2, 110)
    with pytest.raises(InputError, match=r"arrivals.rate_rps is 8.0 there and 9.0 here"):
        compare_runs([a], [faster])
    forced = compare_runs([a], [faster], force=True)
    assert any(note.startswith("forced: ") and "rate_rps" in note for note in forced.notes)
    invalid = run_of(tmp_path / "c", USUAL, 1, 3, 110)
    invalid.update_meta(valid=False, invalid_reasons=["its server died"])
    with pytest.raises(InputError, match="c is not valid: its server died"):
        compare_runs([a], [invalid])
    changed = run_of(tmp_path / "d", USUAL, 1, 4, 110)
    changed.update_meta(engine=changed.meta()["engine"] | {"max_num_seqs": 8})
    in_force = changed.meta()["engine"]["served"]["engine"]["max_num_seqs"]
    assert f"what differs: engine.max_num_seqs is {in_force} in A and 8 in B" in compare_runs([a], [changed]).notes
    with pytest.raises(InputError, match="no metric nonsense"):
        compare_runs([a], [changed], metrics=["nonsense"])


def test_a_side_whose_machine_was_not_its_own_is_told(tmp_path):
    a, b = (run_of(tmp_path / name, USUAL, 1, noise, 110) for noise, name in enumerate("ab"))
    with_steal(b, 12.0)
    (said,) = [note for note in compare_runs([a], [b]).notes if "hypervisor" in note]
    assert said.startswith("B: the hypervisor gave 12.0% of the CPU time")
    more = [run_of(tmp_path / name, USUAL, 1, noise, 110) for noise, name in enumerate("cd", start=2)]
    (said,) = [note for note in compare_runs([a, more[0]], [b, more[1]]).notes if "hypervisor" in note]
    assert said.startswith("B: in the worst run, the hypervisor gave 12.0% of the CPU time")


def forget(records):
    """As of a foreign server: only the client recorded."""
    records.steps.clear()
    records.requests.clear()


def test_a_run_without_steps_or_too_short_says_so(tmp_path):
    def one_chunk(records):
        forget(records)
        records.client[:] = [
            replace_record(each, first_token_ns=each.last_byte_ns, chunk_ns=[each.last_byte_ns],
                           chunk_tokens=[each.output_tokens])
            for each in records.client
        ]  # fmt: skip

    foreign = [synthetic_run(tmp_path / name, plant=USUAL, requests=110, keep=forget) for name in ("a", "b")]
    assert [each.metric for each in compare_runs(*([run] for run in foreign)).metrics][-1] == "attainment"
    with pytest.raises(InputError, match="which metrics of steps need"):
        compare_runs(*([run] for run in foreign), metrics=["step_p95"])
    whole = [synthetic_run(tmp_path / name, plant=USUAL, requests=110, keep=one_chunk) for name in ("c", "d")]
    found = compare_runs(*([run] for run in whole))
    assert [each.metric for each in found.metrics] == ["ttft_mean", "e2e_mean", "attainment"]
    assert "no run has tpot_mean, so it is left out" in found.notes
    short = [run_of(tmp_path / f"short{number}", USUAL, 1, number, 12) for number in range(2)]
    found = compare_runs(*([run] for run in short), metrics=["e2e_mean"])
    assert found.verdict == "cannot tell" and found.metrics[0].a > 0 and found.metrics[0].b > 0
    assert found.metrics[0].ratio == pytest.approx(found.metrics[0].b / found.metrics[0].a)
    assert any("run at least 40 requests" in note for note in found.notes)


def test_a_b_that_is_too_slow_for_windows_or_serves_nothing_is_worse(tmp_path):
    device = replace(USUAL.device, step_ns=10 * USUAL.device.step_ns)
    plants = {"a": USUAL, "slow": replace(USUAL, device=device), "dead": replace(USUAL, failing_share=1.0)}
    a, slow, dead = (synthetic_run(tmp_path / name, plant=plant, requests=150, keep=forget, device_seed=number)
                     for number, (name, plant) in enumerate(plants.items()))  # fmt: skip
    found = compare_runs([a], [slow], force=True)  # forced: another simulated device is another machine
    assert found.verdict == "worse" and {each.verdict for each in found.metrics} == {"worse"}
    for metrics in ([], ["e2e_mean"], ["e2e_p50", "tpot_p90"]):
        assert compare_runs([a], [dead], metrics=metrics).verdict == "worse"
    with pytest.raises(InputError, match="150 requests and served none"):
        compare_runs([dead], [a])
    with pytest.raises(InputError, match="dead served none"):
        again = synthetic_run(tmp_path / "again", plant=USUAL, requests=150, keep=forget)
        compare_runs([a, slow], [again, dead], force=True)


def test_a_load_that_is_due_at_once_takes_two_runs_a_side(tmp_path):
    def at_once(records):
        forget(records)
        begin = records.client[0].due_ns
        records.client[:] = [replace_record(each, due_ns=begin) for each in reversed(records.client)]

    runs = [
        synthetic_run(tmp_path / str(number), plant=USUAL, requests=60, device_seed=number, keep=at_once)
        for number in range(4)
    ]
    with pytest.raises(InputError, match=r"due at once.*two or more runs a side"):
        compare_runs(runs[:1], runs[1:2], metrics=["e2e_mean"])
    assert read_run(runs[0]).requests.request_id.is_monotonic_increasing  # what is paired is the same request
    assert compare_runs(runs[:2], runs[2:], metrics=["e2e_mean"]).metrics[0].ratio == pytest.approx(1, abs=0.05)
