"""A diagnosis of a foreign server uses what its metrics show, and says which measurement is missing for the rest."""

import io

import msgspec
import pytest
from rich.console import Console

from sojourn.commands.compare import compare
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.terminal.report import render
from sojourn.diagnosis.terminal.short_report import ShortReport
from sojourn.diagnosis.verdict import without_finding
from tests.metrics.foreign import Life, SglangPage, VllmPage, foreign_run, steady

# 40 requests in 4 s, of which two run at a time: the queue grows to 6 s.
CROWD = [Life(due_s=0.1 * n, queue_s=0.15 * n, prefill_s=0.05, decode_s=0.45) for n in range(40)]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The diagnosis of 20 requests to a healthy vLLM."""
    return diagnose(foreign_run(tmp_path_factory.mktemp("few") / "run", steady(20), VllmPage()))


def status(diagnosis, symptom: str) -> str:
    return next(check.status for check in diagnosis.checks if check.symptom == symptom)


def printed(diagnosis, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(render(diagnosis))
    return out.getvalue()


def test_shares_sum_to_one_with_what_is_unaccounted_and_unseen_accounts_have_none(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(60, queue_s=0.3), VllmPage()))
    assert sum(diagnosis.ledger_share.values()) == pytest.approx(1)
    assert sum(diagnosis.ttft_share.values()) == pytest.approx(1)
    assert diagnosis.ledger_share["request.queue + memory.blocked"] == pytest.approx(0.3 / 0.761, rel=1e-3)
    assert "request.stream" not in diagnosis.ledger_share and "token.encode" not in diagnosis.ledger_share
    assert diagnosis.ledger_share["unaccounted"] == pytest.approx(0.010 / 0.761, rel=1e-3)


def test_batch_that_is_capped_while_the_kv_cache_has_room_is_named(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", CROWD, VllmPage(), kv_use=0.3))
    first = diagnosis.findings[0]
    assert first.object == "batch cap" and first.kind == "policy" and first.lifecycles[0] == "request"
    assert "--max-num-seqs above 2: 16 is a proposal to measure" in first.fix.change and diagnosis.state == "degraded"
    assert diagnosis.bottleneck == "request" and first.probe.rival.startswith("overload")
    assert status(diagnosis, "vram_fills_quickly") == "absent"


def test_full_kv_cache_beside_waiting_requests_is_named(tmp_path):
    lives = [Life(due_s=life.due_s, queue_s=life.queue_s, prefill_s=0.05, decode_s=0.45, preemptions=n % 2)
             for n, life in enumerate(CROWD)]  # fmt: skip
    diagnosis = diagnose(foreign_run(tmp_path / "run", lives, SglangPage(), kv_use=0.98))
    first = diagnosis.findings[0]
    assert first.object == "KV block pool" and first.lifecycles[0] == "memory"
    assert "20 preemptions" in first.cause and "--mem-fraction-static" in first.fix.change
    assert status(diagnosis, "vram_fills_quickly") == "present" and status(diagnosis, "high_ttft") == "present"


def test_cap_and_pool_are_not_blamed_where_the_gauges_speak_against_them(tmp_path):
    """The batch was larger while nobody waited; and preemptions beside half a pool are not for want of blocks."""
    ran = [Life(due_s=0.01 * n, prefill_s=0.05, decode_s=1.5, preemptions=1) for n in range(12)]
    lives = [*ran, *(Life(due_s=life.due_s + 2, queue_s=life.queue_s, decode_s=0.45) for life in CROWD)]
    diagnosis = diagnose(foreign_run(tmp_path / "run", lives, VllmPage(), kv_use=0.5))
    assert diagnosis.server.preemptions == 12 and diagnosis.server.waiting.largest_batch == 12
    assert not diagnosis.findings and diagnosis.state == "inconclusive"
    assert "in vLLM's queue time" in diagnosis.headline and "`--max-num-seqs` and once at half" in diagnosis.headline


def test_prompts_that_begin_alike_and_miss_the_cache_are_named(tmp_path):
    classes = [{"klass": "chat", "prompt_tokens": 1000, "output_tokens": 21, "shared_prefix_tokens": 800}]
    lives = steady(20, every_s=0.7, prefill_s=0.6, prompt_tokens=1000, cached_tokens=100)
    run = foreign_run(tmp_path / "run", lives, VllmPage(), scenario={"name": "x", "workload": {"classes": classes}})
    first = diagnose(run).findings[0]
    assert first.object == "prefix cache" and "80% of the prompt tokens are alike" in first.cause
    assert "gave only 10%" in first.cause


@pytest.mark.parametrize(("page", "prefixes", "key", "cause", "change"), [
    (VllmPage(block_size=1024), 1, "prefix_sub_block", "beginning of 800 tokens is less than a block of 1024",
     "--block-size"),
    (VllmPage(prefix_caching=False), 1, "prefix_cache_off", "the prefix cache is off", "--enable-prefix-caching"),
    (VllmPage(), 83, "cache_thrash", "a pool of 65,536 tokens is smaller than the 66,400 tokens", "a larger pool"),
    (VllmPage(), 81, "prefix_recomputed", "the cache gave only 0%", "more room for KV"),
])  # fmt: skip
def test_prefix_cache_that_cannot_hit_says_why(tmp_path, page, prefixes, key, cause, change):
    classes = [{"klass": "chat", "prompt_tokens": 1000, "output_tokens": 21, "shared_prefix_tokens": 800,
                "num_shared_prefixes": prefixes}]  # fmt: skip
    lives = steady(20, every_s=0.7, prefill_s=0.6, prompt_tokens=1000)
    run = foreign_run(tmp_path / "run", lives, page, scenario={"name": "x", "workload": {"classes": classes}})
    first = diagnose(run).findings[0]
    assert first.key == key and cause in first.cause and change in first.fix.change


@pytest.mark.parametrize(("workload", "is_named"), [
    ({"classes": [{"klass": "chat", "prompt_tokens": 1000, "output_tokens": 21, "session": {"turns": 8}}]}, True),
    ({"trace": {"path": "trace.jsonl"}}, True),
    ({"classes": [{"klass": "chat", "prompt_tokens": 1000, "output_tokens": 21}]}, False),
])  # fmt: skip
def test_only_classes_that_share_nothing_acquit_a_prefix_cache_that_is_off(tmp_path, workload, is_named):
    """Turns of a session repeat their history, and of a trace nothing is declared."""
    lives = steady(20, every_s=0.7, prefill_s=0.6, prompt_tokens=1000)
    page = VllmPage(prefix_caching=False)
    found = diagnose(foreign_run(tmp_path / "run", lives, page, scenario={"name": "x", "workload": workload}))
    assert ("prefix_cache_off" in [each.key for each in found.findings]) is is_named


def test_what_the_metrics_cannot_tell_is_inconclusive_and_names_the_next_measurement(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(20, every_s=0.7, prefill_s=0.6), VllmPage()))
    assert diagnosis.state == "inconclusive" and not diagnosis.findings
    assert diagnosis.headline.startswith("20 of 20 requests (100%) miss ttft ≤ 400 ms, by 211 ms on average. ")
    assert "is 611 ms: 600 ms (98%) in vLLM's prefill time. Its metrics do not say why" in diagnosis.headline
    assert "Next: send one of these prompts alone" in diagnosis.headline
    assert without_finding(diagnosis).startswith("vLLM's metrics name no cause")


def test_slow_way_to_the_server_is_not_blamed_on_it(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(20, every_s=0.7, way_in_s=0.5), VllmPage()))
    assert "between the client and vLLM before their first token" in diagnosis.headline
    assert diagnosis.findings[0].probe.measurement == "the same load from the server's own host"


def test_healthy_server_is_healthy_and_the_report_marks_what_is_unseen(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(60), VllmPage()))
    assert diagnosis.state == "healthy" and status(diagnosis, "low_device_utilisation") == "unknown"
    text = printed(diagnosis)
    for account in diagnosis.server.accounts:
        marks = {"seen": "seen", "partly": "seen in part", "unseen": "not visible in vLLM's metrics"}
        mark = marks[account.visibility]
        assert any(line.split()[:1] == [account.account] and mark in line for line in text.splitlines())
    assert "Client and server agree: 60 finished requests, 6,000 prompt tokens, 1,260 output tokens" in text
    assert "unaccounted: 4.0 ms inside vLLM's own end-to-end latency, 6.0 ms outside" in " ".join(text.split())


def test_report_of_a_server_that_finished_nothing_has_no_table_of_nothing(tmp_path):
    text = printed(diagnose(foreign_run(tmp_path / "run", [], VllmPage())))
    assert "no request finished, so no means" in text
    assert "part of the time" not in text and "agree" not in text


@pytest.mark.parametrize(("of_ms", "says"), [(-0.04, " 0.0 ms inside"), (-0.06, " -0.1 ms inside")])
def test_no_time_has_no_sign(few, of_ms, says):
    view = msgspec.structs.replace(few, server=msgspec.structs.replace(few.server, inside_ms=of_ms))
    assert says in printed(view)


def test_device_of_sglang_is_told_by_its_forward_passes(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(60), SglangPage()))
    reason = next(check.reason for check in diagnosis.checks if check.symptom == "low_device_utilisation")
    assert "by SGLang's metrics" in reason


def test_limits_of_the_scrapes_are_warnings(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(60), VllmPage(), silent=(3.0, 9.0), restart_at_s=11.0,
                                     fresh=VllmPage()))  # fmt: skip
    said = " ".join(diagnosis.warnings)
    assert "6 of " in said and "scrapes of /metrics failed" in said and "not answered for 7.0 s" in said
    assert "began anew 1 times" in said and "23 of the 29 accounts of time are not visible in vLLM's metrics" in said


def test_page_of_an_unknown_server_is_said_to_be_one(tmp_path):
    class Unknown(VllmPage):
        def render(self) -> bytes:
            return super().render().replace(b"vllm:", b"nobodys:")

    diagnosis = diagnose(foreign_run(tmp_path / "run", steady(20), Unknown()))
    assert diagnosis.server is None and diagnosis.state == "healthy"
    assert any("none of the servers that are known here: Sojourn, vLLM, SGLang" in said for said in diagnosis.warnings)


def test_report_of_a_foreign_server_is_whole_at_any_width(tmp_path):
    diagnosis = diagnose(foreign_run(tmp_path / "run", CROWD, VllmPage()))
    for width in (80, 120):
        text = printed(diagnosis, width)
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        flat = set(text.replace("│", " ").split())
        for account in diagnosis.server.accounts:
            assert set(account.why.split()) <= flat


@pytest.mark.parametrize(("limit_s", "others_s", "named"), [
    (30.0, 12.0, True), (10.0, 4.0, True), (10.0, 20.0, False), (1e9, 12.0, False),
])  # fmt: skip
def test_streams_that_are_cut_at_one_age_are_named_with_it(tmp_path, limit_s, others_s, named):
    """Every third answer is long; one that was sent past the proxy and outlived the limit refutes it."""
    long = [Life(due_s=3.0 * n, decode_s=40.0 + n, output_tokens=400, cut_s=limit_s) for n in range(6)]
    short = [Life(due_s=1.0 + n, decode_s=others_s, output_tokens=100) for n in range(12)]
    diagnosis = diagnose(foreign_run(tmp_path / "run", sorted([*long, *short], key=lambda each: each.due_s),
                                     VllmPage(), objectives=[]))  # fmt: skip
    found = [each for each in diagnosis.findings if each.key == "cut_streams"]
    assert bool(found) == named and (not named or diagnosis.findings[0] is found[0])
    assert not named or f"cut at the age of {limit_s:.0f} s: 6 answers" in found[0].cause
    assert not named or any("6 finished requests more than the client" in each.statement for each in found[0].evidence)


@pytest.mark.parametrize(("buffered", "share"), [(20, "100%"), (14, "70%"), (4, "")])
def test_a_proxy_that_keeps_answers_until_they_are_whole_is_named(tmp_path, buffered, share):
    lives = [Life(due_s=0.7 * n, decode_s=1.0, buffered=n < buffered) for n in range(20)]
    diagnosis = diagnose(foreign_run(tmp_path / "run", lives, VllmPage()))
    assert [each.key for each in diagnosis.findings[:1]] == (["buffered_stream"] if share else [])
    assert not share or f"{share} of the answers come whole" in diagnosis.headline + diagnosis.findings[0].cause


def test_hits_beyond_what_the_load_shares_are_said_on_the_first_screen_and_by_a_comparison(tmp_path, capsys):
    runs = {}
    for cached in (0, 60):
        lives = steady(60, queue_s=0.3, cached_tokens=cached)
        runs[cached] = foreign_run(tmp_path / f"run{cached}", lives, VllmPage(), scenario={"arrivals": {}})
    cold, warm = map(diagnose, runs.values())
    sentence = "60% of the prompt tokens were prefix hits, and this load shares 0%"
    assert sentence not in printed(cold) and sentence in warm.warnings[0]
    out = io.StringIO()
    Console(file=out, width=80).print(ShortReport(warm, "all", most_lines=18))
    told = " ".join(out.getvalue().split())
    assert sentence in told and "another --seed" in told and "more warning" in told
    with pytest.raises(SystemExit):
        compare(runs[0].path, runs[60].path, force=True)
    assert "prefix hits differ: 0% of the prompt tokens in A and 60% in B" in " ".join(capsys.readouterr().out.split())
    sharing = {"klass": "chat", "prompt_tokens": 100, "output_tokens": 21, "shared_prefix_tokens": 60}
    shared = foreign_run(tmp_path / "shared", steady(60, cached_tokens=60), VllmPage(),
                         scenario={"workload": {"classes": [sharing]}})  # fmt: skip
    assert sentence[4:] not in printed(diagnose(shared)) and "cache was warm" not in printed(diagnose(shared))


def test_a_long_report_warns_before_the_accounts(few):
    text = printed(few, 80)
    assert text.index("! no server records") < text.index("Where the time went")
