"""A log gives the figures that its whole lines say, and nothing of half a line."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError

V1 = (
    "(APIServer pid=7) INFO 12-31 23:59:{s:02d} [loggers.py:257] Engine 000: Avg prompt throughput: {prompt} tokens/s, "
    "Avg generation throughput: {out} tokens/s, Running: {run} reqs, Waiting: {wait} reqs, GPU KV cache usage: {kv}%, "
    "Prefix cache hit rate: {hit}%"
)
V0 = (
    "INFO 10-01 02:39:08 metrics.py:351] Avg prompt throughput: 871.4 tokens/s, Avg generation throughput: 88.1 "
    "tokens/s, Running: 1 reqs, Swapped: 2 reqs, Pending: 3 reqs, GPU KV cache usage: 0.2%, CPU KV cache usage: 0.0%."
)
SGLANG = """\
[2025-09-03 18:33:18 TP0] Prefill batch. #new-seq: 2, #new-token: 300, #cached-token: 100, token usage: 0.10, \
#running-req: 0, #queue-req: 4,
[2025-09-03 18:33:20 TP0] Decode batch. #running-req: 2, #token: 400, token usage: 0.20, cuda graph: True, gen \
throughput (token/s): 40.00, #queue-req: 0,
[2025-09-03 18:33:20 TP1] Decode batch. #running-req: 2, #token: 400, token usage: 0.20, cuda graph: True, gen \
throughput (token/s): 40.00, #queue-req: 0,
[2025-09-03 18:33:30 TP0] Decode batch, #running-req: 2, #full token: 480, full token usage: 0.24, swa token usage: \
0.31, accept len: 2.5, cuda graph: True, gen throughput (token/s): 48.00, #queue-req: 0
[2025-09-03 18:33:31 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.5 -> 0.6
[2025-09-03 18:33:40 TP0] Decode batch, #running-req: 1, #full token: 480, full token usage: 0.9, swa token usage: \
0.31, cuda graph: True, gen throughput (token/s): 10.00, #queue-req: 1
"""
LLAMA = """\
slot update_slots: id  0 | task 5 | new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = 1000
slot update_slots: id  0 | task 5 | forcing full prompt re-processing due to lack of cache data (likely due to SWA)
slot print_timing: id  0 | task 5 |
prompt eval time =    2000.00 ms /   900 tokens (    2.22 ms per token,   450.00 tokens per second)
       eval time =    1000.00 ms /    50 tokens (   20.00 ms per token,    50.00 tokens per second)
      total time =    3000.00 ms /   950 tokens
"""
TRTLLM = (
    "[04/28/2025-09:56:44] [TRT-LLM] [I] iter = 198, global_rank = 0, rank = 0, currank_total_requests = 0/0, "
    "host_step_time = 5.5ms, prev_device_step_time = 4.5ms, timestamp = 2025-04-28 09:56:44, num_scheduled_requests: "
    "10, states = {'num_ctx_requests': 0, 'num_ctx_tokens': 0, 'num_generation_tokens': 16}"
)
START = (
    "(EngineCore pid=9) INFO 12-31 23:50:00 [core.py:133] Initializing a V1 LLM engine (v0.{v}.0) with config: "
    "model='m', speculative_config=None, dtype=torch.bfloat16, max_seq_len=2048, tensor_parallel_size=2, "
    "compilation_config={{'mode': <Mode.X: 3>, 'max_num_seqs': 1}}, enable_prefix_caching={cache}\n"
    "(APIServer pid=7) INFO 12-31 23:50:00 [utils.py:1] non-default args: {{'max_num_seqs': {cap}, 'hf_overrides': "
    "{{'max_num_seqs': 99}}, 'enable_prefix_caching': {cache}}}\n"
    "(EngineCore pid=9) INFO 12-31 23:51:00 [kv_cache_utils.py:2] GPU KV cache size: 65,536 tokens\n"
    "(EngineCore pid=9) INFO 12-31 23:51:00 [kv_cache_utils.py:2] Maximum concurrency for 2,048 tokens per request: "
    "32.00x"
)


def line(s, out=10.0, run=4, wait=2, kv=50.0, hit=0.0, prompt=100.0):
    text = V1.format(s=s % 60, out=out, run=run, wait=wait, kv=kv, hit=hit, prompt=prompt)
    return text.replace("12-31 23:59", "01-01 00:00") if s >= 60 else text


def one(text):
    (found,) = read_held(text, "log")
    return found


def last(held):
    return {row["name"]: row["value"] for row in held.series}


def figure(held, name, statistic="mean"):
    return held.figures.value(name, statistic)


def test_rates_become_counters_over_a_new_year():
    held = one("\n".join([line(40), line(50, out=20.0), line(60, out=30.0)]))
    moments = sorted({row["ns"] for row in held.series})
    assert [(later - moments[0]) / 1e9 for later in moments] == [0, 10, 20]
    assert last(held)["vllm:generation_tokens_total"] == pytest.approx(600)
    assert last(held)["vllm:prompt_tokens_total"] == pytest.approx(3000)
    assert last(held)["vllm:num_requests_waiting"] == 2 and not held.is_wall_clock


def test_an_idle_time_without_lines_holds_no_token():
    held = one("\n".join([line(0, out=5.0), line(10, out=0.0, prompt=0.0, run=0), line(50, out=10.0)]))
    assert last(held)["vllm:generation_tokens_total"] == pytest.approx(50 + 100)


def test_prompt_rates_are_no_prompt_tokens_where_a_cache_had_some():
    held = one("\n".join([line(0, hit=30.0), line(10, hit=30.0)]))
    assert "vllm:prompt_tokens_total" not in last(held)
    assert last(held)["vllm:gpu_prefix_cache_hit_rate"] == pytest.approx(0.3)


def test_engine_v0_says_swapped_and_pending():
    held = one(V0 + "\n" + V0.replace("02:39:08", "02:39:13"))
    assert last(held)["vllm:num_requests_swapped"] == 2 and last(held)["vllm:num_requests_waiting"] == 3
    assert last(held)["vllm:kv_cache_usage_perc"] == pytest.approx(0.002)


def test_settings_of_the_last_start_and_what_changed():
    text = "\n".join([START.format(v=18, cap=8, cache=True), line(0, out=90.0),
                      START.format(v=24, cap=2, cache=False), line(30, out=10.0)])  # fmt: skip
    held = one(text)
    assert held.version == "0.24.0"
    assert held.settings["max_num_seqs"] == 2 and held.settings["enable_prefix_caching"] is False
    assert held.settings["kv_cache_tokens"] == 65536 and held.settings["max_concurrency"] == 32.0
    assert held.settings["tensor_parallel_size"] == 2 and held.settings["dtype"] == "bfloat16"
    assert any("max_num_seqs 8 → 2" in note for note in held.notes)
    assert figure(held, "output_tokens_per_s") == 10 and any("the last of 2 starts" in note for note in held.notes)
    assert [event.kind for event in held.events] == ["restart"]


def test_a_start_that_failed_leaves_no_setting():
    front = "(APIServer pid=7) INFO 12-31 23:40:00 [utils.py:1] vLLM API server version 0.24.0\n"
    failed = front + START.format(v=24, cap=8, cache=True).replace("'hf_overrides'", "'seed': 1, 'hf_overrides'")
    held = one("\n".join([failed, front + START.format(v=24, cap=2, cache=True), line(0)]))
    assert held.settings["max_num_seqs"] == 2 and "seed" not in held.settings
    assert [event.kind for event in held.events] == ["restart"]


def test_a_half_line_is_counted_and_left_out():
    whole = line(0)
    for cut in (whole[:-30], whole[:-90], whole[: whole.index("Waiting")], whole[: whole.index(" reqs, GPU")]):
        held = one("\n".join([line(10), line(20), cut]))
        assert len({row["ns"] for row in held.series}) == 2
        assert any("1 lines of figures are cut off" in note for note in held.notes)


def test_engines_of_one_server_are_one_look():
    held = one("\n".join(line(s + e, out=10.0 * (e + 1)).replace("Engine 000", f"Engine 00{e}")
                         for s in (0, 10, 20) for e in (0, 1)))  # fmt: skip
    assert len({row["ns"] for row in held.series}) == 3
    assert {dict(row["labels"])["engine"] for row in held.series} == {"0", "1"}


def test_requests_that_stand_still_are_a_hang_and_a_long_prompt_that_fills_the_pool_is_none():
    text = [line(0), *(line(s, out=0.0, prompt=0.0) for s in (10, 20)), line(80, out=0.0, prompt=0.0)]
    (event,) = one("\n".join(text)).events
    assert event.kind == "hang" and event.line == 2 and "4 running and 2 waiting" in event.sentence
    moving = [line(s, out=0.0, prompt=0.0, kv=float(s)) for s in (0, 10, 20, 80)]
    assert one("\n".join(moving)).events == []


def test_a_traceback_is_its_last_line_and_one_after_a_shutdown_is_no_fault():
    head = "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1131] "
    other = '(APIServer pid=1) INFO:     10.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK'
    text = "\n".join([
        line(0), head + "Traceback (most recent call last):", head + '  File "core.py", line 1140, in run', other,
        head + "    raise e", head + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0",
    ])  # fmt: skip
    found = {event.kind: event for event in one(text).events}
    assert found["traceback"].line == 2 and found["traceback"].sentence.startswith("OutOfMemoryError: CUDA out of")
    assert found["out of memory"].sentence == "the device had no memory for 50.00 MiB"
    shut = "(APIServer pid=7) INFO 12-31 23:59:10 [launcher.py:254] [shutdown] API server: shutdown triggered"
    after = one("\n".join([line(0), shut, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered"]))
    assert [event.kind for event in after.events] == ["warning"]


def test_sglang_counts_by_its_batches_of_the_first_rank():
    held = one(SGLANG)
    assert last(held)["sglang:generation_tokens_total"] == pytest.approx(480 + 100)
    assert last(held)["sglang:prompt_tokens_total"] == 400 and last(held)["sglang:cached_tokens_total"] == 100
    assert last(held)["sglang:num_retracted_requests_total"] == 3 and last(held)["sglang:token_usage"] == 0.9
    assert figure(held, "hit_rate") == pytest.approx(0.25) and held.is_wall_clock


@pytest.mark.parametrize(
    "words", ["KV cache pool is full. Retract requests.", "Decode out of memory happened.",
              "decode out of memory happened,"],
)  # fmt: skip
def test_a_retraction_that_several_ranks_tell_counts_once(words):
    told = [
        f"[2025-09-03 18:33:{second} TP{rank}] {words} #retracted_reqs: 2, #new_token_ratio: 0.{second} -> 0.9"
        for second in (31, 31, 35) for rank in (0, 1)
    ]  # fmt: skip
    held = one("\n".join([*SGLANG.split("\n")[:4], *told, SGLANG.split("\n")[5]]))
    assert next(event.times for event in held.events if event.kind == "preemption") == 3
    assert [row["value"] for row in held.series if row["name"] == "sglang:num_retracted_requests_total"][-1] == 6
    assert one("\n".join(told)).events[0].times == 3  # without a batch line around them


def test_a_task_of_llama_cpp_counts_while_it_runs():
    text = (
        "2.02.000.000 I slot print_timing: id  3 | task 0 | n_decoded =   1000, tg =  12.93 t/s, tg_3s =  12.57 t/s\n"
        "2.05.000.000 I slot print_timing: id  3 | task 0 | n_decoded =   1040, tg =  12.90 t/s, tg_3s =  12.57 t/s\n"
        "2.06.000.000 I slot print_timing: id  3 | task 0 |        eval time =   80000.00 ms /  1050 tokens (   1 ms)\n"
        "2.06.000.100 I srv  update_slots: all slots are idle\n"
    )
    held = one(text)
    assert [row["value"] for row in held.series if row["name"].endswith("predicted_total")][-1] == 50.0
    begun = one("\n".join(text.split("\n")[:2]))
    assert begun.figures.value("decode_tokens_per_s_of_a_slot", "rate") == 12.9


def test_what_newer_versions_add_to_a_line_hides_none():
    (held,) = read_held(line(0) + ", MFU: 1.7 TF/s/GPU 50.0 GB/s/GPU\n" + line(10) + ", Something new: 3 reqs", "log")
    assert held.figures.value("output_tokens_per_s") == 10.0 and not [n for n in held.notes if "cut off" in n]


def test_llama_cpp_counts_over_the_time_that_its_lines_state():
    tasks = "".join(
        f"{minute}.00.100.000 I slot launch_slot_: id  0 | task {minute} | processing task\n"
        f"{minute}.03.000.000 I slot print_timing: id  0 | task {minute} |\n"
        "prompt eval time =    2000.00 ms /   900 tokens (    2.22 ms per token,   450.00 tokens per second)\n"
        "       eval time =    1000.00 ms /    50 tokens (   20.00 ms per token,    50.00 tokens per second)\n"
        f"{minute}.03.000.100 I slot      release: id  0 | task {minute} | stop processing: n_tokens = 950\n"
        f"{minute}.03.000.200 I srv  update_slots: all slots are idle\n"
        for minute in (1, 2)
    )
    rows = one(tasks).series
    tokens = [(row["ns"] / 1e9, row["value"]) for row in rows if row["name"] == "llamacpp:tokens_predicted_total"]
    assert tokens[1] == (63.0, 50.0) and tokens[-1][1] == 100.0 and tokens[-1][0] == pytest.approx(123.0, abs=0.01)
    running = [row["value"] for row in rows if row["name"] == "llamacpp:requests_processing"]
    assert running == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_llama_cpp_says_what_was_computed_again():
    held = one(LLAMA)
    assert figure(held, "prefill_tokens_per_s", "rate") == pytest.approx(450)
    assert figure(held, "tpot_ms") == pytest.approx(20) and held.settings["n_ctx_slot"] == 8192
    assert "10% of 1,000 prompt tokens came from the cache (1 tasks)" in held.notes
    assert held.events[0].line == 2 and "computed again" in held.events[0].sentence


def test_tensorrt_llm_s_steps_are_a_look_a_second():
    text = "\n".join(TRTLLM.replace("09:56:44", f"09:56:{second}") for second in (44, 44, 45, 46))
    rows = one(text).series
    assert [row["value"] for row in rows if row["name"] == "trtllm_num_requests_running"] == [10.0] * 3
    assert [row["value"] for row in rows if row["name"] == "trtllm_prefill_batch_tokens_count"] == [2.0, 3.0, 4.0]


def test_tensorrt_llm_counts_no_padding():
    held = one(TRTLLM + "\n" + TRTLLM[:-40])
    assert figure(held, "host_step_ms") == 5.5 and figure(held, "running", "max") == 10
    assert figure(held, "device_step_ms") == 4.5 and "1 iteration lines are cut off" in held.notes[0]
    assert not any("token" in each.name for each in held.figures.figures if each.name != "prompt_tokens_of_a_step")


TEXTS = ("\n".join(line(s) for s in range(0, 60, 10)), V0, SGLANG, LLAMA, TRTLLM, START.format(v=1, cap=2, cache=True))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.randoms(use_true_random=False))
def test_mixed_and_damaged_logs_are_read_or_refused(first, second, chance: random.Random):
    """Lines that are cut, mixed, prefixed, doubled, or have bytes lost: no traceback, and no gauge that no line had."""
    lines = [*first.split("\n"), *second.split("\n")]
    chance.shuffle(lines)
    damaged = []
    for text in lines:
        place = chance.randrange(len(text) + 1)
        damaged.append(chance.choice((text, text[:place], text[place:], text[:place] + chance.choice(lines),
                                      f"vllm-1  | {text}", f"\x1b[32m{text}\x1b[0m")))  # fmt: skip
    try:
        found = read_held("\n".join(damaged), "log")
    except InputError:
        return
    for held in found:
        names = {row["name"] for row in held.series}
        assert all(row["value"] in (2.0, 3.0) for row in held.series if row["name"] == "vllm:num_requests_waiting")
        assert all(row["value"] in (0.0, 1.0, 4.0) for row in held.series if row["name"] == "sglang:num_queue_reqs")
        assert names or held.missing


def test_sglang_that_is_started_again_counts_and_is_set_anew():
    starts = [f"[2025-09-03 18:{minute}:00] server_args=ServerArgs(model_path='m', quantization={quantization})\n"
              for minute, quantization in ((33, "'fp8'"), (50, "None"))]  # fmt: skip
    held = one(f"{starts[0]}{SGLANG}{starts[1]}{SGLANG.replace('18:33', '18:50')}")
    assert last(held)["sglang:generation_tokens_total"] == pytest.approx(480 + 100)  # nothing of the time between
    assert "quantization" not in held.settings and any("last of 2 starts" in note for note in held.notes)


@pytest.mark.parametrize("late", [True, False])
def test_a_compilation_is_a_fault_only_while_requests_run(late):
    compiled = "(EngineCore pid=9) INFO 12-31 23:59:21 [monitor.py:34] torch.compile takes 12.5 s in total"
    served = [line(s) for s in (0, 10)]
    held = one("\n".join([*served, compiled, line(30)] if late else [compiled, *served]))
    assert [event.kind for event in held.events] == ["late compilation" if late else "compilation"]
    told = f"{line(0)}\nWARNING 12-31 23:59:05 [jit_monitor.py:9] Triton kernel JIT compilation during inference: _k.\n"
    assert "late compilation" in [event.kind for event in one(told).events]
