"""The settings of speculative decoding (docs/speculation.md)."""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import COMPUTE


class Proposing(NamedTuple):
    """What a proposer needs of the loop."""

    writes_ahead: bool = False  # KV slots behind the known tokens, one for each draft; later steps overwrite them
    follows_steps: bool = False  # to see every step, prompts too; else only those in which a request wants drafts


PROPOSING = {  # by the setting `speculation`
    "ngram": Proposing(),
    "early-exit": Proposing(writes_ahead=True),
    "draft-model": Proposing(writes_ahead=True, follows_steps=True),
    "medusa": Proposing(),
    "eagle3": Proposing(writes_ahead=True, follows_steps=True),
    "mtp": Proposing(writes_ahead=True, follows_steps=True),
}
_ONLY_FOR = {"speculation_layers": ("early-exit",), "speculation_ngram": ("ngram",)}
_FROM_FOLDERS = ("draft-model", "medusa", "eagle3")


class SpeculationSettings(BaseModel):
    """What proposes drafts, and how many."""

    speculation: Literal["none", "ngram", "early-exit", "draft-model", "medusa", "eagle3", "mtp"] = COMPUTE(
        "none", description="what proposes tokens that a step then verifies; outputs stay the same"
    )
    speculation_model: str | None = COMPUTE(
        None,
        validate_default=True,
        description="draft-model, medusa, eagle3: folder of what drafts; for the bundled model tiny-draft, tiny-medusa "
        "or tiny-eagle3",
    )
    speculation_tokens: int = COMPUTE(4, ge=1, le=16, description="drafts of a request in one step at most")
    speculation_adaptive: Literal["on", "off"] = COMPUTE(
        "on", description="fewer drafts, or none, where measured acceptance and step times say that they do not pay"
    )
    speculation_ngram: int | None = COMPUTE(
        None, ge=1, le=16, description="ngram: tokens of the longest match that is looked for; by default 4"
    )
    speculation_layers: int | None = COMPUTE(
        None, ge=1, le=512, description="early-exit: layers that draft; by default a quarter of the model's"
    )

    @property
    def most_rows(self) -> int:
        """Tokens of one request that a step samples at most."""
        return 1 if self.speculation == "none" else 1 + self.speculation_tokens

    @field_validator(*_ONLY_FOR)
    @classmethod
    def _belongs_to_a_proposer(cls, value: int | None, info: ValidationInfo) -> int | None:
        users = _ONLY_FOR[info.field_name]
        chosen = info.data.get("speculation", users[0])
        if value is not None and chosen not in users:
            raise ValueError(f"only speculation={users[0]} uses it, and speculation is {chosen}; leave it out")
        return value

    @field_validator("speculation_model")
    @classmethod
    def _names_what_drafts(cls, folder: str | None, info: ValidationInfo) -> str | None:
        chosen = info.data.get("speculation")
        if folder is None and chosen in _FROM_FOLDERS:
            raise ValueError(f"speculation={chosen} needs the folder of what drafts; name one")
        if folder is not None and chosen is not None and chosen not in _FROM_FOLDERS:
            raise ValueError(f"speculation={chosen} needs no folder; leave one of the two out")
        return folder
