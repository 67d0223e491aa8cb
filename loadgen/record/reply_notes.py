"""What the replies of a run leave open, or say of another load than was asked for, as sentences for its reader."""

from collections import Counter
from typing import Any

from sojourn.loadgen.replies import front
from sojourn.loadgen.replies.reply import Reply
from sojourn.loadgen.replies.usage import ESTIMATED
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.metrics.records import ClientRecord

SHORTER_WARNS = 0.99  # of the tokens that `ignore_eos` demands: an end token may not be counted


class ReplyNotes:
    """Counts over the served requests."""

    def __init__(self) -> None:
        self._served = self._estimated = self._short = self._fixed = self._wanted = self._written = 0
        self._uncounted = self._long = self._allowed = self._excess = 0
        self._doubts: Counter[str] = Counter()
        self._fronts: list[front.FrontTimes] = []
        self._streamed = False

    def add(self, request: ScheduledRequest, record: ClientRecord, reply: Reply) -> None:
        if record.status != "ok":
            return
        tokens = reply.tokens
        self._served += 1
        if reply.front is not None:
            self._fronts.append(reply.front)
            self._streamed = self._streamed or reply.is_stream
        self._estimated += tokens.source == ESTIMATED
        self._uncounted += bool(reply.chunk_ns) and tokens.total is None and not tokens.doubt
        if tokens.doubt:
            self._doubts[tokens.doubt] += 1
        if tokens.total is not None and tokens.total > request.max_tokens:
            self._long += 1
            self._allowed += request.max_tokens
            self._excess += tokens.total
        if request.ignore_eos:
            written = len(reply.chunk_ns) if tokens.total is None else tokens.total
            self._fixed += 1
            self._short += written < request.max_tokens
            self._wanted += request.max_tokens
            self._written += min(written, request.max_tokens)

    def front(self) -> dict[str, Any] | None:
        """What a front said of its own time; None where none did."""
        return front.summary(self._fronts)

    def sentences(self) -> list[str]:
        split = self.front()
        found = [] if split is None else [front.sentence(split, self._streamed)]
        if self._doubts:
            (example, _), *_ = self._doubts.most_common(1)
            found.append(
                f"the output tokens of {self._doubts.total()} of {self._served} replies are unknown, because the "
                f"server's usage contradicts its text: {example}"
            )
        if self._uncounted:
            found.append(
                f"{self._uncounted} of {self._served} replies bring no usage: each chunk of text counts as one token "
                "in the rates and in the time per output token, and the tokens in all are unknown"
            )
        if self._long:
            found.append(
                f"{self._long} of {self._served} answers have more tokens by the server's usage than their max_tokens "
                f"allowed, {self._excess} for {self._allowed}: it ignored the limit, or its usage counts something else"
            )
        if self._estimated:
            found.append(
                f"{self._estimated} of {self._served} replies have several tokens per chunk, and the server tells only "
                "their total: the tokens of a chunk are estimated from the length of its text, and so is the time "
                "between tokens; the time between chunks is measured"
            )
        if self._wanted and self._written < SHORTER_WARNS * self._wanted:
            found.append(
                f"ignore_eos had no effect: {self._short} of {self._fixed} answers are shorter than the scenario "
                f"demands, {self._written} of {self._wanted} tokens in all; the load was a lighter one"
            )
        return found
