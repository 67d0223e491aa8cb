"""Which technique a case shows: the role follows from what the run chose, and the figures from its verdicts."""

from sojourn.diagnosis.score.techniques import role_in, technique_cases
from sojourn.diagnosis.score.truth import Remedy, Truth
from tests.diagnosis.score.judgements import KV, cause, control, fault, judged, said

SMALL = Truth(keys=["kv_pool"], lifecycles=["memory"], kinds=["capacity"], remedies=[Remedy(setting="kv_cache_dtype")])


def test_a_technique_is_the_cause_where_the_run_chose_it_and_else_the_fix():
    assert role_in(["kv_cache_dtype"], {"kv_cache_gib": 0.1}) == ("formats of keys and values", "fix")
    assert role_in(["eviction_policy"], {"eviction_policy": "ttl"}) == ("eviction policies", "cause")
    assert role_in(["kv_host_gib"], {"kv_disk_path": "disk"}) == ("KV tiers", "cause")  # any setting of the technique
    assert role_in(["kv_cache_gib", "kv_cache_dtype"], {}) is None  # the first setting is the fix
    assert role_in([], {}) is None


def test_a_case_has_one_row_over_its_repeats_that_hurt():
    right = said(cause("kv_pool", settings={"kv_cache_dtype": "int8"}))
    runs = [
        judged(fault(SMALL), right),
        judged(fault(SMALL, repeat=2), said("overload", "kv_pool")),
        judged(fault(SMALL, repeat=3), right, attainment=0.97),  # does not hurt
        judged(fault(KV, case="blocks"), said("kv_pool")),  # no technique mends it
        judged(control(), said(state="healthy"), attainment=1.0),
    ]
    (row,) = technique_cases(runs, {"run": {}})
    assert (row.technique, row.role, row.case) == ("formats of keys and values", "fix", "kv")
    assert [(each.right, each.judged) for each in (row.first, row.among_three, row.remedy)] == [(1, 2), (2, 2), (1, 2)]
