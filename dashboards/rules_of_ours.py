"""Recording rules of our own engine's names: quantiles and ratios by model, and what alerts share with them."""

from typing import Any

from sojourn.metrics.catalog.catalog import GOOD

WINDOW = "5m"
BURN_WINDOWS = ("5m", "30m", "1h", "6h")
RECORDED_QUANTILES = (0.5, 0.9, 0.99)
RECORDED_HISTOGRAMS = (
    "sojourn_request_ttft_seconds",
    "sojourn_request_itl_seconds",
    "sojourn_request_tpot_seconds",
    "sojourn_request_e2e_seconds",
)
MISSED = "model_name:sojourn_request_missed:ratio_rate{window}"  # share of the requests that missed an objective

BUDGET = "sojourn:error_budget:ratio"  # share of the requests that may miss
BURN_RATE = "model_name:sojourn_error_budget_burn:ratio_rate{window}"  # 1 spends the budget in exactly its period


def by_model(function: str, selector: str, window: str = WINDOW) -> str:
    """A counter's rate or increase, summed over the servers of a model."""
    return f"sum by (model_name) ({function}({selector}[{window}]))"


def share(part: str, whole: str, window: str = WINDOW) -> str:
    return f"{by_model('rate', part, window)} / {by_model('rate', whole, window)}"


_OUTCOMES = "sojourn_memory_prefix_outcome_tokens_total"
_SCHEDULED = "sojourn_token_scheduled_tokens_total"
EVICTED_SHARE = share(f'{_OUTCOMES}{{outcome="miss_evicted"}}', _OUTCOMES)
RECOMPUTED_SHARE = share(f'{_SCHEDULED}{{kind="recompute"}}', _SCHEDULED)
_EVERY = f'sojourn_request_objective_total{{objective="{GOOD}"}}'
_MET = f'sojourn_request_objective_total{{objective="{GOOD}",outcome="met"}}'
_SLOWER, _FASTER = (f'sojourn_compute_residual_seconds_total{{direction="{way}"}}' for way in ("slower", "faster"))
_TOKENS = f"sum by (model_name, instance) (rate({_SCHEDULED}[{WINDOW}]))"
RATIOS = {
    "model_name:sojourn_request_attainment:ratio_rate5m": share(_MET, _EVERY),
    **{MISSED.format(window=window): f"1 - {share(_MET, _EVERY, window)}" for window in BURN_WINDOWS},
    "model_name:sojourn_request_unclosed:ratio_rate5m": share(
        "sojourn_request_unclosed_total", "sojourn_request_finished_total"
    ),
    "model_name:sojourn_memory_prefix_hit:ratio_rate5m": share(
        'sojourn_memory_prefix_tokens_total{result="hit"}', "sojourn_memory_prefix_tokens_total"
    ),
    # Net of the steps that were faster than predicted: noise cancels out, and slowness remains.
    "model_name:sojourn_compute_residual:ratio_rate5m": (
        f"({by_model('rate', _SLOWER)} - {by_model('rate', _FASTER)}) / "
        + by_model("rate", "sojourn_compute_predicted_seconds_total")
    ),
    "model_name:sojourn_compute_device_busy:ratio_rate5m": (
        f"avg by (model_name) (rate(sojourn_compute_device_seconds_total[{WINDOW}]))"
    ),
    # Of several servers of one model: tokens that the busiest computed over the mean, and the hit rate of each.
    "model_name:sojourn_token_imbalance:ratio_rate5m": (
        f"max by (model_name) ({_TOKENS}) / avg by (model_name) ({_TOKENS})"
    ),
    "instance:sojourn_memory_prefix_hit:ratio_rate5m": (
        f'sum by (model_name, instance) (rate(sojourn_memory_prefix_tokens_total{{result="hit"}}[{WINDOW}])) / '
        f"sum by (model_name, instance) (rate(sojourn_memory_prefix_tokens_total[{WINDOW}]))"
    ),
}


def rules_of_ours(target_share: float) -> list[dict[str, Any]]:
    """The rules, as data. `target_share`: of the requests, that should meet every objective."""
    budget = f"{1 - target_share:g}"
    burns = {BURN_RATE.format(window=window): f"{MISSED.format(window=window)} / {budget}" for window in BURN_WINDOWS}
    quantiles = [
        {
            "record": f"model_name:{name}:p{100 * q:g}_rate{WINDOW}",
            "expr": f"histogram_quantile({q:g}, sum by (model_name, le) (rate({name}_bucket[{WINDOW}])))",
        }
        for name in RECORDED_HISTOGRAMS
        for q in RECORDED_QUANTILES
    ]
    named = {**RATIOS, BUDGET: f"vector({budget})", **burns}
    return [*quantiles, *({"record": name, "expr": expr} for name, expr in named.items())]
