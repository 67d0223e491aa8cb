"""Shares of the device by phase: quotients of sums, against steps whose answers are known."""

import pandas as pd
import pytest

from sojourn.metrics.compute.roofline import Ceilings, Gemm
from sojourn.metrics.compute.utilisation import TokenNumbers, phases, token_numbers, utilisation
from sojourn.metrics.errors import CalibrationError

CEILINGS = Ceilings("a device", 2, "2026-11-21T00:00:00Z", {}, 100e9, 80e9, 2048, [Gemm("float32", 64, 1e12)])


def table(*steps: dict) -> pd.DataFrame:
    return pd.DataFrame(list(steps))


def step(kinds: list[str], new: list[int], flops: float, moved: float, device_ns: int, gap_ns: int = 0, **more) -> dict:
    return dict(kinds=kinds, new_tokens=new, flops=flops, bytes=moved, device_ns=device_ns, gap_ns=gap_ns) | more


STEPS = table(
    step(["prefill"], [100], 8e9, 1e8, 10_000_000),  # 8 ms of arithmetic in 10
    step(["decode", "decode"], [1, 1], 1e8, 5e8, 10_000_000, 10_000_000),  # 5 ms of reading in 10, after as long a gap
    step(["decode"], [1], 5e7, 5e8, 10_000_000),
    step(["decode", "recompute"], [1, 30], 2e9, 3e8, 5_000_000),
)


def test_each_phase_is_measured_by_its_own_steps():
    assert phases(STEPS).tolist() == ["prefill", "decode", "decode", "mixed"]
    found = {use.phase: use for use in utilisation(STEPS, CEILINGS, "float32")}
    assert list(found) == ["prefill", "decode", "mixed", "all"]
    assert found["prefill"].mfu_busy == found["prefill"].roofline_busy == pytest.approx(0.8)
    decode = found["decode"]
    assert (decode.mbu_busy, decode.mbu_wall) == (pytest.approx(0.5), pytest.approx(1e9 / 100e9 / 0.030))
    assert (decode.tokens, decode.steps, decode.device_ns, decode.wall_ns) == (3, 2, 20_000_000, 30_000_000)
    assert found["mixed"].roofline_busy == pytest.approx((3e8 / 100e9) / 0.005)
    for name in ("steps", "tokens", "device_ns", "wall_ns", "flops", "moved_bytes"):
        assert getattr(found["all"], name) == sum(getattr(found[phase], name) for phase in found if phase != "all")


def test_without_ceilings_there_are_sums_and_no_shares():
    for use in utilisation(STEPS):
        assert use.flops > 0
        assert {use.mfu_busy, use.mfu_wall, use.mbu_busy, use.mbu_wall, use.roofline_busy} == {None}
    assert utilisation(STEPS.iloc[:0], CEILINGS, "float32") == []
    with pytest.raises(CalibrationError, match="bfloat16"):
        utilisation(STEPS, CEILINGS, "bfloat16")


def test_run_without_gaps_has_no_wall_time():
    old = STEPS.assign(gap_ns=float("nan"))
    for use in utilisation(old, CEILINGS, "float32"):
        assert use.roofline_busy > 0
        assert (use.wall_ns, use.mfu_wall, use.mbu_wall) == (None, None, None)


REQUESTS = pd.DataFrame({
    "prompt_tokens": [10, 20], "output_tokens": [5, 15], "prompt_characters": [30, 60], "output_characters": [25, 55],
})  # fmt: skip


def test_certainty_and_characters_are_means_over_the_run():
    steps = STEPS.assign(
        entropy_millinats=[[], [1500], None, [500]], nucleus_mass_ppm=[[], [900_000], None, [700_000]]
    )  # fmt: skip
    numbers = token_numbers(steps, REQUESTS)
    assert (numbers.entropy_nats, numbers.nucleus_mass, numbers.looks) == (1.0, 0.8, 2)
    assert (numbers.prompt_characters_per_token, numbers.output_characters_per_token) == (3.0, 4.0)
    some_as_ids = REQUESTS.assign(prompt_characters=[30, 0])
    assert token_numbers(steps, some_as_ids).prompt_characters_per_token is None


def test_of_a_joined_run_the_servers_own_counts_are_used():
    clash = {"prompt_tokens": "server_prompt_tokens", "output_tokens": "server_output_tokens"}
    joined = REQUESTS.rename(columns=clash).assign(prompt_tokens=[7, None], output_tokens=[None, 3])
    assert token_numbers(STEPS, joined) == token_numbers(STEPS, REQUESTS)


def test_a_run_without_the_newer_columns_tells_what_it_can():
    assert token_numbers(STEPS, REQUESTS[["prompt_tokens", "output_tokens"]]) == TokenNumbers(None, None, 0, None, None)
    assert token_numbers(STEPS.iloc[:0], REQUESTS.iloc[:0]) == TokenNumbers(None, None, 0, None, None)


def test_copies_of_tiers_are_no_work_of_the_model():
    """10 ms of copies beside 10 ms of reading: the shares are those of the reading, and wall time has both."""
    own = step(["decode"], [1], 5e7, 5e8, 10_000_000)
    copying = own | dict(
        device_ns=20_000_000, load_ns=6_000_000, store_ns=4_000_000, tier_loaded_bytes={"host": 100_000_000},
        tier_stored_bytes=[("host", 60_000_000), ("disk", 10**9)],
    )  # fmt: skip
    plain, found = (utilisation(table(each), CEILINGS, "float32")[0] for each in (own, copying))
    assert (found.mbu_busy, found.roofline_busy) == (plain.mbu_busy, plain.roofline_busy)
    assert (found.device_ns, found.copy_ns, found.wall_ns) == (10_000_000, 10_000_000, 20_000_000)
    assert found.copied_bytes == 160_000_000 and plain.copy_roofline is None
    assert found.copy_roofline == pytest.approx(2 * 160e6 / 80e9 / 0.010)
