"""A cause is registered where it is defined, and nowhere else."""

import re
from pathlib import Path

import pytest

import sojourn.diagnosis as diagnosis
from sojourn.diagnosis.facts import read_facts
from sojourn.diagnosis.rules.cause import CAUSES, Gain, Proposal, cause, gain, proposals_of_symptom
from sojourn.diagnosis.symptoms import BY_KEY
from sojourn.metrics.catalog.catalog import CATALOG
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, LIFECYCLES
from tests.metrics.synthetic import synthetic_run

ABOUT = {"lifecycles": ("compute",), "object": "moon", "kind": "fault", "rival": "the sun"}


@pytest.fixture
def unregistered():
    """Forgets the causes that a test registers."""
    before = list(CAUSES)
    yield
    CAUSES[:] = before


def full_moon(facts, excess) -> Proposal:
    """A cause that always applies."""
    return Proposal(cause="the moon is full", evidence=[], measurement="tomorrow", settings={"moon": "new"},
                    if_cause="it wanes", if_rival="it shines", gain=Gain("light", basis="none"))  # fmt: skip


def test_one_definition_registers_a_cause(tmp_path, unregistered):
    made = cause(needs=(), symptom="low_device_utilisation", **ABOUT)(full_moon)
    facts = read_facts(synthetic_run(tmp_path / "run", requests=20))
    found = next(each for each in proposals_of_symptom(facts, "low_device_utilisation") if each.key == "full_moon")
    assert found.key == made.key == "full_moon" and found.rival == "the sun" and found.object == "moon"
    assert found.change == "moon=new" and found.command.endswith("--set moon=new")


def test_gain_without_an_account_of_time_is_not_known(tmp_path):
    found = gain(read_facts(synthetic_run(tmp_path / "run", requests=20)), {"client.lag": 0.0})
    assert found.statement == "the gain is not known" and found.share is None


def test_metrics_in_the_words_of_a_diagnosis_exist():
    folder = Path(diagnosis.__file__).parent
    named = {
        name for file in folder.rglob("*.py") for name in re.findall(r"sojourn_[a-z0-9_]+", file.read_text("utf-8"))
    }
    assert named and named <= {metric.name for metric in CATALOG}


def test_two_causes_of_one_name_are_refused(unregistered):
    def slow_host(facts, excess): ...

    with pytest.raises(ValueError, match="two causes have the name slow_host"):
        cause(**ABOUT)(slow_host)


@pytest.mark.parametrize("each", CAUSES, ids=lambda each: f"{each.reads}-{each.key}")
def test_every_cause_names_known_lifecycles_accounts_and_symptoms(each):
    assert set(each.lifecycles) <= {*LIFECYCLES, "client"} and set(each.accounts) <= set(ACCOUNT_BY_NAME)
    assert not each.symptom or each.symptom in BY_KEY
    assert each.explain.__doc__


def test_every_cause_stands_in_the_page_on_the_diagnosis():
    page = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    missing = [each.key for each in CAUSES if each.reads == "records" and f"| `{each.key}` |" not in page]
    assert not missing
