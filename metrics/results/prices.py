"""What tokens cost: joules and dollars per million. Pure functions.

The dollars are those of the machine for as long as the window lasted, idle or not, spread over the tokens that came in
it: a machine that waits for requests makes them dear. `good` tokens are those of requests that met every objective.
"""

import msgspec
import pandas as pd

from sojourn.metrics.request.goodput import total_tokens, window_ns
from sojourn.metrics.results.energy import EnergyUse

MILLION = 1_000_000


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a window. None where the price, the power sensor or the tokens are missing."""

    seconds: float
    usd_per_hour: float | None  # of the machine
    prompt_tokens: int | None
    output_tokens: int | None
    good_output_tokens: int | None
    usd_per_million_output_tokens: float | None
    usd_per_million_good_output_tokens: float | None
    usd_per_million_tokens: float | None  # prompt and output together
    joules_per_million_output_tokens: float | None


def token_cost(
    rows: pd.DataFrame, usd_per_hour: float | None, energy: EnergyUse | None, kept_share: float = 1.0
) -> TokenCost | None:
    """Of `judged` requests; None where neither a price nor power is known, or nothing was sent. Of a sample, the price
    of the window is that of its `kept_share`."""
    span = window_ns(rows)
    joules = energy.joules_per_token if energy is not None else None
    if span is None or (usd_per_hour is None and joules is None):
        return None
    served = rows[rows.status == "ok"]
    seconds = (span[1] - span[0]) / 1e9
    prompt, output = total_tokens(served.prompt_tokens), total_tokens(served.output_tokens)
    good = total_tokens(rows[rows.good].output_tokens)
    usd = None if usd_per_hour is None else usd_per_hour * seconds / 3600 * kept_share
    return TokenCost(
        seconds=seconds,
        usd_per_hour=usd_per_hour,
        prompt_tokens=prompt,
        output_tokens=output,
        good_output_tokens=good,
        usd_per_million_output_tokens=_per_million(usd, output),
        usd_per_million_good_output_tokens=_per_million(usd, good),
        usd_per_million_tokens=_per_million(usd, None if prompt is None or output is None else prompt + output),
        joules_per_million_output_tokens=None if joules is None else joules * MILLION,
    )


def _per_million(amount: float | None, tokens: int | None) -> float | None:
    return amount / tokens * MILLION if amount is not None and tokens else None


def cost_line(cost: TokenCost) -> str:
    """As a report shows it: "$ 4.20 per million output tokens ($ 5.10 per million good ones) at $ 2.50 an hour"."""
    parts = []
    if cost.usd_per_million_output_tokens is not None:
        good = cost.usd_per_million_good_output_tokens
        beside = [f"$ {good:,.4g} per million good ones" if good is not None else "not one of them good"]
        if cost.usd_per_million_tokens is not None:
            beside.append(f"$ {cost.usd_per_million_tokens:,.4g} with prompt tokens")
        parts.append(
            f"$ {cost.usd_per_million_output_tokens:,.4g} per million output tokens ({', '.join(beside)}) "
            f"at $ {cost.usd_per_hour:g} an hour"
        )
    elif cost.usd_per_hour is not None:
        tokens = "no output token came" if cost.output_tokens == 0 else "the output tokens are not known"
        parts.append(f"{tokens} for $ {cost.usd_per_hour * cost.seconds / 3600:.4g}")
    if cost.joules_per_million_output_tokens is not None:
        parts.append(f"{cost.joules_per_million_output_tokens / 1e3:,.3g} kJ per million output tokens")
    else:
        parts.append("joules are recorded of our engine only, where its machine has a power sensor")
    return "; ".join(parts)
