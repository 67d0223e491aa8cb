"""Logs with a line a request give percentiles and counters; each request counts once, whoever else tells of it."""

import pytest

from sojourn.interop.held.registry import read_held
from sojourn.interop.sources.registry import recognise

DYNAMO = "\n".join(
    f"2026-08-20T10:00:{second:02d}.400000Z  INFO dynamo_llm::http::service::metrics: request completed "
    f'request_id="r{second}" x_request_id="x" model="m" status="{"success" if second else "error"}" '
    "ttft_ms=200.0 elapsed_ms=2200.0 input_tokens=200 output_tokens=101 avg_itl_ms=20.0"
    for second in range(11)
)
DYNAMO_JSON = (
    '{"time":"2026-08-20T10:00:00Z","level":"INFO","target":"dynamo_llm::http::service::metrics","message":'
    '"request completed","status":"success","ttft_ms":200.0,"elapsed_ms":2200.0,"output_tokens":101}\n'
)
RAY = """\
(ProxyActor pid=1) INFO 2025-07-17 12:00:00,123 proxy 10.0.0.1 aa-1 -- POST /v1/chat/completions 200 2200.0ms
(ServeReplica:default:LLMRouter pid=2) INFO 2025-07-17 12:00:00,122 default_LLMRouter x aa-1 -- POST /v1 200 2190.0ms
(ServeReplica:default:LLMServer pid=3) INFO 2025-07-17 12:00:00,120 default_LLMServer y aa-1 -- CALL chat OK 2150.0ms
(ProxyActor pid=1) INFO 2025-07-17 12:00:05,123 proxy 10.0.0.1 aa-2 -- POST /v1/chat/completions 500 20.3ms
(ProxyActor pid=1) INFO 2025-07-17 12:00:05,123 proxy 10.0.0.1 aa-2 -- GET /metrics 200 1.3ms
"""
TGI = (
    '2024-05-01T12:00:0{s}.123456Z  INFO chat_completions{{total_time="2.2s" validation_time="1.2ms" '
    'queue_time="300ms" inference_time="1.9s" time_per_token="21.8ms"}}: text_generation_router::server: Success\n'
)
OLLAMA = """\
[GIN] 2024/05/01 - 12:00:01 | 200 |  2.2s |       127.0.0.1 | POST     "/api/chat"
[GIN] 2024/05/01 - 12:00:09 | 500 |  1m3.5s |       127.0.0.1 | POST     "/v1/chat/completions"
[GIN] 2024/05/01 - 12:00:09 | 200 | 5.4µs | 127.0.0.1 | HEAD "/"
"""
LOGS = {
    "Dynamo": (DYNAMO, {("ttft_ms", "mean"): 200.0, ("tpot_ms", "mean"): 20.0, ("output_tokens", "mean"): 101.0,
                        ("succeeded", "total"): 10.0, ("failed", "total"): 1.0, ("requests_per_s", "rate"): 1.0}),
    "Dynamo, as JSON": (DYNAMO_JSON * 2, {("ttft_ms", "mean"): 200.0, ("succeeded", "total"): 2.0}),
    "Ray Serve": (RAY, {("succeeded", "total"): 1.0, ("failed", "total"): 1.0}),
    "TGI": (TGI.format(s=0) + TGI.format(s=9), {("queue_ms", "mean"): 300.0, ("e2e_per_token_ms", "mean"): 21.8}),
    "Ollama": (OLLAMA, {("succeeded", "total"): 1.0, ("failed", "total"): 1.0}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), LOGS.values(), ids=LOGS)
def test_the_figures_are_those_of_the_lines(text, wanted):
    (held,) = read_held(text, "log")
    wanted = wanted | {("e2e_ms", "median"): 2200.0}
    assert {key: held.figures.value(*key) for key in wanted} == pytest.approx(wanted)
    carried = read_held("\n".join(f"web-1  | {line}" for line in text.split("\n")), "log")
    assert carried[0].figures == held.figures


@pytest.mark.parametrize("name", ["Dynamo", "TGI"])
def test_over_time_they_are_the_counters_of_the_servers_own_page(name):
    (held,) = read_held(LOGS[name][0], "log")
    last = {row["name"]: row["value"] for row in held.series}
    assert recognise(set(last)).key == held.server
    assert last[{"Dynamo": "dynamo_frontend_requests_total", "TGI": "tgi_request_success"}[name]] == (
        11 if name == "Dynamo" else 2
    )
    assert last[{"Dynamo": "dynamo_frontend_time_to_first_token_seconds_sum", "TGI": "tgi_request_queue_duration_sum"}[
        name]] == pytest.approx(2.0 if name == "Dynamo" else 0.6)  # fmt: skip


def test_a_line_of_another_server_in_go_is_no_answer_of_ollama():
    gin = '[GIN] 2024/05/01 - 12:00:01 | 200 |  2.2s |       127.0.0.1 | POST     "/users"\n'
    with pytest.raises(Exception, match="no line of a known kind"):
        read_held(gin, "log")
