"""The corridor that every call of an endpoint walks: its steps, in one order."""

from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.moderation.moderation import Moderation
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.intake.arrival import Arrival
from sojourn.engine.server.intake.steps import (
    BoundOutputs,
    CheckGrammar,
    ChooseSampling,
    Encode,
    EnterGate,
    FindModel,
    FindRoom,
    Moderate,
    PassGate,
    ReadBody,
    ReadPrompts,
    ReserveTokens,
    Submit,
    UseModel,
)
from sojourn.engine.server.models.registry import Models


class Intake:
    """The steps by how far a call comes in: to its checked body, to its encoded prompt, or into the core."""

    def __init__(
        self,
        access: Access,
        bodies: BodyReader,
        models: Models,
        moderation: Moderation | None,
        usage: UsageLog | None,
    ):
        enter, read, wait = EnterGate(access), ReadBody(bodies), PassGate()
        find, room = FindModel(models), FindRoom(models)
        to_body = (enter, read, wait, find, UseModel(models, computes=False))
        self._steps = {
            "body": to_body,
            "prompt": (*to_body, ReadPrompts(), Encode()),
            "core": (
                enter, room, read, wait, find, UseModel(models, computes=True), ReadPrompts(), room, Encode(),
                CheckGrammar(), BoundOutputs(), ReserveTokens(), Moderate(moderation), ChooseSampling(), room,
                Submit(usage),
            ),
        }  # fmt: skip

    async def walk(self, arrival: Arrival) -> None:
        """Raises the ApiError of the step that refuses the call, in the words of its API, and ClientDisconnect."""
        try:
            for step in self._steps[arrival.endpoint.reach]:
                await step(arrival)
        except ApiError as error:
            arrival.rename(error)
            raise
