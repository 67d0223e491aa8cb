"""Logs and pages as series: the watch judges them; what only gauges show is said with its rivals."""

import json
import re
import time

import msgspec
import pytest

from sojourn.interop.held.registry import read_held
from sojourn.interop.sources.page import read_page
from sojourn.live.watch.from_evidence import write_evidence
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.recorded import diagnose_recorded
from sojourn.triage.conclude import conclude, triage_given
from sojourn.triage.document import Seen
from sojourn.triage.terminal import report
from tests.live.watch.simulated_vllm import Load, SimulatedVllm
from tests.live.watch.test_simulated import BUSY_CPU, SITUATIONS
from tests.triage.test_conclude import LATE

LINE = (
    "(APIServer pid=1) INFO 11-28 16:{:02d}:{:02d} [loggers.py:310] Engine 000: "
    "Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, "
    "Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {:.1f}%, Prefix cache hit rate: 10.0%\n"
)


def log(look, moments=20):
    """`look`: of the number of a line, its tokens/s, running, waiting and KV use."""
    rows = [(10 * place, *look(place)) for place in range(moments)]
    return "".join(LINE.format(s // 60, s % 60, tokens / 2, tokens, *others) for s, tokens, *others in rows)


LOGS = {  # what the log shows, the state, the first cause
    "a limit on the batch": (lambda n: (200.0, 8, min(3 * n, 40), 20.0), "problem", "batch_cap"),
    "a full KV cache": (lambda n: (200.0, 8 + n % 4, min(3 * n, 40), 98.0), "problem", "kv_pool"),
    "a hang": (lambda n: (200.0 if n < 6 else 0.0, 4, 2, 18.0), "stuck", "hang"),
    "a batch that varies beside a line": (lambda n: (200.0, 4 + 4 * (n % 3), 3, 20.0), "problem", ""),
    "nothing wrong": (lambda n: (200.0, 4 + n % 4, 0, 18.0), "cannot tell", ""),
    "an idle server": (lambda n: (0.0, 0, 0, 0.0), "no problem seen", ""),
}


@pytest.mark.parametrize(("look", "state", "key"), LOGS.values(), ids=LOGS)
def test_a_log_of_vllm_is_judged(look, state, key):
    found = triage_given(texts={"server.log": log(look)})
    assert (found.likely[0].key if found.likely else "") == key
    assert found.state == state
    assert any("latencies" in each for each in found.unknowable)


START = "INFO 11-28 16:00:00 [api_utils.py:286] non-default args: {{'max_model_len': 2048, {}}}\n"
CAUSES = {  # flags, what the log shows, an end of its lines, the first cause
    "a flat batch that is no limit": ("'x': 1", lambda n: (200.0, 45, min(9 * n, 120), 35.0), "", "overload"),
    "a flat batch at a default": ("'x': 1", lambda n: (200.0, 256, min(9 * n, 120), 35.0), "", "batch_cap"),
    "a flat batch below its flag": ("'max_num_seqs': 64", lambda n: (200.0, 40, 50, 35.0), "", "overload"),
    "a small budget": ("'max_num_batched_tokens': 16", lambda n: (20.0, 2, 1 + n, 2.0), "", "token_budget"),
    "a small pool": ("'x': 1", lambda n: (200.0, 4 + n % 5, 20, 50.0 + 9 * (n % 6)), "", "kv_pool"),
    "a pool for four": ("'x': 1", lambda n: (60.0, 4 - n % 3, 9 + n, 20.5 * (4 - n % 3)), "", "kv_pool"),
    "a small limit that is reached at times": (
        "'max_num_seqs': 4", lambda n: (180.0, 4 - n % 3, 9 + n, 0.6 * (4 - n % 3)), "", "batch_cap"),
    "no whole block": ("'block_size': 512, 'enable_prefix_caching': True",
                       lambda n: (200.0, 45, 60, 35.0), "0.0%", "prefix_sub_block"),
    "grammars": ("'x': 1", lambda n: (20.0, 1, 4, 2.0), "Deferred: 4 reqs", "slow_grammar"),
    "adapters may wait like grammars": ("'enable_lora': True", lambda n: (20.0, 5, 4, 2.0), "Deferred: 4 reqs", ""),
    "rejected drafts": ("'x': 1", lambda n: (200.0, 4, 0, 2.0),
                        "Accepted: 2 tokens, Drafted: 131 tokens", "rejected_drafts"),
    "accepted drafts": ("'x': 1", lambda n: (200.0, 4, 0, 2.0), "Accepted: 90 tokens, Drafted: 131 tokens", ""),
    "a dead core": ("'x': 1", lambda n: (200.0, 4, 0, 2.0), "EngineDeadError", "death"),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "look", "end", "key"), CAUSES.values(), ids=CAUSES)
def test_a_log_names_what_its_own_lines_carry(flags, look, end, key):
    text = START.format(flags) + log(look)
    if end == "0.0%":
        text = text.replace("hit rate: 10.0%", "hit rate: 0.0%")
    elif end.startswith("Deferred"):
        text = text.replace(" reqs, GPU", f" reqs, {end}, GPU")
    elif end.startswith("Accepted"):
        text = re.sub(r"(hit rate: 10.0%\n)", rf"\1INFO 11-28 16:00:00 [m.py:1] SpecDecoding metrics: {end}, \n", text)
    else:
        text += f"ERROR 11-28 16:05:00 [async_llm.py:906] {end}\n" if end else ""
    found = triage_given(texts={"server.log": text})
    assert (found.likely[0].key if found.likely else "") == key


def test_one_line_of_a_log_names_no_cause():
    found = triage_given(texts={"server.log": log(lambda n: (0.0, 3, 4, 40.0), moments=1)})
    assert not found.likely and any("no token comes" in each.sentence for each in found.certain)


def pages(name, seconds):
    settings, *_ = SITUATIONS[name]
    return [body.decode() for second, body in SimulatedVllm(**settings).pages(max(seconds) + 1) if second in seconds]


@pytest.mark.parametrize(("name", "keys"), [
    ("small KV pool", {"kv_pool"}), ("cap of 2", {"batch_cap", "overload"}), ("half of the load", {""}),
])  # fmt: skip
def test_dated_pages_are_judged_as_a_watch_does(name, keys):
    seconds = [10, 20, 30, 40, 50]
    dated = {
        f"{at}.txt": f"2026-11-28T16:00:{at}Z\n{page}" for at, page in zip(seconds, pages(name, seconds), strict=True)
    }
    found = triage_given(texts=dated)
    assert (found.likely[0].key if found.likely else "") in keys


def test_pages_without_a_moment_show_means_and_no_rate():
    first, second = pages("cap of 2", [10, 50])
    found = triage_given(texts={"a": first, "b": second})
    assert any("queue" in each.sentence and "a to b" in each.source for each in found.certain)
    assert any(each.startswith("rates") for each in found.unknowable)


def test_a_summary_and_a_log_are_concluded_together():
    found = triage_given(texts={"a.json": json.dumps(LATE), "server.log": log(LOGS["a limit on the batch"][0])})
    assert {each.key for each in found.likely} == {"late_client", "batch_cap"} and len(found.seen) == 2


def test_a_long_log_is_judged_by_its_worst_period():
    """An idle end, and a quiet week before, do not hide a line, and it is said when it was."""

    def look(n):
        return (200.0, 8, 30, 20.0) if 100 <= n < 150 else (0.0, 0, 0, 0.0) if n >= 150 else (50.0, 1, 0, 2.0)

    found = triage_given(texts={"server.log": log(look, moments=200)})
    assert [each.key for each in found.likely] == ["batch_cap"]
    assert any("periods of 6" in each.sentence for each in found.certain), found.certain


HANG = (dict(loads=(Load(2),), device=BUSY_CPU, hangs=(40.0, 90.0)), 70)
EVERY_S = 3  # between two pages
FACES = ["cap of 2", "cap of 16", "small KV pool", "half of the load", "overload from the start", "a hang"]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "a hang" else pytest.mark.thorough) for name in FACES
])  # fmt: skip
def test_a_watch_triage_and_a_run_give_one_verdict_of_the_same_pages(name, tmp_path):
    settings, seconds, *_ = SITUATIONS.get(name, HANG)
    observer, held = Observer("x", "x", {}, window_s=60.0), []
    for second, body in SimulatedVllm(**settings).pages(seconds):
        if second % EVERY_S == 0:
            observer.add(second * 10**9, *read_page(body, second * 10**9, 0.01, observer.window.wants))
            live = observer.watched()
            moment = time.strftime("2026-11-28T16:%M:%SZ", time.gmtime(second))
            held += read_held(f"{moment}\n{body.decode()}", f"{second:02}")
    key = live.findings[0].key if live.findings else ""
    found = conclude(held, {})
    assert found.state == ("stuck" if live.state == "stuck" else "problem" if key else "no problem seen")
    assert (found.likely[0].key if found.likely else "") == key
    diagnosis = diagnose_recorded(write_evidence(held, tmp_path / "run", {}))
    assert diagnosis.state == live.state
    assert (diagnosis.findings[0].key if diagnosis.findings else "") == key


def test_flags_beside_a_log_confirm_the_limit():
    look = LOGS["a limit on the batch"][0]
    alone = triage_given(texts={"server.log": log(look)})
    found = triage_given(texts={"server.log": log(look), "flags": "vllm serve m --max-num-seqs 8\n"})
    assert found.likely[0].key == "batch_cap" and found.likely[0].confidence > alone.likely[0].confidence


def test_a_limit_names_its_flag_its_change_and_the_port_of_the_log():
    start = "INFO 11-28 16:00:00 [api_utils.py:286] non-default args: {'port': 18777, 'max_num_seqs': 8}\n"
    found = triage_given(texts={"server.log": start + log(LOGS["a limit on the batch"][0])})
    assert found.likely[0].change == "--max-num-seqs above 8: 64 is a proposal to measure"
    assert "http://SERVER:18777" in found.next
    seen = report(found).split("\ncertain")[0]
    assert "on average over lines with load and 40 at the end" in found.seen[0].shows
    assert not seen.endswith(",") and "\n  …" not in seen


def test_facts_are_whole_and_the_others_are_counted():
    seen = Seen(name="a", kind="log", label="", shows=", ".join(f"setting_{place} [1, {place}]" for place in range(40)))
    answer = triage_given(texts={"server.log": log(LOGS["an idle server"][0])})
    lines = report(msgspec.structs.replace(answer, seen=[seen])).split("\n")
    facts = " ".join(lines[1:5])
    kept = facts.count("setting_")
    assert facts.endswith(f"setting_{kept - 1} [1, {kept - 1}], and {40 - kept} more")


def test_a_page_shows_what_its_log_lacks():
    page = pages("half of the load", [50])[0]
    quiet = log(LOGS["nothing wrong"][0])
    found = triage_given(texts={"server.log": quiet, "page": page})
    assert not any(each.startswith("latencies") for each in found.unknowable)
    assert not any("not shown" in each.sentence for each in found.certain) and "by page TTFT" in found.headline
    assert found.state == "no problem seen"


def test_the_older_of_two_processes_is_past():
    started = "process_start_time_seconds {}\n"
    old, new = pages("cap of 2", [50])[0], pages("half of the load", [50])[0]
    texts = {"old": started.format(1795887000) + old, "new": started.format(1795887600) + new}
    for given in (texts, dict(reversed(texts.items()))):
        found = triage_given(texts=given)
        assert not found.likely and found.state == "cannot tell"
        assert found.headline.startswith("new is of a newer process than old")
        assert any("Before, old showed" in each.sentence and not each.is_problem for each in found.certain)


def test_preemptions_between_two_pages_name_what_their_queue_waits_for():
    first, second = pages("small KV pool", [10, 50])
    found = triage_given(texts={"a": first, "b": second})
    assert [each.key for each in found.likely] == ["preempted"]
    assert "of TTFT is its queue" in next(each.sentence for each in found.certain if "preempted" in each.sentence)
    assert not any("what holds the queue" in each for each in found.unknowable)
    assert "confidence 70%: the KV cache" in report(found)
