"""Headers of a scenario, certificates, and the key that limits an answer."""

import json
import ssl

import pytest
from pydantic import ValidationError

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.scenario.vllm_flags import parse
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.target.endpoint import EndpointError, parse_base_url
from tests.loadgen.scenarios import scenario


def wire(chosen, url: str = "http://host:81") -> tuple[str, dict]:
    target = chosen.target
    endpoint = parse_base_url(url, target.headers, target.verify_tls)
    built = build_wire_requests(chosen, 0, build_schedule(chosen, 0, "run"), endpoint, "m")
    head, _, body = built[0].partition(b"\r\n\r\n")
    return head.decode(), json.loads(body)


def test_headers_go_with_each_request_and_take_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    head, _ = wire(scenario(target={"headers": {"api-key": "${MY_KEY}", "x-note": "7"}}))
    assert "\r\napi-key: sesame\r\n" in f"{head}\r\n" and "\r\nx-note: 7\r\n" in f"{head}\r\n"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(EndpointError, match="set the environment variable MY_KEY"):
        wire(scenario(target={"headers": {"api-key": "${MY_KEY}"}}))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("Content-Length", "7", "is set by itself"), ("Authorization", "Bearer x", "SOJOURN_API_KEY"),
        ("a b", "x", "no name of a header"), ("", "x", "no name of a header"), ("x", "a\r\nb: c", "no header may have"),
        ("x", "ü", "no header may have"),
    ],
)  # fmt: skip
def test_header_that_cannot_be_sent_is_refused(name, value, sentence):
    with pytest.raises(ValidationError, match=sentence):
        scenario(target={"headers": {name: value}})


def test_answer_s_limit_has_the_key_that_the_server_takes():
    _, body = wire(scenario(target={"max_tokens_key": "max_completion_tokens"}))
    assert body["max_completion_tokens"] > 0 and "max_tokens" not in body
    assert "max_tokens" in wire(scenario())[1]


def test_certificates_are_verified_unless_they_are_not_to_be():
    assert parse_base_url("https://host").tls().verify_mode == ssl.CERT_REQUIRED
    open_door = parse_base_url("https://host", verify_tls=False).tls()
    assert open_door.verify_mode == ssl.CERT_NONE and not open_door.check_hostname


def test_flags_of_vllm_bench_serve_say_headers_and_certificates_and_ask_for_one_usage():
    target = parse(["--header", "a=b", "x-c=d=e", "--insecure"]).scenario.target
    assert target.headers == {"a": "b", "x-c": "d=e"} and not target.verify_tls and target.usage == "final"
    assert parse([]).scenario.target.verify_tls
    with pytest.raises(ScenarioError, match="SOJOURN_API_KEY"):
        parse(["--header", "Authorization=Bearer x"])
