"""A scenario is either usable or refused with a sentence for each thing that is wrong."""

import pytest
import yaml

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.scenario import bundled_scenarios, load_scenario
from sojourn.loadgen.schedule.build import build_schedule

GOOD = """
description: a test
engine: {model: tiny-model}
arrivals: {process: poisson, rate_rps: 2, duration_s: 10}
workload:
  classes: [{klass: chat, prompt_tokens: 50, output_tokens: {distribution: uniform, min_tokens: 1, max_tokens: 9}}]
objectives: [{klass: chat, ttft_ms: 500, source: a paper}]
"""


def faults(tmp_path, text: str) -> list[str]:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)
    return caught.value.faults


def changed(**blocks) -> str:
    return yaml.safe_dump(yaml.safe_load(GOOD) | blocks)


def test_every_bundled_scenario_validates_and_gives_a_schedule():
    expected = {
        "demo",
        "mooncake",
        "steady-chat",
        "long-prompt-beside-chat",
        "shared-system-prompt",
        "kv-pressure",
        "burst",
        "ramp",
        "sessions",
        "agents",
    }
    assert expected <= set(bundled_scenarios())
    for name in bundled_scenarios():
        scenario = load_scenario(name)
        schedule = build_schedule(scenario, scenario.measure.seed, "x")
        assert scenario.name == name and scenario.engine["model"] == "tiny-model"
        loop = scenario.arrivals.closed_loop
        offsets_ns = [request.due_offset_ns for request in schedule if request.due_offset_ns is not None]
        assert 20 <= (max(offsets_ns) / 1e9 if loop is None else loop.duration_s) <= 75
        assert (
            max(request.prompt_tokens + request.max_tokens for request in schedule) < 4096 - 64
        )  # room for a template
        assert all(len(objective.source) > 20 for objective in scenario.objectives)


def test_number_for_a_length_means_that_many_tokens(tmp_path):
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    scenario = load_scenario(file)
    assert scenario.name == "good" and scenario.workload.classes[0].prompt_tokens.tokens == 50


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ({"arrivals": {"process": "poisson", "rate_rps": -1, "duration_s": 1}},
         "`arrivals.rate_rps` is -1; it must be above 0"),
        ({"arrivals": {"process": "poisson", "rate": 1, "rate_rps": 1, "duration_s": 1}},
         "`arrivals.rate` is no known key; did you mean `rate_rps`?"),
        ({"workload": {"classes": [{"name": "a", "prompt_tokens": 5, "output_tokens": 5}]}},
         "`workload.classes[0].name` is no known key; did you mean `klass`, which is missing?"),
        ({"arrivals": {"process": "poisson", "xyz": 1, "rate_rps": 1, "duration_s": 1}},
         "`arrivals.xyz` is no known key; known here: rate_rps, process, duration_s"),
        ({"arrivals": {"process": "poisson", "rate_rps": 1}}, "needs duration_s or count"),
        ({"arrivals": {"process": "poison", "rate_rps": 1}},
         "`arrivals.process` is 'poison'; it must be one of 'poisson'"),
        ({"arrivals": {"rate_rps": 1}}, "`arrivals.process` is missing; it must be one of 'poisson', 'constant'"),
        ({"arrivals": {"process": "gamma", "rate_rps": 1, "count": 3}}, "`arrivals.cv` is missing"),
        ({"arrival": {}}, "`arrival` is no known key; did you mean `arrivals`?"),
        ({"objectives": [{"ttft_ms": 5}]}, "`objectives[0].source` is missing; add it: where the numbers come from"),
        ({"objectives": [{"source": "x"}]}, "`objectives[0]` names no bound; give at least one of ttft_ms"),
        ({"objectives": [{"klass": "chta", "ttft_ms": 5, "source": "x"}]}, "did you mean `chat`?"),
        ({"objectives": []}, "`objectives` is []; it must have at least 1 entries"),
        ({"workload": {"classes": [{"klass": "a b", "prompt_tokens": 5, "output_tokens": 5}]}},
         "`workload.classes[0].klass` is 'a b'"),
        ({"workload": {"classes": [{"klass": "a", "prompt_tokens": 0, "output_tokens": 5}]}},
         "`workload.classes[0].prompt_tokens.tokens` is 0; it must be at least 1"),
        ({"workload": {"classes": [{"klass": "a", "prompt_tokens": "many", "output_tokens": 5}]}},
         "`workload.classes[0].prompt_tokens` is 'many'"),
        ({"workload": {"classes": [{"klass": "a", "prompt_tokens": 5, "output_tokens": 5, "shared_prefix_tokens": 5}]}},
         "shared_prefix_tokens 5 must be below the shortest prompt, 5 tokens"),
        ({"workload": {"classes": [{"klass": "a", "output_tokens": 5, "prompt_tokens":
          {"distribution": "uniform", "min_tokens": 9, "max_tokens": 3}}]}},
         "min_tokens 9 is above max_tokens 3"),
        ({"workload": {"classes": [{"klass": "a", "output_tokens": 5, "prompt_tokens":
          {"distribution": "trace", "min_tokens": 1, "max_tokens": 3}}]},
          "objectives": [{"ttft_ms": 5, "source": "x"}]},
         "a length has distribution trace, but arrivals.process is poisson"),
        ({"target": {"timeout_s": "soon"}}, "`target.timeout_s` is 'soon'; it must be a number"),
        ({"target": {"api": "grpc"}}, "`target.api` is 'grpc'; it must be one of 'completions' or 'chat'"),
        ({"arrivals": {"process": "concurrency", "in_flight": 2, "count": 9}, "workload": {
            "each_arrival": "every_class", "classes": [{"klass": "chat", "prompt_tokens": 5, "output_tokens": 5}]}},
         "is every_class, but arrivals.process is concurrency, a closed loop, whose slots send one request at a time"),
        ({"engine": {"max_num_seqs": [1]}}, "`engine.max_num_seqs` is [1]; it must be a number"),
        ({"target": {"stream": False}}, "`objectives[0].ttft_ms` is 500, but `target.stream` is false: a reply that"),
        ({"target": {"stream": False}, "objectives": [{"e2e_ms": 9, "tpot_ms": 5, "source": "x"}]},
         "`objectives[0].tpot_ms` is 5, but `target.stream` is false"),
        ({"workload": {"classes": [{"klass": "a", "prompt_tokens": True, "output_tokens": 5}]}},
         "`workload.classes[0].prompt_tokens.tokens` is true; it must be a number, not true or false"),
        ({"target": {"timeout_s": True}}, "`target.timeout_s` is true; it must be a number"),
        ({"arrivals": {"process": "times", "times_s": [0, True]}}, "`arrivals.times_s[1]` is true; it must be"),
        ({"objectives": [{"ttft_ms": True, "source": "x"}]}, "`objectives[0].ttft_ms` is true; it must be a number"),
    ],
)  # fmt: skip
def test_bad_scenario_is_refused_with_its_sentence(tmp_path, blocks, sentence):
    found = faults(tmp_path, changed(**blocks))
    assert any(sentence in fault for fault in found), found
    assert all(fault.startswith("bad.yaml: ") for fault in found)


def test_each_fault_has_a_sentence_of_its_own(tmp_path):
    found = faults(tmp_path, changed(target={"api": "grpc", "timeout": 3}, measure={"seed": -1}))
    assert len(found) == 3
    objectives = [{"klass": klass, "ttft_ms": 5, "source": "x"} for klass in ("chta", "chatt")]
    found = faults(tmp_path, changed(target={"stream": False}, objectives=objectives, engine={"threads": [1]}))
    assert len(found) == 5 and len(set(found)) == 5  # of blocks that do not agree, all at once


def test_text_that_is_not_yaml_is_refused_with_its_line(tmp_path):
    assert "line 2, column 21: not YAML" in faults(tmp_path, "description: x\nengine: {model: 'a' b}\n")[0]
    twice = "description: x\narrivals:\n  rate_rps: 1\n  rate_rps: 2\n"
    assert "line 4, column 3: `rate_rps` stands twice in this block; keep one" in faults(tmp_path, twice)[0]
    assert "holds no blocks" in faults(tmp_path, "- a\n- b\n")[0]


def test_unknown_name_is_refused_with_the_nearest_bundled_one():
    with pytest.raises(ScenarioError, match="did you mean `steady-chat`"):
        load_scenario("steady-chatt")


def test_slice_without_requests_and_warmup_without_end_are_refused(tmp_path):
    file = tmp_path / "late.yaml"
    trace = {"process": "trace", "file": "AzureLLMInferenceTrace_conv.csv", "start_s": 1_234_567, "duration_s": 5}
    file.write_text(changed(arrivals=trace))
    with pytest.raises(ScenarioError, match=r"take seconds 1,234,567 to 1,234,572 of .*it ends at 3502 s"):
        build_schedule(load_scenario(file), 0, "x")
    file.write_text(changed(measure={"warmup_s": 60}))
    with pytest.raises(ScenarioError, match=r"measure\.warmup_s is 60"):
        build_schedule(load_scenario(file), 0, "x")
