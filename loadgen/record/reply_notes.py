"""What the replies of a run leave open, or say of another load than was asked for, as sentences for its reader."""

from collections import Counter

from loadgen.replies.reply import Reply
from loadgen.replies.usage import ESTIMATED
from loadgen.schedule.request import ScheduledRequest
from metrics.records import ClientRecord

SHORTER_WARNS = 0.99  # of the tokens that `ignore_eos` demands: an end token may not be counted


class ReplyNotes:
    """Counts over the served requests."""

    def __init__(self) -> None:
        self._served = self._estimated = self._short = self._fixed = self._wanted = self._written = 0
        self._doubts: Counter[str] = Counter()

    def add(self, request: ScheduledRequest, record: ClientRecord, reply: Reply) -> None:
        if record.status != "ok":
            return
        tokens = reply.tokens
        self._served += 1
        self._estimated += tokens.source == ESTIMATED
        if tokens.doubt:
            self._doubts[tokens.doubt] += 1
        if request.ignore_eos:
            written = len(reply.chunk_ns) if tokens.total is None else tokens.total
            self._fixed += 1
            self._short += written < request.max_tokens
            self._wanted += request.max_tokens
            self._written += min(written, request.max_tokens)

    def sentences(self) -> list[str]:
        found = []
        if self._doubts:
            (example, _), *_ = self._doubts.most_common(1)
            found.append(
                f"the output tokens of {self._doubts.total()} of {self._served} replies are unknown, because the "
                f"server's usage contradicts its text: {example}"
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
