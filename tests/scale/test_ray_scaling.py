"""How many replicas `scale/ray_scaling.py` wants: under a load it finds a number that serves it, and stays there."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from sojourn.scale.ray_scaling import GoodputPolicy, Load

PLACES = 8  # in the batch of a replica


@dataclass
class Context:
    """What Ray tells a policy, of replicas that share the load."""

    target_num_replicas: int
    open_requests: float
    missed_share: float = 0.0
    current_num_replicas: int | None = None
    silent: int = 0  # replicas that have said nothing yet
    aggregated_metrics: dict = field(default_factory=dict)

    def __post_init__(self):
        count = self.target_num_replicas
        self.current_num_replicas = count if self.current_num_replicas is None else self.current_num_replicas
        each = self.open_requests / count
        said = {"places": PLACES, "running": min(each, PLACES), "waiting": max(0.0, each - PLACES), "ended": 10.0,
                "missed": 10 * self.missed_share}  # fmt: skip
        self.aggregated_metrics = {
            name: {f"replica {number}": value for number in range(count - self.silent)} for name, value in said.items()
        }


def settled(policy: GoodputPolicy, replicas: int, open_requests: float) -> list[int]:
    """The numbers from one decision to the next."""
    seen = [replicas]
    for _ in range(40):
        seen.append(policy(Context(seen[-1], open_requests))[0])
    return seen


@pytest.mark.parametrize("open_requests", [0, 1, 5, 9, 16, 17, 30, 47, 100])
@pytest.mark.parametrize("begin", [1, 3, 20])
def test_it_settles_where_few_wait_and_never_swings(begin, open_requests):
    policy = GoodputPolicy(waiting=4, missed=0.05, busy=0.6)
    seen = settled(policy, begin, open_requests)
    turns = [later - earlier for earlier, later in pairwise(seen) if later != earlier]
    assert len(set(turns)) <= 1, "it went up and down again"
    assert open_requests / seen[-1] <= PLACES + 4, "requests wait, and nothing is added"
    enough = max(1, math.ceil(open_requests / (0.6 * PLACES)))
    assert 1 <= seen[-1] <= enough, "replicas have nothing to do, and stay"


def test_missed_objectives_add_a_replica_though_none_waits():
    policy = GoodputPolicy(waiting=4, missed=0.05, busy=0.6)
    assert policy(Context(2, 10, missed_share=0.06))[0] == 3
    assert policy(Context(2, 10, missed_share=0.05))[0] == 2
    assert policy(Context(3, 1, missed_share=0.01))[0] == 3, "none goes while some requests are late"


def test_nothing_is_decided_while_a_replica_starts_or_ends():
    policy = GoodputPolicy(waiting=4, missed=0.05, busy=0.6)
    assert policy(Context(3, 100, current_num_replicas=2))[0] == 3
    assert policy(Context(3, 0, silent=1))[0] == 3
    assert policy(Context(2, 0, silent=2))[0] == 2


PAGE = """# HELP sojourn_request_waiting Requests that the scheduler did not admit when it planned the last step.
sojourn_request_running{{model_name="m"}} 7.0
sojourn_request_waiting{{model_name="m"}} 3.0
sojourn_request_wait_seconds_total{{model_name="m",reason="batch_cap"}} 99.0
sojourn_request_objective_total{{model_name="m",klass="a",objective="ttft_ms",outcome="missed"}} 99.0
sojourn_request_objective_total{{model_name="m",klass="a",objective="all_objectives",outcome="met"}} {met}
sojourn_request_objective_total{{model_name="m",klass="a",objective="all_objectives",outcome="missed"}} {missed}
sojourn_request_objective_total{{model_name="m",klass="b",objective="all_objectives",outcome="missed"}} 1.0
"""


def test_a_page_of_metrics_is_requests_now_and_outcomes_since_the_last_look():
    load = Load()
    now = {"places": PLACES, "waiting": 3.0, "running": 7.0}
    page = PAGE.format(met=100, missed=50)
    assert load.look(PLACES, page) == now | {"ended": 0, "missed": 0}, "what was before is not now"
    assert load.look(PLACES, PAGE.format(met=108, missed=52)) == now | {"ended": 10, "missed": 2}
    assert load.look(PLACES, "") == {}, "a server that does not answer is not idle"
    assert load.look(PLACES, PAGE.format(met=109, missed=52)) == now | {"ended": 1, "missed": 0}


def test_servers_that_do_not_answer_are_not_taken_away():
    policy, silent = GoodputPolicy(waiting=4, missed=0.05, busy=0.6), Load().look(PLACES, "")
    context = Context(3, 0)
    context.aggregated_metrics = {name: {f"replica {k}": silent[name] for k in range(3)} for name in silent}
    assert policy(context)[0] == 3


def test_the_metrics_are_those_of_the_server():
    labels = {name: METRIC_BY_NAME[f"sojourn_request_{name}"] for name in ("waiting", "running", "objective_total")}
    assert list(labels["objective_total"].labels)[-2:] == ["objective", "outcome"], (
        "the order in which they are written"
    )
