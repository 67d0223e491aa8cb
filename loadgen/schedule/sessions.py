"""Sessions: the number of turns, what each turn adds, the pauses between turns, and the patience of the sender."""

from dataclasses import replace

from sojourn.loadgen.scenario.workload import RequestClass
from sojourn.loadgen.schedule.draws import draw_length, draw_ns, draw_turns
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.seeds import seeded_rng, stable_seed


class Sessions:
    """Owns the generators of sessions and of patience: neither shifts arrivals, classes or first prompts."""

    def __init__(self, seed: int):
        self._sessions_rng = seeded_rng(seed, "sessions")
        self._patience_rng = seeded_rng(seed, "patience")
        self._num_sessions = 0

    def turns(self, first: ScheduledRequest, klass: RequestClass, seed: int, id_prefix: str) -> list[ScheduledRequest]:
        """All requests of the session that `first` begins; `first` alone where its class has none."""
        first = replace(first, **self._patience(klass)) if klass.patience_s is not None else first
        if klass.session is None:
            return [first]
        rng, session = self._sessions_rng, klass.session
        pause = session.think_time_s or session.tool_pause_s
        message = session.turn_tokens or session.tool_result_tokens
        chain = [replace(first, session_id=f"{id_prefix}-s{self._num_sessions:06d}")]
        self._num_sessions += 1
        for turn in range(1, draw_turns(session.turns, rng)):
            before, index, added = chain[-1], first.index + turn, draw_length(message, None, rng)
            chain.append(
                replace(
                    before, index=index, request_id=f"{id_prefix}-{index:06d}", due_offset_ns=None, turn=turn,
                    prompt_tokens=before.prompt_tokens + before.max_tokens + added, message_tokens=added,
                    block_ids=(), content="",
                    max_tokens=draw_length(klass.output_tokens, None, rng, "output_tokens"),
                    pause_ns=draw_ns(pause, rng),
                    seed=stable_seed(seed, index) >> 1, **self._patience(klass),
                )
            )  # fmt: skip
        return chain

    def _patience(self, klass: RequestClass) -> dict[str, int | str]:
        if klass.patience_s is None:
            return {}
        return {
            "patience_ns": draw_ns(klass.patience_s, self._patience_rng),
            "patience_for": klass.patience_for or "first_token",
        }
