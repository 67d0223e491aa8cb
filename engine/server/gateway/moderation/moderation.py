"""The moderation of one server: the profiles of its file, which profile a call has, and the checks of its input."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from sojourn.engine.server.core.call import Caller
from sojourn.engine.server.core.sequence import SequenceStream
from sojourn.engine.server.errors import Rejection
from sojourn.engine.server.gateway.access.rules import Tenant
from sojourn.engine.server.gateway.moderation.file import files_of, load
from sojourn.engine.server.gateway.moderation.output import ModeratedOutput
from sojourn.engine.server.gateway.moderation.profile import Events, Profile
from sojourn.engine.server.gateway.moderation.refusal import CONTENT_FILTER, refusal_of, unavailable
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed, Moderator
from sojourn.engine.server.openai.messages import Message
from sojourn.engine.server.openai.prompts import OFF_LOOP_CHARACTERS, Prompt
from sojourn.engine.server.settings_files import stamps_of
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import InputError
from sojourn.metrics.ledger import new_ledger
from sojourn.metrics.records import RequestRecord

log = logging.getLogger(__name__)
WATCH_SECONDS = 2.0
RETIRED_SECONDS = 600  # after a reload, for the calls that still use the checks before it


class Moderation:
    """Owns the checks of the moderation file. Raises InputError for a file with a fault."""

    def __init__(self, path: Path):
        self.events = Events()
        self._path = path
        self.profiles, self._default, self._moderators = load(path, self.events)
        self._files = files_of(path)
        self._stamps = stamps_of(self._files)
        self._retired: set[asyncio.Task] = set()

    def profile(self, name: str | None = None) -> Profile | None:
        """The profile of that name, or the default one; None where neither exists: nothing is checked."""
        name = name or self._default
        return None if name is None else self.profiles.get(name)

    async def reload(self) -> None:
        """Reads the file again. Raises InputError for a fault, and leaves everything as it was."""
        stamps = await asyncio.to_thread(stamps_of, files := await asyncio.to_thread(files_of, self._path))
        profiles, default, moderators = await asyncio.to_thread(load, self._path, self.events)
        self._files, self._stamps = files, stamps
        retired, self._moderators = self._moderators, moderators
        self.profiles, self._default = profiles, default
        closing = asyncio.create_task(_close_later(retired))
        self._retired.add(closing)
        closing.add_done_callback(self._retired.discard)

    async def watch(self) -> None:
        """Reloads the files when they change, for as long as the server runs. The log has what is wrong with them."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            stamps = await asyncio.to_thread(stamps_of, self._files)
            if stamps == self._stamps:
                continue
            self._stamps = stamps
            try:
                await self.reload()
            except InputError as error:
                log.error("the old checks of moderation stay in force: %s", error)
            else:
                log.warning("new checks of moderation are in force: %d profiles", len(self.profiles))

    async def close(self) -> None:
        retired = list(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        await _close(self._moderators)


async def _close_later(moderators: Sequence[Moderator]) -> None:
    try:
        await asyncio.sleep(RETIRED_SECONDS)
    finally:
        await _close(moderators)


async def _close(moderators: Sequence[Moderator]) -> None:
    for moderator in moderators:
        await moderator.close()


def profile_of(moderation: Moderation | None, tenant: Tenant) -> Profile | None:
    """The profile of a tenant's calls; None where their content is not checked. Raises Rejection 503 without the one
    that its tier needs."""
    name = tenant.tier.moderation
    if name is not None and (moderation is None or name not in moderation.profiles):
        message = f"this server has no moderation profile {name!r}, which the tenant's tier needs; tell its operator"
        raise Rejection(503, message, code="moderation_unavailable", retry_after_seconds=60)
    return None if moderation is None else moderation.profile(name)


async def check_input(
    profile: Profile,
    caller: Caller,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    param: str,
    messages: Sequence[Message] | None = None,
) -> None:
    """Checks what the model would see, and books the time to the caller. `param` names the field that has it.

    Raises ApiError: 400 with a record for a text that the profile blocks, 503 for one without a verdict.
    """
    begin_ns = time.monotonic_ns()
    blocked: tuple[str, ...] = ()
    try:
        if profile.input_rules:
            for text in await _texts(profile, prompts, tokenizer, messages):
                if blocked := (await profile.judge(text, "input", profile.input_rules)).blocked:
                    break
    except ModerationFailed as failure:
        raise unavailable(failure) from None
    finally:
        caller.moderation_ns += time.monotonic_ns() - begin_ns
    if blocked:
        refusal = refusal_of(profile.message, blocked, param)
        refusal.record = _record(caller, prompts)
        raise refusal


async def _texts(
    profile: Profile, prompts: Sequence[Prompt], tokenizer: Tokenizer, messages: Sequence[Message] | None
) -> list[str]:
    if messages is not None and profile.roles is not None:
        return ["\n".join(message.texts()) for message in messages if message.role in profile.roles]
    texts = []
    for prompt in prompts:
        text, ids = prompt.text, prompt.token_ids
        if text is None:
            decode = tokenizer.decode
            if len(ids) < OFF_LOOP_CHARACTERS:
                text = decode(ids, skip_special_tokens=False)
            else:
                text = await asyncio.to_thread(decode, ids, skip_special_tokens=False)
        texts.append(text)
    return texts


def _record(caller: Caller, prompts: Sequence[Prompt]) -> RequestRecord:
    """Of a call that was refused for its content: no core knows it, and no token was computed."""
    now_ns = time.monotonic_ns()
    ledger = new_ledger()
    caller.front_times(now_ns).book(ledger)
    return RequestRecord(
        request_id=caller.request_id,
        arrived_ns=caller.arrived_ns,
        finished_ns=now_ns,
        tenant=caller.tenant,
        klass=caller.klass,
        finish_reason=CONTENT_FILTER,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        prompt_characters=sum(len(prompt.text or "") for prompt in prompts),
        encoded_ns=now_ns,
        traceparent=caller.traceparent,
        ledger=ledger,
    )


def moderate_outputs(profile: Profile, sequences: Sequence[SequenceStream]) -> None:
    """Puts the output checks of a profile behind each sequence of a call."""
    if profile.output_rules:
        for sequence in sequences:
            sequence.moderated = ModeratedOutput(sequence, profile)
