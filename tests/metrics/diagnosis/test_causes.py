"""A cause is registered where it is defined, and nowhere else."""

import pytest

from metrics.diagnosis.facts import read_facts
from metrics.diagnosis.rules.cause import CAUSES, Explanation, Gain, cause, first_cause
from metrics.diagnosis.symptoms import BY_KEY
from metrics.ledger import ACCOUNT_BY_NAME, LIFECYCLES
from tests.metrics.synthetic import synthetic_run

ABOUT = {"lifecycles": ("compute",), "object": "moon", "kind": "fault", "rival": "the sun"}


@pytest.fixture
def unregistered():
    """Forgets the causes that a test registers."""
    before = list(CAUSES)
    yield
    CAUSES[:] = before


def full_moon(facts, excess) -> Explanation:
    """A cause that always applies."""
    return Explanation(cause="the moon is full", evidence=[], measurement="tomorrow", settings={"moon": "new"},
                       if_cause="it wanes", if_rival="it shines", gain=Gain("light", basis="none"))  # fmt: skip


def test_one_definition_registers_a_cause_in_its_place(tmp_path, unregistered):
    made = cause(precedence=101, needs=(), **ABOUT)(full_moon)
    assert [each.key for each in CAUSES if each.reads == "records"][:3] == ["slow_device", "full_moon", "slow_host"]
    found = first_cause(read_facts(synthetic_run(tmp_path / "run", requests=20)), None)
    assert found.key == made.key == "full_moon" and found.rival == "the sun" and found.object == "moon"
    assert found.change == "moon=new" and found.command.endswith("--set moon=new")


@pytest.mark.parametrize(("name", "precedence"), [("slow_host", 101), ("full_moon", 100)])
def test_two_causes_of_one_name_or_precedence_are_refused(unregistered, name, precedence):
    def explain(facts, excess): ...

    explain.__name__ = name
    with pytest.raises(ValueError, match=f"and {name} share a name or the precedence {precedence}"):
        cause(precedence=precedence, **ABOUT)(explain)


@pytest.mark.parametrize("each", CAUSES, ids=lambda each: f"{each.reads}-{each.key}")
def test_every_cause_names_known_lifecycles_accounts_and_symptoms(each):
    assert set(each.lifecycles) <= {*LIFECYCLES, "client"} and set(each.accounts) <= set(ACCOUNT_BY_NAME)
    assert not each.symptom or each.symptom in BY_KEY
    assert each.explain.__doc__
