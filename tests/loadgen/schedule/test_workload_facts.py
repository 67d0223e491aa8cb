"""What a run says of its workload: the ideal beside what the cache had, and how a trace was scaled or thinned."""

import pandas as pd
import pytest

from sojourn.loadgen.run.experiment import load_url, run_scenario
from sojourn.loadgen.run.run_files import begin_run, cache_block_tokens
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.facts import repeated_texts, workload_facts
from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hit_rate
from sojourn.loadgen.target.scrape import rows_of
from sojourn.metrics.memory.prefix_share import cache_sentence, prefix_share, workload_lines
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment
from tests.loadgen.scenarios import CHAT, replay, scenario
from tests.loadgen.schedule.test_content import BLOCKS, MOONCAKE, ideal_of
from tests.loadgen.scripted_server import ScriptedServer
from tests.loadgen.trace_files import write, write_servegen

REQUESTS = pd.DataFrame({
    "status": ["ok", "ok", "ok", "error"], "cached_tokens": [32, None, 0, 99], "prompt_tokens": [64, 100, 36, 99],
    "server_cached_tokens": [None, None, 50, None], "infinite_hit_tokens": [48, None, 2, 0],
})  # fmt: skip
META = {"workload": {"prefix": {"ideal_hit_rate": 0.5, "block_tokens": 16}, "notes": ["scaled"]}}

URL = ScriptedServer().start().url


def test_share_is_of_the_served_requests_whose_cache_is_told():
    share = prefix_share(META, REQUESTS)
    assert (share.achieved, share.infinite, share.num_requests) == (0.32, 0.5, 2)
    assert workload_lines(META, REQUESTS)[1:] == ["scaled"]
    assert "32.0% of the prompt tokens were cached, ideal 50.0% (infinite cache, blocks of 16" in cache_sentence(share)


def test_server_that_tells_nothing_and_load_that_shares_nothing_are_said_to():
    silent = REQUESTS.assign(cached_tokens=None, server_cached_tokens=None)
    assert "the server does not report what it found" in workload_lines(META, silent)[0]
    for meta in ({}, {"workload": None}, {"workload": {}}):
        assert prefix_share(meta, REQUESTS) is None and workload_lines(meta, REQUESTS) == []
    assert workload_facts(scenario(), 0) == {}


def test_more_than_the_ideal_is_said_also_of_prompts_that_share_nothing(tmp_path):
    """The server had them in a run before; recorded texts may share what nobody knows, and no seed changes them."""
    facts = {"prefix": ideal_of(scenario(), build_schedule(scenario(), 0, "x"))}
    assert facts["prefix"]["ideal_hit_rate"] == 0
    (line,) = workload_lines({"workload": facts}, REQUESTS)
    assert line.startswith("Prefix cache: 32.0%") and "ideal 0.0%" in line and "take another seed" in line
    for cold in (REQUESTS.assign(cached_tokens=0, server_cached_tokens=0), REQUESTS.assign(cached_tokens=None)[:2]):
        assert workload_lines({"workload": facts}, cold) == []
    (template,) = workload_lines({"workload": facts}, REQUESTS.assign(cached_tokens=1, server_cached_tokens=1))
    assert "give another" not in template
    said = tmp_path / "said.jsonl"
    said.write_text('{"prompt": "how are you", "output_tokens": 2}\n')
    length = {"distribution": "trace", "min_tokens": 1, "max_tokens": 100}
    told = scenario(classes=[CHAT | {"content": "recorded", "from_file": str(said), "prompt_tokens": length}])
    assert ideal_of(told, build_schedule(told, 0, "x")) is None
    assert "restart it before each run" in repeated_texts(told)[0] and repeated_texts(scenario()) == []


def test_facts_name_the_form_the_scale_and_what_was_left_out(tmp_path):
    file = str(write(tmp_path, "burst6.csv"))
    classes = [BLOCKS, CHAT | {"klass": "dealt", "from_file": file}]
    facts = workload_facts(scenario(MOONCAKE, classes), 1)
    assert facts["traces"][file]["left_out"] == {"failed: 0 response tokens": 1}
    talked, drawn = str(write(tmp_path, "burst8.csv")), str(write_servegen(tmp_path / "servegen"))
    for trace, expected in ((talked, [f"{talked}: 2 requests belong to sessions"]), (drawn, [])):
        notes = workload_facts(scenario({"process": "trace", "file": trace, "duration_s": 60}), 1).get("notes", [])
        assert [note.split(",")[0] for note in notes if "sessions" in note] == expected
    assert (
        facts["traces"][MOONCAKE["file"]] | {"form": "mooncake", "requests": 12_031, "block_tokens": 512}
        == (facts["traces"][MOONCAKE["file"]])
    )
    assert facts["blocks"] == {"chat": {"trace_block_tokens": 512, "block_tokens": 16, "prompt_scale": 1 / 32}}
    assert [note.split(":")[0] for note in facts["notes"]] == [file, file, "class chat"]


@pytest.mark.parametrize("seed", [1, 2])
def test_facts_of_a_drawn_trace_are_of_the_same_draw(tmp_path, seed):
    pool = {"process": "trace", "file": str(write_servegen(tmp_path / "pool")), "duration_s": 20}
    chosen = scenario(pool, [CHAT])
    schedule = build_schedule(chosen, seed, "x")
    assert workload_facts(chosen, seed)["traces"][pool["file"]]["in_slice"] == len(schedule)


def test_shared_system_prompt_is_ideal_but_for_the_first_request_of_each():
    chosen = load_scenario("shared-system-prompt")
    schedule = build_schedule(chosen, 1, "x")
    counted = {request.index for request in schedule if not request.prelude}
    first_by_prelude = {request.shared_prefix for request in schedule if request.prelude}
    ideal = ideal_hit_rate(chosen.workload, schedule, counted, 16)
    assert ideal["ideal_hit_tokens"] == 512 * (len(counted) - (4 - len(first_by_prelude)))


LENGTH = {"distribution": "trace", "min_tokens": 1, "max_tokens": 4000}
ARRIVALS = {"process": "trace", "duration_s": 60, "speedup": 100, "count": 20}


@pytest.mark.parametrize("file", ["AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"])
@pytest.mark.server
def test_slice_of_each_bundled_azure_trace_replays(tmp_path, file):
    parsed = replay(scenario(ARRIVALS | {"file": file}, [CHAT | {"prompt_tokens": LENGTH}]), URL, tmp_path)
    assert len(parsed.records) == 20 and {record.status for record in parsed.records} == {"ok"}


@pytest.mark.server
def test_slice_of_mooncake_replays_and_the_run_says_what_it_was(tmp_path):
    chosen = scenario(ARRIVALS | {"file": MOONCAKE["file"]}, [BLOCKS])
    run = load_url(chosen, URL, tmp_path / "run", tokenizer="tiny-model")
    client = RunDirectory.open(run.path).table("client")
    assert len(client) == 20 and set(client.status) == {"ok"}
    workload = run.meta()["workload"]
    assert workload["traces"][MOONCAKE["file"]]["in_slice"] > 20
    share = prefix_share(run.meta(), run.requests())
    assert 0 < share.ideal < 1 and share.achieved == pytest.approx(3 / 7)  # what the scripted server says
    assert share.infinite_cache == "infinite cache, blocks of 16 tokens assumed"  # of which it says nothing


@pytest.mark.parametrize(
    ("engine", "gauges", "tokens"),
    [({}, "", None), ({"block_size": 32}, "", 32), ({"served": {"id": "m", "engine": {"block_size": 64}}}, "", 64),
     ({}, 'vllm:cache_config_info{block_size="128",num_gpu_blocks="9"} 1\nvllm:num_requests_running 0\n', 128),
     ({}, "sglang:page_size 1\n", 1), ({}, 'vllm:cache_config_info{block_size="auto"} 1\n', None)],
)  # fmt: skip
def test_blocks_of_the_cache_are_those_that_the_server_was_started_with_or_tells(tmp_path, engine, gauges, tokens):
    run = begin_run(tmp_path / "run", scenario(), 0, engine)
    if gauges:
        rows = rows_of(f"# TYPE x gauge\n{gauges}".encode(), 10**9, took_s=0.1)
        write_segment(run.path, "scrapes", rows, "1")
    assert cache_block_tokens(run, run.meta()) == tokens


@pytest.mark.slow
@pytest.mark.server
def test_our_engine_finds_in_a_large_pool_exactly_what_is_ideal(tmp_path):
    """Blocks of requests that are in flight together are the only ones that it may miss: one block a request."""
    chosen = load_scenario("mooncake")
    arrivals = chosen.arrivals.model_copy(update={"duration_s": 40.0})
    run = run_scenario(chosen.model_copy(update={"arrivals": arrivals}), tmp_path / "run")
    counted = measured(run.requests(), run.meta())
    share = prefix_share(run.meta(), counted)
    assert share.num_requests == len(counted) > 80
    per_request = 16 * len(counted) / counted.prompt_tokens.sum()
    assert share.ideal - per_request <= share.achieved <= share.ideal
    assert share.infinite == pytest.approx(share.ideal, abs=1e-9)
