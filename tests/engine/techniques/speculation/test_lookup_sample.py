"""The sample of requests for prompt lookup keeps to its share of the time."""

from sojourn.engine.request.request import Request
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.techniques.speculation.lookup_sample import MOST_TOKENS, TOKENS_PER_SECOND, LookupSample

S = 1_000_000_000


def ended(length: int) -> Request:
    return Request(1, "r", 10, [token % 7 for token in range(length)], SamplingParams(max_tokens=length))


def test_a_sample_measures_what_the_time_allows_and_no_more():
    sample, measured = LookupSample(), 0
    for tenth in range(1, 301):  # 10 requests a second for 30 s
        request = ended(500)
        sample.measure(request, tenth * S // 10)
        measured += 500 * ("lookup" in request.parts)
    assert 0.9 * 30 * TOKENS_PER_SECOND <= measured <= MOST_TOKENS + 30 * TOKENS_PER_SECOND


def test_a_request_without_output_or_beyond_the_bound_is_left_out():
    sample = LookupSample()
    none, longest, longer = ended(10), ended(MOST_TOKENS), ended(MOST_TOKENS + 1)
    for request in (none, longer, longest):
        sample.measure(request, S)
    assert "lookup" not in none.parts and "lookup" not in longer.parts and longest.parts["lookup"] > 0
