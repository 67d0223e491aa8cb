"""The error of quantised weights, as it is measured on a text."""

from typing import Any

import msgspec


class WeightError(msgspec.Struct, frozen=True):
    """Of the served weights against the reference's, with the same text before each token.

    Says how far predictions moved on one text; not how good answers are.
    """

    reference: str  # self, or the folder of the unquantised model
    num_tokens: int  # that were predicted
    divergence_nats: float  # Kullback-Leibler divergence from the reference's prediction, nats a token
    likelihood_nats: float  # that the text's own tokens became less likely, nats a token; below 0: more likely
    greedy_agreement: float  # share of the tokens where both find the same one the most likely

    def sentence(self) -> str:
        return (
            f"{self.divergence_nats:.4f} nats per token from {self.reference} (Kullback-Leibler), "
            f"the same greedy token in {self.greedy_agreement:.1%} of {self.num_tokens}"
        )


def weight_error_of(meta: dict[str, Any]) -> WeightError | None:
    """What run.json says of it; None where it was not measured, or is of another version."""
    core = meta.get("core")
    try:
        return msgspec.convert(core.get("weight_error") if isinstance(core, dict) else None, WeightError | None)
    except msgspec.ValidationError:
        return None
