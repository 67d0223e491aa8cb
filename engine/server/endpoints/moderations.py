"""POST /v1/moderations, in OpenAI's shape: what the input checks of a profile say of a text."""

import uuid
from typing import Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response

from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.body.strict import Strict, shorten
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.front import Front
from sojourn.engine.server.gateway.moderation.moderation import Moderation, profile_of
from sojourn.engine.server.gateway.moderation.profile import Profile
from sojourn.engine.server.gateway.moderation.refusal import unavailable
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed, Verdict, merge

MAX_INPUTS = 128
MAX_CHARACTERS = 1_000_000  # of all texts of a call: no context bounds them, and lists search 2 to 30 million a second
# Typed clients expect all of them. Those that no check of a profile knows are always false.
OPENAI_CATEGORIES = (
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
)  # fmt: skip


class ModerationRequest(Strict):
    """POST /v1/moderations."""

    model: str | None = Field(None, description="name of a profile of the moderation file; by default its default one")
    input: Any = Field(description="a text, a list of texts, or a list of text parts, which are judged together")

    @property
    def served_model(self) -> None:
        """`model` names no model."""
        return None

    def texts(self) -> list[str]:
        """The texts that get a result each. Raises ApiError 400."""
        texts = self._listed()
        if (size := sum(map(len, texts))) > MAX_CHARACTERS:
            raise invalid(
                "input", f"`input` has {size:,} characters, but may have {MAX_CHARACTERS:,}; send several calls"
            )
        return texts

    def _listed(self) -> list[str]:
        if isinstance(self.input, str):
            return [self.input]
        items = self.input if isinstance(self.input, list) else []
        if len(items) > MAX_INPUTS:
            raise invalid("input", f"`input` lists {len(items)} texts, but a call may have {MAX_INPUTS}; send several")
        if items and all(isinstance(item, str) for item in items):
            return items
        if items and all(isinstance(item, dict) for item in items):
            return ["\n".join(_part(index, item) for index, item in enumerate(items))]
        raise invalid("input", f"`input`={shorten(self.input)} is not a text, a list of texts or a list of text parts")


def _part(index: int, part: dict[str, Any]) -> str:
    kind: Literal["text"] | Any = part.get("type")
    if kind != "text" or not isinstance(part.get("text"), str):
        message = f"`input[{index}]` is a part of the type {shorten(kind)}, but this server checks texts only"
        raise invalid("input", f"{message}; send parts of the type text")
    return part["text"]


async def moderate(front: Front, arrival: Arrival) -> Response:
    """Answers the call. Raises ApiError: 404 for a profile that does not exist, 503 where a check gives no verdict."""
    texts = arrival.body.texts()
    profile = _profile(front.moderation, arrival)
    try:
        judged = [await profile.judge(text, "input", profile.input_rules) for text in texts]
    except ModerationFailed as failure:
        raise unavailable(failure) from None
    results = [_result(profile, merge(list(judgement.verdicts))) for judgement in judged]
    return JSONResponse({"id": f"modr-{uuid.uuid4().hex}", "model": profile.name, "results": results})


def _profile(moderation: Moderation | None, arrival: Arrival) -> Profile:
    name = arrival.body.model
    if moderation is None:
        raise ApiError(404, "this server checks no content; start it with `moderation`", code="moderation_off")
    profile = profile_of(moderation, arrival.admission.tenant) if name is None else moderation.profiles.get(name)
    if profile is None:
        known = ", ".join(sorted(moderation.profiles))
        wanted = "no profile is the default one" if name is None else f"the profile `{name[:100]}` does not exist"
        raise ApiError(404, f"{wanted}; `model` may be {known}", param="model", code="model_not_found")
    return profile


def _result(profile: Profile, verdict: Verdict) -> dict[str, Any]:
    own = {category for rule in profile.input_rules for category in rule.moderator.categories}
    categories = sorted({*OPENAI_CATEGORIES, *own})
    return {
        "flagged": bool(verdict.flagged),
        "categories": {category: category in verdict.flagged for category in categories},
        "category_scores": {category: verdict.scores.get(category, 0.0) for category in categories},
        "category_applied_input_types": {category: ["text"] for category in categories},
    }
