"""One call and its tenant's tier: a place and a count at its head, tokens once its prompt is encoded."""

import asyncio
import time

from starlette.requests import ClientDisconnect, Request

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.core.call import Caller
from sojourn.engine.server.errors import ApiError, Rejection, invalid
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.access.headers import rate_limit_headers
from sojourn.engine.server.gateway.access.rate_limits import Limited, Reservation, Tokens
from sojourn.engine.server.gateway.access.rules import Tenant
from sojourn.engine.server.http.connections import wait_for_disconnect
from sojourn.metrics.records import RequestRecord

QUOTA_CODE = "rate_limit_exceeded"
_corrections: set[asyncio.Task] = set()  # under way; the loop itself holds tasks weakly


class Admission:
    """What a call owes to its tenant's limits, until `end`."""

    def __init__(self, access: Access, request: Request, caller: Caller):
        self.tenant: Tenant = request.state.tenant
        self._access, self._request, self._caller = access, request, caller
        self._rates, self._gate = access.rates, access.gate(self.tenant)
        self._entering: asyncio.Task[Limited | None] | None = None
        self._granted_ns = 0
        self._reserved: Reservation | None = None

    async def begin(self) -> None:
        """Asks for a place, before the body is read. Raises Rejection 429 where there is none and nobody may wait."""
        if not self.tenant.tier.has_limits:
            return
        self._entering = asyncio.create_task(self._enter())
        await asyncio.sleep(0)  # counts in this process are decided by now
        if self._entering.done():
            await self._settle(self._entering)

    async def wait(self) -> None:
        """Waits for the place, once the body is here. Raises Rejection 429, and ClientDisconnect."""
        if self._entering is None:
            return
        if not self._entering.done():
            await self._while_connected(self._entering)
            await self._settle(self._entering)
        self._caller.quota_ns = max(0, self._granted_ns - self._caller.arrived_ns)

    def check(self, body: Strict) -> None:
        """Raises ApiError: 403 for a model that the tier does not have, 400 for a priority above the tier's."""
        tier, caller = self.tenant.tier, self._caller
        model = body.served_model
        if tier.models is not None and model is not None and model not in tier.models:
            message = f"the tier {self.tenant.tier_name} may not use the model `{model[:100]}`; it has "
            raise ApiError(403, message + ", ".join(tier.models), param="model", code="model_not_allowed")
        caller.weight = tier.weight
        sent = body.priority if "priority" in body.model_fields_set else None
        if sent is not None and tier.priority is not None and sent < tier.priority:
            raise invalid("priority", f"`priority`={sent} goes before the tier's; send {tier.priority} or more")
        caller.priority = next((value for value in (sent, tier.priority) if value is not None), 0)

    def bound_outputs(self, output_tokens: list[int], max_tokens: int | None) -> list[int]:
        """The output of each prompt under the tier's bound. Raises ApiError 400 where the client asks for more."""
        most = self.tenant.tier.max_tokens
        if most is None:
            return output_tokens
        if max_tokens is not None and max_tokens > most:
            message = f"`max_tokens`={max_tokens} is above the {most} of the tier {self.tenant.tier_name}; lower it"
            raise invalid("max_tokens", message)
        return [min(tokens, most) for tokens in output_tokens]

    async def reserve(self, input_tokens: int, output_tokens: list[int], choices: int, max_tokens: int | None) -> None:
        """Books the tokens that the call may use, or waits for them.

        Without `max_tokens` in the body a choice counts as `expected_output_tokens` of the tier. Raises Rejection 429,
        ApiError 400 for what no minute has room for, and ClientDisconnect.
        """
        if self._entering is None:
            return
        if max_tokens is None:
            output_tokens = [min(tokens, self.tenant.tier.expected_output_tokens) for tokens in output_tokens]
        tokens, began_ns = Tokens(input_tokens, choices * sum(output_tokens)), time.monotonic_ns()
        reserving = asyncio.create_task(self._gate.tokens.pass_through(self.tenant.tier, lambda: self._book(tokens)))
        try:
            await asyncio.sleep(0)
            if not reserving.done():
                await self._while_connected(reserving)
        finally:
            reserving.cancel()
            self._caller.quota_ns += time.monotonic_ns() - began_ns
        await self._settle(reserving, tokens)

    def end(self, record: RequestRecord | None) -> None:
        """Gives back the place, and the tokens that were not used."""
        entering = self._entering
        if entering is None:
            return
        entering.cancel()  # no effect if it is done; else it gives up its own place
        if entering.done() and not entering.cancelled() and entering.exception() is None and entering.result() is None:
            self._gate.leave()
        if self._reserved is not None:
            used = Tokens(record.prompt_tokens, record.output_tokens) if record is not None else Tokens(0, 0)
            task = asyncio.get_running_loop().create_task(self._correct(self._reserved, used))
            _corrections.add(task)
            task.add_done_callback(_corrections.discard)

    async def _enter(self) -> Limited | None:
        tier, key = self.tenant.tier, self.tenant.limits_key
        limited = await self._gate.enter(tier, lambda: self._rates.take_request(key, tier))
        self._granted_ns = time.monotonic_ns()
        return limited

    async def _book(self, tokens: Tokens) -> Limited | None:
        tier, key = self.tenant.tier, self.tenant.limits_key
        limited = await self._rates.reserve(key, tier, tokens)
        if limited is None:
            self._reserved = Reservation(tier, key, tokens, time.time())
        return limited

    async def _settle(self, decided: asyncio.Task[Limited | None], tokens: Tokens | None = None) -> None:
        """Shows the levels in the response's headers. Raises what was decided."""
        limited = decided.result()
        levels = await self._rates.levels(self.tenant.limits_key, self.tenant.tier)
        self._request.state.rate_limit_headers = rate_limit_headers(levels)
        if limited is not None:
            self._access.observe_limited(self.tenant, limited.reason)
            raise self._refusal(limited, tokens)

    def _refusal(self, limited: Limited, tokens: Tokens | None) -> ApiError:
        tenant, bound = self.tenant, getattr(self.tenant.tier, limited.setting)
        if limited.wait_seconds is None:
            message = (
                f"this call may use {tokens.of(limited.setting)} tokens, but {limited.setting} of the tier "
                f"{tenant.tier_name} is {bound}; shorten the prompt or lower `max_tokens`"
            )
            return ApiError(400, message, param="max_tokens", code="tokens_above_limit")
        name = f"tenant {tenant.name[:128]!r}" if tenant.name else "tenant without a name"
        seconds = max(1, -int(-limited.wait_seconds // 1))
        message = f"{name} (tier {tenant.tier_name}) has reached {limited.setting}={bound:g}; try again in {seconds} s"
        return Rejection(429, message, code=QUOTA_CODE, retry_after_seconds=seconds)

    async def _while_connected(self, waiting: asyncio.Task) -> None:
        gone = asyncio.create_task(wait_for_disconnect(self._request.receive))
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientDisconnect
        finally:
            gone.cancel()
            waiting.cancel()

    async def _correct(self, reserved: Reservation, used: Tokens) -> None:
        await self._rates.correct(reserved, used)
        self._gate.tokens.wake()
