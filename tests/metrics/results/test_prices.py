"""Tokens cost what the machine cost while they came, and idle time makes them dear."""

import pandas as pd
import pytest

from sojourn.metrics.request.goodput import judged
from sojourn.metrics.results.energy import EnergyUse
from sojourn.metrics.results.prices import cost_line, token_cost
from tests.metrics.request.test_latencies import failed, served


def rows(*requests) -> pd.DataFrame:
    bound = [{"klass": "all", "ttft_ms": 100.0, "source": "test"}]
    return judged(pd.DataFrame(requests), bound)


def test_price_of_the_window_is_spread_over_its_tokens():
    an_hour = rows(served(0, 0, [50.0, 60.0]), served(3_599_000, 3_599_000, [3_599_500.0, 3_600_000.0]))
    cost = token_cost(an_hour, 2.0, None)
    assert cost.seconds == 3600 and cost.output_tokens == 4 and cost.good_output_tokens == 2
    assert cost.usd_per_million_output_tokens == pytest.approx(2.0 / 4 * 1e6)
    assert cost.usd_per_million_good_output_tokens == pytest.approx(2.0 / 2 * 1e6)
    assert cost.usd_per_million_tokens == pytest.approx(2.0 / 24 * 1e6)  # 10 prompt tokens each
    assert "per million output tokens" in cost_line(cost) and "at $ 2 an hour" in cost_line(cost)
    assert "joules are recorded of our engine only" in cost_line(cost)


def test_nothing_is_claimed_without_price_power_or_tokens():
    some = rows(served(0, 0, [50.0, 60.0]))
    assert token_cost(some, None, None) is None and token_cost(some[:0], 2.0, None) is None
    lost = token_cost(rows(failed(0), failed(1000)), 2.0, None)
    assert lost.usd_per_million_output_tokens is None and "no output token came for $" in cost_line(lost)
    untold = some.assign(output_tokens=None, prompt_tokens=None)
    silent = token_cost(untold, 2.0, None)
    assert silent.output_tokens is silent.usd_per_million_tokens is None
    assert "the output tokens are not known for $" in cost_line(silent)
    assert "with prompt tokens" not in cost_line(token_cost(some.assign(prompt_tokens=None), 2.0, None))
    use = EnergyUse(seconds=1, joules={"gpu": 4.0, "cpu": None}, output_tokens=2, joules_per_token=2.0)
    drawn = token_cost(some, None, use)
    assert drawn.joules_per_million_output_tokens == 2e6 and "kJ per million" in cost_line(drawn)
