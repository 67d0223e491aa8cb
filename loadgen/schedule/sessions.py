"""Sessions: the number of turns, what each turn adds, the pauses between turns, sub-agents, and the patience of the
sender."""

from dataclasses import replace

import numpy as np

from sojourn.loadgen.scenario.workload import RequestClass, Session
from sojourn.loadgen.schedule.draws import draw_length, draw_ns, draw_turns
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.seeds import seeded_rng, stable_seed


class Sessions:
    """Owns the generators of sessions, sub-agents and patience: none shifts arrivals, classes or first prompts."""

    def __init__(self, seed: int, id_prefix: str):
        self._seed, self._id_prefix = seed, id_prefix
        self._sessions_rng = seeded_rng(seed, "sessions")
        self._agents_rng = seeded_rng(seed, "sub-agents")
        self._patience_rng = seeded_rng(seed, "patience")
        self._num_sessions = 0

    def next_name(self) -> tuple[str, int]:
        """The name and the number of another session."""
        number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        return f"{self._id_prefix}-s{number:06d}", number

    def turns(self, first: ScheduledRequest, klass: RequestClass) -> list[ScheduledRequest]:
        """All requests of the session that `first` begins; `first` alone where its class has none."""
        first = replace(first, **self.patience(klass)) if klass.patience_s is not None else first
        session = klass.session
        if session is None:
            return [first]
        name, number = self.next_name()
        salted = {"shared_prefix": number} if klass.salt == "session" and first.shared_prefix >= 0 else {}
        chain = [replace(first, session_id=name, **salted)]
        rng, parent = self._sessions_rng, chain[0]
        num_turns, num_agents = draw_turns(session.turns, rng), 0
        for _ in range(1, num_turns):
            added = draw_length(session.message, None, rng)
            joins: tuple[int, ...] = ()
            if session.sub_agents is not None and self._agents_rng.random() < session.sub_agents.share:
                for _ in range(session.sub_agents.agents):
                    chain += self._sub_agent(chain, parent, f"{name}.{num_agents}", klass, session)
                    joins, num_agents = (*joins, chain[-1].index), num_agents + 1
                # One result from each of them, instead of one.
                added += sum(
                    draw_length(session.message, None, self._agents_rng) for _ in range(session.sub_agents.agents - 1)
                )
            parent = self._turn(chain, parent, added, klass, rng, after=joins)
            chain.append(parent)
        return chain

    def _turn(
        self, chain: list[ScheduledRequest], before: ScheduledRequest, added: int, klass: RequestClass,
        rng: np.random.Generator, *, after: tuple[int, ...] = (),
    ) -> ScheduledRequest:  # fmt: skip
        """The turn after `before` in one conversation, the next request of its chain."""
        index = chain[0].index + len(chain)
        output = draw_length(klass.output_tokens, None, rng, "output_tokens")
        return replace(
            before, due_offset_ns=None, turn=before.turn + 1, message_tokens=added, block_ids=(), content="",
            prompt_tokens=before.prompt_tokens + before.max_tokens + added, max_tokens=output,
            pause_ns=draw_ns(klass.session.pause, rng), **self._named(index), **self.patience(klass), after=after,
        )  # fmt: skip

    def _sub_agent(
        self, chain: list[ScheduledRequest], parent: ScheduledRequest, name: str, klass: RequestClass, session: Session
    ) -> list[ScheduledRequest]:
        """The requests of an agent that begins after the answer to `parent`."""
        rng, index = self._agents_rng, chain[0].index + len(chain)
        own = [
            replace(
                parent, due_offset_ns=None, session_id=name, turn=0, message_tokens=0, after=(parent.index,),
                prompt_tokens=draw_length(session.sub_agents.prompt_tokens, None, rng),
                max_tokens=draw_length(klass.output_tokens, None, rng, "output_tokens"),
                pause_ns=draw_ns(session.pause, rng), **self._named(index), **self.patience(klass),
            )
        ]  # fmt: skip
        for _ in range(1, draw_turns(session.sub_agents.turns, rng)):
            own.append(self._turn([*chain, *own], own[-1], draw_length(session.message, None, rng), klass, rng))
        return own

    def _named(self, index: int) -> dict[str, int | str]:
        return {
            "index": index, "request_id": f"{self._id_prefix}-{index:06d}", "seed": stable_seed(self._seed, index) >> 1,
        }  # fmt: skip

    def patience(self, klass: RequestClass) -> dict[str, int | str]:
        if klass.patience_s is None:
            return {}
        return {
            "patience_ns": draw_ns(klass.patience_s, self._patience_rng),
            "patience_for": klass.patience_for or "first_token",
        }
