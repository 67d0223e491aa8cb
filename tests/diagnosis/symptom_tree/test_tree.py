"""The tree of a symptom leads where the verdict points, rules out in numbers, and names the missing evidence."""

from dataclasses import replace
from functools import cache

import pytest

from sojourn.diagnosis.causes.launch_bound import show_launches
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.launch_facts import Launches
from sojourn.diagnosis.symptom_tree.complaints import COMPLAINTS
from sojourn.diagnosis.symptom_tree.tree import LIFECYCLE_QUESTIONS, SymptomTree, symptom_tree
from sojourn.diagnosis.symptoms import SYMPTOMS
from sojourn.diagnosis.verdict import Diagnosis
from tests.further import further
from tests.metrics.synthetic import PLANTS, synthetic_run

ALWAYS = ("small_batch_cap", "long_beside_chat", "slow_encode", "slow_network", "tiny_kv")
PLANTED = [*ALWAYS, *further(*(name for name, plant in PLANTS.items() if plant.symptom and name not in ALWAYS))]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A plant → its diagnosis and the six trees, computed once."""

    @cache
    def read(plant: str) -> tuple[Diagnosis, dict[str, SymptomTree]]:
        run = synthetic_run(tmp_path_factory.mktemp("runs") / "run", plant=plant, requests=50)
        facts, diagnosis = read_evidence(run), diagnose(run)
        return diagnosis, {symptom.key: symptom_tree(facts, diagnosis, symptom.key) for symptom in SYMPTOMS}

    return read


@pytest.mark.parametrize("plant", PLANTED)
def test_branch_of_every_finding_leads_there_and_no_other_object_does(known, plant):
    diagnosis, trees = known(plant)
    assert diagnosis.findings
    for place, found in enumerate(diagnosis.findings):
        tree = trees[found.symptom]
        branch = next(each for each in tree.branches if each.lifecycle == found.lifecycles[0])
        leaf = next(each for each in branch.objects if each.finding == place)
        assert leaf.measurement == found.probe.measurement and leaf.reason == found.cause
        assert leaf.status == ("leads_here" if found.role == "cause" else "possible")
        assert branch.status == "leads_here" or found.role == "alternative"
    first = trees[diagnosis.findings[0].symptom]
    assert first.branches[0].status == "leads_here" and diagnosis.findings[0].cause in first.branches[0].reason
    assert first.finding == 0 and first.next_measurement == diagnosis.findings[0].probe.measurement
    for tree in trees.values():
        leading = [leaf for branch in tree.branches for leaf in branch.objects if leaf.status == "leads_here"]
        assert all(leaf.finding is not None for leaf in leading)


@pytest.mark.parametrize("plant", ["small_batch_cap", "slow_network", "healthy"])
def test_every_branch_gives_its_reason_and_what_is_ruled_out_has_a_number(known, plant):
    for tree in known(plant)[1].values():
        assert {branch.lifecycle for branch in tree.branches} == set(LIFECYCLE_QUESTIONS)
        for branch in tree.branches:
            assert branch.reason
            for leaf in branch.objects:
                assert leaf.reason and leaf.measurement
                assert leaf.status != "unknown" or leaf.reason.startswith("missing: ")
            if branch.status == "ruled_out":
                assert any(letter.isdigit() for letter in branch.reason) or not branch.objects, branch.reason


def test_a_run_without_the_symptom_rules_every_lifecycle_out(known):
    tree = known("healthy")[1]["high_ttft"]
    assert tree.status == "absent" and {branch.status for branch in tree.branches} == {"ruled_out"}
    assert tree.finding is None and not tree.next_measurement


def test_queue_is_ruled_out_by_its_share_and_the_network_is_not(known):
    tree = known("slow_network")[1]["high_ttft"]
    by_name = {branch.lifecycle: branch for branch in tree.branches}
    assert by_name["client"].share > 0.8 and by_name["request"].status == "ruled_out"
    assert any("of that excess" in leaf.reason for leaf in by_name["request"].objects)


def test_reader_is_ruled_out_only_where_neither_of_its_accounts_holds_time(known):
    branch = next(each for each in known("slow_network")[1]["high_ttft"].branches if each.lifecycle == "client")
    assert next(each for each in branch.objects if each.key == "slow_reader").status != "ruled_out"


@pytest.mark.parametrize(("device", "found", "is_out"), [
    ("cpu", None, True), ("cuda:0", None, True), ("cuda:0", Launches(0.9, 1.0, 0.8, 4.0), False),
])  # fmt: skip
def test_launches_are_ruled_out_by_the_device_or_by_graphs(tmp_path, device, found, is_out):
    facts = read_evidence(synthetic_run(tmp_path / "run", requests=30))
    reading = show_launches(replace(facts, launches=found, meta=facts.meta | {"core": {"device": device}}))
    assert reading.rules_out is is_out


def test_two_run_symptoms_ask_for_the_second_run(known):
    tree = known("tiny_kv")[1]["devices_do_not_help"]
    assert tree.status == "unknown" and "--against RUN2" in tree.next_command


def test_without_server_records_the_lifecycles_cannot_be_known(tmp_path):
    def forget(records) -> None:
        records.requests.clear()
        records.steps.clear()

    run = synthetic_run(tmp_path / "run", plant="overload", requests=40, keep=forget)
    facts, diagnosis = read_evidence(run), diagnose(run)
    tree = symptom_tree(facts, diagnosis, "high_ttft")
    by_name = {branch.lifecycle: branch.status for branch in tree.branches}
    assert by_name["memory"] == by_name["compute"] == "unknown"
    assert by_name["request"] == "leads_here"  # by what the client's own records hint at
    assert "with the server's records" in tree.next_measurement


def test_complaints_are_the_symptoms():
    assert [complaint.symptom for complaint in COMPLAINTS] == [symptom.key for symptom in SYMPTOMS]
