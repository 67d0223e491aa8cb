"""Every flag of `vllm bench serve` is honoured or refused with a sentence; what it asks for becomes a scenario."""

import shlex

import pytest
import yaml

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.scenario.vllm_flags import REFUSED, flag_parser, parse
from sojourn.metrics.errors import InputError

# Of vllm/benchmarks/serve.py and datasets.py, version 0.33, but for those of data sets that are not offered here.
VLLM_FLAGS = shlex.split("""
--append-result --backend --base-url --burstiness --chat-template-kwargs --custom-output-len --dataset-name
--dataset-path --disable-shuffle --disable-tqdm --endpoint --extra-body --frequency-penalty --goodput --header --host
--hf-split --hf-subset --ignore-eos --input-len --insecure --label --logprobs --lora-assignment --lora-modules
--max-concurrency --metadata --metric-percentiles --min-p --model --no-oversample --num-prompts --num-warmups
--output-len --percentile-metrics --plot-dataset-stats --plot-timeline --port --prefix-repetition-num-prefixes
--prefix-repetition-output-len --prefix-repetition-prefix-len --prefix-repetition-suffix-len --presence-penalty
--probe-request-rate --profile --ramp-up-end-rps --ramp-up-start-rps --ramp-up-strategy --random-batch-size
--random-input-len --random-output-len --random-prefix-len --random-range-ratio --ready-check-timeout-sec
--repetition-penalty --request-id-prefix --request-rate --result-dir --result-filename --save-detailed --save-result
--seed --self-timed --served-model-name --sharegpt-output-len --skip-tokenizer-init --temperature
--timeline-itl-thresholds --tokenizer --tokenizer-mode --top-k --top-p --trust-remote-code --use-beam-search
""")
RANDOM = "--dataset-name random --base-url http://127.0.0.1:1 "


def scenario_of(words: str):
    return parse(shlex.split(RANDOM + words)).scenario


@pytest.mark.parametrize("flag", VLLM_FLAGS)
def test_flag_of_vllm_is_honoured_or_refused_and_never_both(flag):
    honoured = any(flag in action.option_strings for action in flag_parser()._actions)
    assert honoured != (flag in REFUSED)
    if flag in REFUSED:
        with pytest.raises(
            InputError, match=f"`{flag}` of vllm bench serve cannot be honoured here: {REFUSED[flag]:.12}"
        ):
            parse([*shlex.split(RANDOM), flag, "1"])


def test_readers_of_vllms_manual_get_the_load_that_it_describes():
    asked = parse(shlex.split(
        RANDOM + "--request-rate 4 --burstiness 0.25 --num-prompts 200 --random-input-len 128 --random-output-len 64 "
        "--goodput ttft:500 tpot:50 e2el:20000 --model m --temperature 0.7 --num-warmups 3 --seed 9 --processes 4"
    ))  # fmt: skip
    scenario, (klass,) = asked.scenario, asked.scenario.workload.classes
    arrivals = scenario.arrivals
    assert (arrivals.process, arrivals.rate_rps, arrivals.cv, arrivals.count) == ("gamma", 4, 2, 200)
    assert (klass.prompt_tokens.tokens, klass.output_tokens.tokens, klass.ignore_eos) == (128, 64, True)
    (objective,) = scenario.objectives
    assert (objective.ttft_ms, objective.tpot_ms, objective.e2e_ms) == (500, 50, 20000)
    assert klass.temperature == 0.7 and scenario.measure.warmup_requests == 3
    assert (asked.model, asked.seed, scenario.measure.seed, asked.save) == ("m", 9, 9, None)
    assert asked.processes == 4


@pytest.mark.parametrize(
    ("words", "process"),
    [("", "at_once"), ("--request-rate inf", "at_once"), ("--request-rate 4", "poisson"),
     ("--request-rate 4 --burstiness inf", "constant"), ("--max-concurrency 8", "concurrency"),
     ("--request-rate inf --concurrency 8", "concurrency")],
)  # fmt: skip
def test_rate_burstiness_and_concurrency_choose_the_process(words, process):
    assert scenario_of(words).arrivals.process == process


def test_lengths_are_drawn_as_vllm_draws_them():
    (klass,) = scenario_of("--isl 100 --osl 40 --random-range-ratio 0.2 --random-prefix-len 10").workload.classes
    assert klass.prompt_tokens.bounds == (90, 130) and klass.output_tokens.bounds == (32, 48)
    assert klass.shared_prefix_tokens == 10
    words = "--dataset-name prefix_repetition --prefix-repetition-num-prefixes 3 --output-len 5"
    (klass,) = parse(words.split()).scenario.workload.classes
    assert (klass.prompt_tokens.tokens, klass.shared_prefix_tokens) == (512, 256)
    assert (klass.num_shared_prefixes, klass.output_tokens.tokens) == (3, 5)


def test_recorded_data_sets_are_read_by_their_file():
    trace = parse(shlex.split("--dataset-name timed_trace --dataset-path t.jsonl --num-prompts 5")).scenario
    assert (trace.arrivals.process, trace.arrivals.file, trace.arrivals.count) == ("trace", "t.jsonl", 5)
    assert trace.workload.classes[0].content == "blocks"
    (chat,) = parse(shlex.split("--dataset-name sharegpt --dataset-path s.json")).scenario.workload.classes
    assert (chat.from_file, chat.content, chat.output_tokens.distribution) == ("s.json", "recorded", "trace")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--request-rate 4 --max-concurrency 2", "such a run hides the server's delay"),
        ("--burstiness 2", "without a --request-rate all requests come at once"),
        ("--request-rate 0", "--request-rate is 0; it must be above 0"),
        ("--request-rate 4 --burstiness 0", "--burstiness is 0; it must be above 0"),
        ("--goodput ttft", "--goodput has 'ttft'; it takes NAME:VALUE"),
        ("--goodput itl:5", "it takes ttft, tpot, e2el"),
        ("--goodput ttft:-5", "a number of milliseconds above 0"),
        ("--goodput ttft:5 ttft:6", "--goodput has ttft twice"),
        ("--sharegpt-output-len 5", "--sharegpt-output-len is of --dataset-name sharegpt, but it is random"),
        ("--dataset-path x", "--dataset-name random reads no file"),
        ("--input-len 5 --random-input-len 5", "say the same; keep one of the two"),
        ("--random-range-ratio 1", "must be at least 0 and below 1"),
        ("--random-range-ratio x", "it takes a number, or JSON"),
        ("--backend openai-chat --endpoint /v1/completions", "--backend openai-chat asks /v1/chat/completions"),
        ("--host h", "--base-url names the server, and so do --host and --port"),
        ("--tokenizer t --skip-tokenizer-init", "--skip-tokenizer-init would not read"),
        ("--save-detailed", "--save-detailed is of the result file, which nobody asked for; add --save-result"),
        ("--save-result --percentile-metrics x", "--percentile-metrics names 'x'"),
        ("--save-result --metric-percentiles 101", "a percentile lies between 0 and 100"),
        ("--num-promts 5", "`--num-promts` is no flag of this command; did you mean `--num-prompts`?"),
        ("--processes 0", "--processes is 0; it must be 1 to 64"),
        ("--num-prompts many", "invalid int value: 'many'"),
    ],
)
def test_contradiction_is_refused_with_a_sentence(words, sentence):
    with pytest.raises(InputError) as refused:
        scenario_of(words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--random-input-len 0", "--random-input-len is 0; it must be at least 1"),
        ("--input-len 0", "--input-len is 0"),
        ("--num-prompts 0", "--num-prompts is 0; it must be at least 1"),
        ("--max-concurrency 0", "--max-concurrency is 0"),
        ("--temperature 9", "--temperature is 9.0; it must be at most 2"),
        ("--top-k -2", "--top-k is -2"),
        ("--num-warmups -1", "--num-warmups is -1"),
    ],
)
def test_fault_of_the_scenario_is_told_of_the_flag_that_was_typed(words, sentence):
    with pytest.raises(ScenarioError) as refused:
        scenario_of(words)
    assert str(refused.value).startswith(sentence) and "`" not in str(refused.value)


@pytest.mark.parametrize("words", ["--top-k -1", "--top-k 0"])
def test_top_k_that_is_off_is_none(words):
    assert scenario_of(words).workload.classes[0].top_k is None


def test_the_data_set_is_random_as_of_vllm_where_none_is_named():
    assert parse([]).scenario == scenario_of("")


def test_flags_of_another_data_set():
    trace = "--dataset-name timed_trace --dataset-path t --request-rate 2"
    for words, sentence in (("--dataset-name sharegpt", "needs its file"), (trace, "its own times")):
        with pytest.raises(InputError, match=sentence):
            parse(words.split())


def test_scenario_that_was_recorded_reads_as_the_same(tmp_path):
    made = scenario_of("--request-rate 4 --random-range-ratio 0.5 --goodput ttft:500")
    path = tmp_path / f"{made.name}.yaml"
    path.write_text(yaml.safe_dump(made.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    assert load_scenario(path).model_dump() == made.model_dump()


def test_result_file_is_named_as_vllm_names_it(tmp_path):
    document = {"backend": "openai", "request_rate": "inf", "max_concurrency": 8, "model_id": "org/m", "date": "D"}
    save = parse(shlex.split(f"{RANDOM} --save-result --result-dir {tmp_path} --metadata tp=1")).save
    assert save.path(document) == tmp_path / "openai-infqps-concurrency8-m-D.json" and save.metadata == {"tp": "1"}
    named = parse(shlex.split(f"{RANDOM} --append-result --result-filename r.json --label x")).save
    assert named.path(document).name == "r.json" and named.append and named.label == "x"
