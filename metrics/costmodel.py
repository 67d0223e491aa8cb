"""What a step should cost: exact FLOPs and bytes from its composition, and the time that its device should take.

Formulas for dense decoders with grouped-query attention, causal, counted per multiply and add (2 FLOPs). Bytes count
each weight once a step, keys and values read once and written once; activations are left out.
"""

from collections.abc import Sequence

import msgspec
import numpy as np


class ModelShape(msgspec.Struct, frozen=True):
    """The sizes of a dense decoder that its cost depends on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    weight_bytes: int  # of all parameters that a step reads: without the embedding table, of which it gathers rows
    kv_element_bytes: int

    @property
    def linear_flops_per_token(self) -> int:
        attention = 2 * self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        output = 2 * self.num_heads * self.head_dim * self.hidden_size
        mlp = 6 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + output + mlp)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_element_bytes


def request_flops(shape: ModelShape, new_tokens: int, past_tokens: int, sampled: int = 0) -> int:
    """FLOPs of `new_tokens` after `past_tokens` of one sequence, `sampled` of them with logits."""
    pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) // 2  # query and key, exact causal
    attention = 4 * shape.num_heads * shape.head_dim * shape.num_layers * pairs
    head = 2 * shape.hidden_size * shape.vocab_size * sampled
    return new_tokens * shape.linear_flops_per_token + attention + head


def step_bytes(shape: ModelShape, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> int:
    """Bytes that a step must move at least: weights once, the KV of every context once, the new KV once."""
    read = sum(new_tokens) + sum(past_tokens)
    return shape.weight_bytes + shape.kv_bytes_per_token * (read + sum(new_tokens))


class StepTimeModel:
    """Device time of a step as a linear function of its composition, learnt while the engine runs.

    Features: 1, tokens, tokens of context read by decodes, query-key pairs of prompt chunks. Recursive least squares
    with a forgetting factor (Haykin, Adaptive Filter Theory, ch. 10); a step is predicted before it is learnt from, so
    that the residual is honest. It tells unexpected time from expected time, not a slow device from a slow kernel.
    """

    MIN_STEPS = 50  # before that a residual would be the model's ignorance, not the device's fault
    FORGET = 0.999
    CERTAIN = 1e6  # bound of the covariance: without it, directions that the traffic never excites grow for ever
    SCALE = np.array([1.0, 1e2, 1e4, 1e5])  # brings the features near one, for the conditioning

    def __init__(self) -> None:
        self._weights = np.zeros(4)
        self._covariance = np.eye(4) * self.CERTAIN
        self.steps = 0

    def observe(self, new_tokens: Sequence[int], past_tokens: Sequence[int], device_ns: int) -> int | None:
        """Predicts a step, then learns from it. Nanoseconds, or None while it has seen too few."""
        context = pairs = 0
        for new, past in zip(new_tokens, past_tokens, strict=True):
            if new == 1:
                context += past
            else:
                pairs += new * past + new * (new + 1) // 2
        features = np.array([1.0, sum(new_tokens), context, pairs]) / self.SCALE
        expected_ms = float(features @ self._weights)
        predicted = max(0, round(expected_ms * 1e6)) if self.steps >= self.MIN_STEPS else None
        gain = self._covariance @ features / (self.FORGET + features @ self._covariance @ features)
        self._weights += gain * (device_ns / 1e6 - expected_ms)
        covariance = self._covariance - np.outer(gain, features @ self._covariance)
        covariance = (covariance + covariance.T) / 2
        forgets = np.trace(covariance) < self.CERTAIN
        self._covariance = covariance / self.FORGET if forgets else covariance
        self.steps += 1
        return predicted
