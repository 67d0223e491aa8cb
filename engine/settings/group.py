"""The settings of a parallel group: one model over several processes, each with a device (docs/parallel.md)."""

from typing import Any, Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import COMPUTE

_GROUP = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
_DRAFTED_BY_RANK_0 = ("none", "ngram", "draft-model")  # which needs nothing of the others for it
MOST_RANKS = 64


class ParallelSettings(BaseModel):
    """How a model is divided. A rank is one process with one device."""

    tensor_parallel: int = COMPUTE(
        1,
        ge=1,
        le=MOST_RANKS,
        description="ranks that divide each layer: heads, feed-forward part and vocabulary",
    )
    pipeline_parallel: int = COMPUTE(
        1, ge=1, le=MOST_RANKS, description="stages of consecutive layers; as many steps are under way at the same time"
    )
    expert_parallel: int = COMPUTE(
        1,
        ge=1,
        le=MOST_RANKS,
        validate_default=True,
        description="ranks that divide the experts of a mixture-of-experts model",
    )
    expert_exchange: Literal["auto", "all-reduce", "all-to-all"] = COMPUTE(
        "auto",
        description="between ranks with experts: sums of what all give for all tokens, or each token with the ranks of "
        "its experts; auto: what takes less time over the link that calibrate-device measured",
    )

    @property
    def ranks_per_stage(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model; 1 is no group."""
        return self.pipeline_parallel * self.ranks_per_stage

    @field_validator("expert_parallel")
    @classmethod
    def _shares_the_ranks_of_a_stage(cls, experts: int, info: ValidationInfo) -> int:
        tensor, stages = info.data.get("tensor_parallel", 1), info.data.get("pipeline_parallel", 1)
        if experts % tensor and tensor % experts:
            raise ValueError(
                f"tensor_parallel={tensor} divides the same ranks; one of the two has to be a multiple of the other"
            )
        if (ranks := stages * max(tensor, experts)) > MOST_RANKS:
            raise ValueError(f"with pipeline_parallel={stages} that makes {ranks} ranks; {MOST_RANKS} is the most")
        return experts

    @field_validator(*_GROUP)
    @classmethod
    def _beside_what_works_in_groups(cls, ranks: int, info: ValidationInfo) -> int:
        if ranks > 1:
            _refuse_beside_a_group(info.data)
        return ranks

    @field_validator("expert_exchange")
    @classmethod
    def _only_between_whole_experts(cls, exchange: str, info: ValidationInfo) -> str:
        tensor, experts = info.data.get("tensor_parallel", 1), info.data.get("expert_parallel", 1)
        if exchange == "all-to-all" and (experts == 1 or tensor > 1):
            raise ValueError(
                "tokens travel between ranks that hold whole experts; set expert_parallel to 2 or more and leave "
                "tensor_parallel at 1, or use all-reduce"
            )
        return exchange

    @field_validator("graphs", check_fields=False)
    @classmethod
    def _no_graphs_of_what_waits(cls, graphs: str, info: ValidationInfo) -> str:
        if graphs == "on" and info.data.get("pipeline_parallel", 1) > 1:
            raise ValueError("stages send each other tensors between their layers, which no graph holds; leave it out")
        if graphs == "on" and info.data.get("expert_exchange") == "all-to-all":
            raise ValueError("the host counts the tokens that travel, which no graph holds; use all-reduce beside it")
        return graphs


def _refuse_beside_a_group(settings: dict[str, Any]) -> None:
    """Raises ValueError for a technique that works in one process only."""
    if settings.get("speculation", "none") not in _DRAFTED_BY_RANK_0:
        raise ValueError(
            f"speculation={settings['speculation']} drafts with parts of the model, which ranks share; "
            f"use speculation={' or '.join(_DRAFTED_BY_RANK_0[1:])}, or one rank"
        )
    if settings.get("weights_reference") is not None:
        raise ValueError("weights_reference compares two whole models, and no rank has one; leave it out")
    if settings.get("kv_role") is not None:
        raise ValueError("a parallel group cannot read the KV of other servers yet; leave kv_role out, or use one rank")
    for name in ("kv_disk_path", "kv_remote_url"):
        if settings.get(name) is not None:
            raise ValueError(
                f"the KV tiers of a parallel group are in host memory only yet; leave {name} out, or use one rank"
            )
