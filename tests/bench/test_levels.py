"""The judge of planted faults on a real vLLM: what counts as right, as open, and as a false alarm."""

import pytest

from bench.levels.cases import Case
from bench.levels.judge import Said, counts, verdict_on

FAULT, CONTROL = Case("fault", "planted", ("batch_cap",)), Case("control", "nothing")


@pytest.mark.parametrize(("case", "state", "keys", "right"), [
    (FAULT, "degraded", ("batch_cap", "overload"), "right"), (FAULT, "degraded", ("overload", "batch_cap"), "beside"),
    (FAULT, "degraded", ("overload",), "wrong"), (FAULT, "degraded", (), "cannot tell"),
    (CONTROL, "healthy", (), "silent"), (CONTROL, "problem", (), "false alarm"),
    (CONTROL, "cannot tell", ("overload",), "false alarm"),
])  # fmt: skip
def test_verdict_is_judged_by_its_first_cause(case, state, keys, right):
    assert verdict_on(case, "page", Said(state, keys, "")).right == right


def test_case_that_the_clients_records_contradict_does_not_count():
    assert counts(FAULT, 0.5) and not counts(FAULT, 0.95)
    assert counts(CONTROL, 0.95) and not counts(CONTROL, 0.5)
