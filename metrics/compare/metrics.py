"""The metrics that two runs are compared by. Imports nothing heavy: the help of the command line names them."""

from typing import Literal, NamedTuple

Statistic = Literal["p50", "p90", "p95", "mean"]
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95}
SHARES = ("good", "served")  # of all requests, whatever came of them


class Metric(NamedTuple):
    """`lower`: whether less is better."""

    what: str
    statistic: Statistic
    lower: bool
    source: Literal["requests", "tokens", "steps"]


METRICS: dict[str, Metric] = {
    **{
        f"{name}_{statistic}": Metric(f"{name}_ms", statistic, True, "requests")
        for name in ("ttft", "tpot", "e2e")
        for statistic in ("p50", "p90", "mean")
    },
    "attainment": Metric("good", "mean", False, "requests"),
    "served": Metric("served", "mean", False, "requests"),
    "tokens_per_s": Metric("tokens", "mean", False, "tokens"),
    "step_p50": Metric("ratio", "p50", True, "steps"),
    "step_p95": Metric("ratio", "p95", True, "steps"),
    "step_mean": Metric("ratio", "mean", True, "steps"),
    "steady_steps": Metric("steady", "mean", False, "steps"),
}  # fmt: skip
