"""A cause is declared in its own file, and nowhere else."""

import re
from pathlib import Path

import pytest

import sojourn.diagnosis as diagnosis
from sojourn.diagnosis.cause import Cause, Records, Rule
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.document import DOCUMENT, renew
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.proposal import Gain, Proposal, gain
from sojourn.diagnosis.proposals import proposals_of_symptom
from sojourn.diagnosis.symptoms import BY_KEY
from sojourn.metrics.catalog.catalog import CATALOG
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, LIFECYCLES
from tests.metrics.synthetic import synthetic_run


def full_moon(facts, excess) -> Proposal:
    return Proposal(cause="the moon is full", evidence=[], measurement="tomorrow", settings={"moon": "new"},
                    if_cause="it wanes", if_rival="it shines", gain=Gain("light", basis="none"))  # fmt: skip


def test_a_proposal_gets_from_its_cause_what_it_does_not_say(tmp_path, monkeypatch):
    rule = Rule(full_moon, needs=(), symptom="low_device_utilisation")
    made = Cause(key="full_moon", lifecycles=("compute",), object="moon", kind="fault", rival="the sun",
                 reads={Records: rule})  # fmt: skip
    monkeypatch.setitem(CAUSES, made.key, made)
    facts = read_evidence(synthetic_run(tmp_path / "run", requests=20))
    found = next(each for each in proposals_of_symptom(facts, "low_device_utilisation") if each.key == "full_moon")
    assert found.rival == "the sun" and found.object == "moon"
    assert found.change == "moon=new" and found.command.endswith("--set moon=new")


def test_gain_without_an_account_of_time_is_not_known(tmp_path):
    found = gain(read_evidence(synthetic_run(tmp_path / "run", requests=20)), {"client.lag": 0.0})
    assert found.statement == "the gain is not known" and found.share is None


def test_metrics_in_the_words_of_a_diagnosis_exist():
    folder = Path(diagnosis.__file__).parent
    named = {
        name for file in folder.rglob("*.py") for name in re.findall(r"sojourn_[a-z0-9_]+", file.read_text("utf-8"))
    }
    assert named and named <= {metric.name for metric in CATALOG}


@pytest.mark.parametrize(("name", "each"), CAUSES.items(), ids=CAUSES)
def test_every_cause_has_the_key_of_its_file_and_names_what_is_known(name, each):
    rules = [*each.reads.values(), *([each.lost] if each.lost else [])]
    lifecycles = {*each.lifecycles, *(name for rule in rules for name in rule.lifecycles)}
    accounts = {*each.booked, *(name for rule in rules for name in rule.accounts)}
    assert each.key == name
    assert lifecycles <= {*LIFECYCLES, "client"} and accounts <= set(ACCOUNT_BY_NAME)
    assert {each.rival_key, *(rule.rival_key for rule in rules)} <= {*CAUSES, "", None}
    assert {*each.complaints, *filter(None, (rule.symptom for rule in rules))} <= set(BY_KEY)
    assert bool(each.complaints) == bool(each.asks and each.measurement)  # a leaf of the symptom tree


def test_the_page_on_the_diagnosis_has_the_tables_of_the_causes():
    page = DOCUMENT.read_text(encoding="utf-8")
    assert renew(page) == page, "run `python -m sojourn.diagnosis.document`"
