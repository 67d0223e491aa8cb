"""When a reply is complete, however its bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from sojourn.loadgen.client.connection import Exchange
from sojourn.loadgen.client.outgoing import Outgoing
from sojourn.loadgen.scenario.scenario import Target
from tests.loadgen.replies.test_reply import CUTS, cut

EARLY = (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@given(st.lists(st.sampled_from(EARLY), max_size=3), CUTS)
def test_informational_answers_end_nothing(early, sizes):
    exchange = Exchange(Outgoing(0, 0, b"", Target()), 0)
    *before, last = cut(b"".join((*early, ANSWER)), sizes)
    assert not any(exchange.feed(piece, 1) for piece in before)
    assert exchange.feed(last, 2) and exchange.status == 200 and exchange.keeps_alive
