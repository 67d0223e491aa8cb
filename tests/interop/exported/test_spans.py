"""A trace is the record, placed in time: nothing is added, nothing is lost."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.exported.spans import account_spans, is_sampled, parent_of, root_span
from sojourn.metrics.ledger import SERVER_ACCOUNTS, Account, new_ledger
from sojourn.metrics.records import RequestRecord
from tests.metrics.random_records import MS, random_request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def streamed() -> RequestRecord:
    """57 ms to the first token, 130 ms to the last one, 13 ms to the last byte; 3 ms more to the first text."""
    ttft, ledger = new_ledger(), new_ledger()
    ttft[Account.TOKEN_ENCODE], ttft[Account.REQUEST_QUEUE], ttft[Account.COMPUTE_PREFILL] = 2 * MS, 20 * MS, 35 * MS
    ttft[Account.REQUEST_STREAM] = 3 * MS
    ledger[:] = ttft
    ledger[Account.COMPUTE_DECODE], ledger[Account.MEMORY_PREEMPTED] = 90 * MS, 40 * MS
    ledger[Account.REQUEST_STREAM] = 13 * MS
    return RequestRecord(
        "r", arrived_ns=100 * MS, finished_ns=300 * MS, finish_reason="stop", prompt_tokens=9, output_tokens=3,
        first_step=4, last_step=7, encoded_ns=102 * MS, queued_ns=103 * MS, scheduled_ns=122 * MS,
        token_ns=[157 * MS, 200 * MS, 287 * MS], first_written_ns=160 * MS, written_ns=300 * MS, ledger=ledger,
        ttft=ttft, waits={"step": 20 * MS}, prefix_outcomes={"miss_cold": 9},
    )  # fmt: skip


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_spans_of_the_accounts_sum_to_the_ledger(seed):
    request = random_request(Random(seed))
    spans = account_spans(request)
    assert sum(span.end_ns - span.begin_ns for span in spans) == sum(
        request.ledger[info.account] for info in SERVER_ACCOUNTS
    )
    for info in SERVER_ACCOUNTS:
        own = [span for span in spans if span.name == info.name]
        assert sum(span.end_ns - span.begin_ns for span in own) == request.ledger[info.account]
        assert all(span.attributes["sojourn.lifecycle"] == info.lifecycle for span in own)


def test_span_begins_where_the_record_knows_it_and_else_where_the_last_one_ended():
    placed = [(span.name, span.begin_ns // MS, span.attributes["sojourn.begins"]) for span in account_spans(streamed())]
    assert placed == [
        ("token.encode", 100, "measured"),
        ("request.queue", 102, "measured"),
        ("compute.prefill", 122, "measured"),
        ("memory.preempted", 157, "end_to_end"),
        ("compute.decode", 197, "end_to_end"),
        ("request.stream", 287, "measured"),
    ]


def test_accounts_of_the_core_are_told_apart_at_the_first_token():
    request = streamed()
    parts: dict[str, int] = {}
    for span in account_spans(request):
        part = span.attributes["sojourn.part"]
        parts[part] = parts.get(part, 0) + span.end_ns - span.begin_ns
    assert parts == {"to_first_token": 57 * MS, "to_last_token": 130 * MS, "to_last_byte": 13 * MS}
    assert request.token_ns[0] - request.arrived_ns == 57 * MS


def test_hand_over_of_the_first_text_that_hid_behind_the_next_step_is_in_no_span():
    request = streamed()
    request.ttft[Account.REQUEST_STREAM] = 30 * MS  # while the core went on
    spans = account_spans(request)
    assert sum(span.end_ns - span.begin_ns for span in spans) == sum(request.ledger)
    root = root_span(request, "tiny", {})
    assert root.attributes["sojourn.ttft.request.stream_ns"] == 30 * MS
    assert root.attributes["sojourn.ledger.request.stream_ns"] == 13 * MS


def test_answer_that_is_not_streamed_has_no_part_of_its_own_for_the_first_token():
    request = streamed()
    ledger = list(request.ledger)
    whole = RequestRecord(
        "r", 100 * MS, 300 * MS, finish_reason="stop", token_ns=request.token_ns, first_written_ns=300 * MS,
        written_ns=300 * MS, ledger=ledger, ttft=ledger,
    )  # fmt: skip
    spans = account_spans(whole)
    assert {span.attributes["sojourn.part"] for span in spans} == {"to_last_token", "to_last_byte"}
    assert spans[-1].name == "request.stream" and spans[-1].begin_ns == 287 * MS


def test_request_that_never_wrote_shows_where_it_was_stuck():
    ledger = new_ledger()
    ledger[Account.TOKEN_ENCODE], ledger[Account.MEMORY_BLOCKED] = 2 * MS, 78 * MS
    stuck = RequestRecord("r", 0, 80 * MS, finish_reason="abort", encoded_ns=2 * MS, ledger=ledger)
    _, blocked = account_spans(stuck)
    assert (blocked.name, blocked.begin_ns, blocked.end_ns) == ("memory.blocked", 2 * MS, 80 * MS)
    assert blocked.attributes["sojourn.begins"] == "measured"


def test_root_lasts_from_arrival_to_the_last_byte_and_names_its_steps():
    root = root_span(streamed(), "tiny", {"gen_ai.operation.name": "text_completion", "gen_ai.request.top_p": 0.9})
    assert (root.name, root.begin_ns, root.end_ns) == ("text_completion tiny", 100 * MS, 300 * MS)
    expected = {
        "gen_ai.request.model": "tiny", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.response.time_to_first_chunk": 0.06,
        "gen_ai.request.top_p": 0.9, "sojourn.step.first": 4, "sojourn.step.last": 7,
        "sojourn.ledger.compute.decode_ns": 90 * MS, "sojourn.wait.step_ns": 20 * MS,
        "sojourn.prefix.miss_cold_tokens": 9,
    }  # fmt: skip
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert "error.type" not in root.attributes


@pytest.mark.parametrize(
    ("header", "is_parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", True),
        (f"01-{TRACE}-{SPAN}-01-later", True),  # a version that is not known yet
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
        (None, False),
    ],
)
def test_parent_is_read_from_a_header_of_the_right_form_only(header, is_parent):
    parent = parent_of(header)
    assert (parent is not None) == is_parent
    if parent is not None:
        assert (parent.trace_id, parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
        assert parent.is_sampled == (header.split("-")[3] == "01")


def test_sampling_is_decided_by_the_low_half_of_the_trace_id_as_opentelemetry_does():
    sampler = pytest.importorskip("opentelemetry.sdk.trace.sampling")
    rng = Random(11)
    for ratio in (0.0, 0.01, 0.5, 1.0):
        theirs = sampler.TraceIdRatioBased(ratio)
        for trace_id in [rng.getrandbits(128) for _ in range(500)]:
            kept = theirs.should_sample(None, trace_id, "").decision is sampler.Decision.RECORD_AND_SAMPLE
            assert is_sampled(trace_id, ratio) == kept
