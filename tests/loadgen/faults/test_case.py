import pytest

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.score.truth import Remedy
from sojourn.engine.options import engine_config
from sojourn.engine.server.app import build_app
from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.faults.case import CASE_FOLDER, WORKLOAD_FOLDER, case_names, load_case, merged
from sojourn.loadgen.faults.planted import Network


@pytest.fixture(scope="module")
def bundled():
    return [load_case(name) for name in case_names()]


def test_truths_name_causes_that_a_diagnosis_knows(bundled):
    named = {key for case in bundled for variant in case.variants for truth in variant.truths for key in truth.keys}
    assert named <= set(CAUSES)
    assert len(set(CAUSES) - named) <= 13  # most can be planted


def test_the_catalogue_is_broad(bundled):
    faults, controls = [case for case in bundled if case.control is None], [case for case in bundled if case.control]
    assert len(faults) >= 40 and len(controls) >= 12
    assert {case.base for case in faults} == {"chat", "documents", "prefixes", "sessions", "agents", "bursts"}
    assert sum(len(case.variants[0].truths) == 2 for case in faults) >= 3
    assert sum(any(case.fixes) and case.variants[0].truths[0].kinds[0] == "policy" for case in faults) >= 12


def test_settings_faults_and_fixes_are_those_of_the_engine(bundled):
    for case in bundled:
        for variant in case.variants:
            for fix in ({}, *case.fixes):
                chosen = variant.scenario.engine | fix
                assert chosen.keys() <= engine_config(chosen).model_fields_set


def test_a_severity_is_laid_over_the_base():
    case = load_case("batch-cap")
    mild, severe = case.variants
    base = load_case("chat").variants[0]
    assert base.severity == 0 and mild.severity == 1 and severe.severity == 2
    assert severe.scenario.engine == base.scenario.engine | {"max_num_seqs": severe.scenario.engine["max_num_seqs"]}
    assert severe.scenario.workload == base.scenario.workload
    assert severe.truths[0].remedies == [Remedy(setting="max_num_seqs", direction="larger")]
    assert "max_num_seqs" in severe.plant


def test_a_fault_of_the_surroundings_stands_beside_the_scenario():
    (network, _) = (variant.around for variant in load_case("network-delay").variants)
    assert [type(fault) for fault in network] == [Network]


def test_a_fault_of_a_router_needs_a_fleet(tmp_path):
    case = tmp_path / "case.yaml"
    case.write_text(
        "base: chat\ndescription: d\ntruths: [{keys: [slow_router], lifecycles: [request], kinds: [fault]}]\n"
        "severities: [{around: [{fault: slow_router, ms: 9}]}]\n"
    )
    with pytest.raises(ScenarioError, match="severity 1: slow_router needs a router; add a fleet block"):
        load_case(case)


def test_a_base_may_be_a_scenario_beside_the_case(tmp_path):
    (tmp_path / "mine.yaml").write_text((WORKLOAD_FOLDER / "chat.yaml").read_text())
    case = tmp_path / "small-batch.yaml"
    case.write_text(
        "base: mine.yaml\ndescription: d\ntruths: [{keys: [batch_cap], lifecycles: [request], kinds: [policy]}]\n"
        "severities: [{engine: {max_num_seqs: 2}}]\n"
    )
    found = load_case(case)
    assert (found.base, found.base_file) == ("mine", tmp_path / "mine.yaml")
    control = load_case(found.base_file)
    assert (control.name, control.base, control.control) == ("mine", "mine", "healthy")
    assert control.variants[0].scenario.workload == found.variants[0].scenario.workload
    (tmp_path / "mine.yaml").unlink()
    with pytest.raises(ScenarioError, match=r"mine\.yaml cannot be read"):
        load_case(case)


def test_blocks_merge_and_lists_of_classes_merge_by_their_name():
    base = {"a": {"x": 1, "y": 2}, "classes": [{"klass": "chat", "weight": 1}, {"klass": "document", "weight": 2}]}
    assert merged(base, {"a": {"y": 3}, "classes": {"document": {"weight": 5}}}) == {
        "a": {"x": 1, "y": 3},
        "classes": [{"klass": "chat", "weight": 1}, {"klass": "document", "weight": 5}],
    }
    other = {"distribution": "uniform", "min_tokens": 1, "max_tokens": 2}
    assert merged({"distribution": "lognormal", "sigma": 1}, other) == other
    with pytest.raises(ScenarioError, match="the base has no klass 'chart'; it has chat, document"):
        merged(base, {"classes": {"chart": {}}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base: chat\ndescription: x\n", "a fault has truths and severities, a control has control"),
        ("base: chart\ndescription: x\ncontrol: healthy\n", "base 'chart' is no workload; did you mean `chat`"),
        ("base: chat\ndescription: x\ncontrol: fine\n", "`control` is 'fine'; it must be one of"),
        (
            "base: chat\ndescription: x\ncontrol: healthy\nchange: {arrivals: {rate_rps: -1}}\n",
            "`arrivals.rate_rps` is -1; it must be above 0",
        ),
        (
            "base: chat\ndescription: x\ncontrol: healthy\nchange: {around: [{fault: gremlins}]}\n",
            "fault` is 'gremlins'",
        ),
        ("- a list\n", "holds no blocks"),
    ],
)
def test_a_bad_case_gets_a_sentence(tmp_path, text, sentence):
    file = tmp_path / "case.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        load_case(file)
    assert sentence in str(refused.value)


def test_an_unknown_case_is_refused_with_a_guess():
    with pytest.raises(ScenarioError, match="did you mean `batch-cap`"):
        load_case("batch-cup")


def test_a_settings_file_beside_the_cases_is_found_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_case("quota").variants[0].scenario.engine["access"].startswith(str(CASE_FOLDER))


def test_settings_files_of_the_cases_are_what_the_server_reads():
    for name in ("rate-limit", "quota", "slow-moderation"):
        app = build_app(engine_config(load_case(name).variants[0].scenario.engine))
        assert app.routes
