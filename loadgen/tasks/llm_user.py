"""`LLMUser`: a Locust user whose requests are timed and recorded as those of a scenario are."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from locust import User  # first: it replaces what blocks in the standard library
from locust.exception import StopUser

import gevent  # isort: skip
from pydantic import ValidationError

from sojourn.loadgen.client.outgoing import Ended
from sojourn.loadgen.prompts.bodies import stream_fields
from sojourn.loadgen.replies.answer_text import answer_of
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.tasks.load import Cut, Wanted
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.request.latencies import itl_ms, reads

READY_S = 30.0  # that a user waits for the run to begin


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to one request. Latencies are in ms from the intended send; None where nothing came."""

    text: str
    error: str  # "" where the request was served
    request_id: str
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    itl_ms: list[float]  # between two tokens
    prompt_tokens: int | None
    output_tokens: int | None

    @property
    def ok(self) -> bool:
        return not self.error


class LLMUser(User):
    """A user of an OpenAI-compatible server. Each has at most one request in flight, so that the number of users is the
    concurrency of a closed loop.

    Class attributes: `slo` such as "ttft:500 tpot:50"; `model`, by default what GET /v1/models names; `tenant`;
    `target`, a mapping of the keys of a scenario's block `target`.
    """

    abstract = True
    slo: ClassVar[str] = ""
    model: ClassVar[str] = ""
    tenant: ClassVar[str] = ""
    target: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, environment):
        super().__init__(environment)
        self._session = environment.sojourn_tasks
        self._targets = {api: target_of(type(self), api) for api in ("chat", "completions")}
        self._late_ns = 0  # since its last answer: for how long this process kept it from going on
        self._ended_ns: int | None = None
        self._think_time = self.wait_time
        self.wait_time = self._wait_on_time

    def chat(
        self, messages: str | list[dict[str, Any]], *, max_tokens: int = 256, name: str = "", session_id: str = "",
        **body: Any,
    ) -> Answer:  # fmt: skip
        """POST /v1/chat/completions with a text or with messages; further keys go into the body. `name` is that of the
        row in Locust's statistics."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self._send("chat", {"messages": messages} | body, max_tokens, name, session_id)

    def complete(
        self, prompt: str, *, max_tokens: int = 256, name: str = "", session_id: str = "", **body: Any
    ) -> Answer:
        """POST /v1/completions."""
        return self._send("completions", {"prompt": prompt} | body, max_tokens, name, session_id)

    def _wait_on_time(self) -> float:
        """Locust's wait, slept here, so that a late awakening is known: it counts as the load generator's."""
        due = time.monotonic_ns() + round(1e9 * (seconds := self._think_time()))
        gevent.sleep(seconds)
        self._late_ns += max(0, time.monotonic_ns() - due)
        return 0

    def _send(self, api: str, body: dict[str, Any], max_tokens: int, name: str, session_id: str) -> Answer:
        load = self._session.load(READY_S)
        if load is None:  # the run was refused, or has ended
            raise StopUser
        target, klass = self._targets[api], type(self).__name__
        body = {"model": self.model or self._session.model, target.max_tokens_key: max_tokens} | body
        body |= stream_fields(target)
        asked_ns, name = time.monotonic_ns(), name or klass
        since_ns = load.part.start_ns if self._ended_ns is None else self._ended_ns
        wanted = Wanted(
            klass, self.tenant, session_id, body, max_tokens, target, self._session.endpoint, self._late_ns,
            asked_ns - self._late_ns - since_ns,
        )  # fmt: skip
        self._late_ns = 0
        try:
            record, ended = load.send(wanted, self._session.drain_s)
        except Cut as cut:
            if cut.ended.sent_ns is not None:  # the server may have it
                latency_ms = (cut.ended.last_ns - cut.record.due_ns) / 1e6
                self._fire(name, latency_ms, cut.ended.num_bytes, cut.record.error or "")
            raise
        answer = answered(api, record, ended)
        self._fire(name, answer.e2e_ms, ended.num_bytes, answer.error)
        self._ended_ns, self._late_ns = ended.ended_ns, time.monotonic_ns() - ended.ended_ns
        return answer

    def _fire(self, name: str, latency_ms: float, num_bytes: int, error: str) -> None:
        self.environment.events.request.fire(
            request_type="POST", name=name, response_time=latency_ms, response_length=num_bytes,
            exception=RuntimeError(error) if error else None, context=self.context(),
        )  # fmt: skip


def target_of(user: type[LLMUser], api: str) -> Target:
    """Raises InputError."""
    try:
        return Target(**({"api": api} | dict(user.target)))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise InputError(f"{user.__name__}.target: {faults}") from None


def answered(api: str, record: ClientRecord, ended: Ended) -> Answer:
    text = json.loads(b'"%s"' % answer_of(ended.reply, api)[0]) if record.status == "ok" else ""
    first, stamps, is_served = record.first_token_ns, record.chunk_ns, record.status == "ok"
    later = (record.output_tokens or 0) - reads(stamps, record.chunk_tokens)[1][0] if stamps else 0
    return Answer(
        text=text, error=record.error or "", request_id=record.request_id,
        ttft_ms=None if first is None or not is_served else (first - record.due_ns) / 1e6,
        tpot_ms=(stamps[-1] - first) / 1e6 / later if is_served and later > 0 and stamps[-1] > first else None,
        e2e_ms=(ended.last_ns - record.due_ns) / 1e6,
        itl_ms=itl_ms(stamps, record.chunk_tokens).tolist() if len(stamps) > 1 else [],
        prompt_tokens=record.prompt_tokens, output_tokens=record.output_tokens,
    )  # fmt: skip
