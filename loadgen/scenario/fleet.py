"""The `fleet` block of a scenario: several servers behind a router, for `sojourn run`."""

from typing import Any

from pydantic import Field, model_validator

from sojourn.loadgen.scenario.distributions import Block, Whole


class FleetBlock(Block):
    """Servers of one model with the settings of the `engine` block, behind an existing router (docs/fleet.md)."""

    replicas: Whole = Field(
        ge=2, le=64, description="of one model, with the settings of `engine`; `--replicas` overrides it"
    )
    router: str = Field("vllm-router", min_length=1, description="the router in front of them; `--router` overrides it")
    policy: str | None = Field(
        None, min_length=1, description="how the router chooses, by default its first policy; `--policy` overrides it"
    )
    servers: dict[int, dict[str, Any]] = Field(
        default_factory=dict, description="settings of single servers beside those of `engine`: `1: {threads: 1}`"
    )

    @model_validator(mode="after")
    def _servers_exist(self):
        if beyond := sorted(number for number in self.servers if not 0 <= number < self.replicas):
            raise ValueError(
                f"names server {beyond[0]}, but with {self.replicas} replicas there are 0 to {self.replicas - 1}; "
                "correct the number, or raise replicas"
            )
        return self
