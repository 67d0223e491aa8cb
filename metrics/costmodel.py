"""What a step should cost: exact FLOPs and bytes from its composition, and the time that its device should take.

Formulas for decoders with causal attention, counted per multiply and add (2 FLOPs). Bytes count each weight once a
step, keys and values read once and written once; activations are left out. A model states its own coefficients.
"""

from collections.abc import Sequence

import msgspec


class ExpertShape(msgspec.Struct, frozen=True):
    """The routed experts of a mixture."""

    num_layers: int  # that have them
    num_experts: int  # in each
    num_chosen: int  # for each token
    expert_bytes: int  # weights of one


class ModelShape(msgspec.Struct, frozen=True):
    """What a decoder's cost depends on."""

    vocab_size: int
    hidden_size: int
    layer_parameters: int  # that one token is multiplied by in all layers: of the routed experts only the chosen
    pair_flops: int  # of one query and one key in one layer: their product and the mixing, all heads
    windows: tuple[tuple[int | None, int], ...]  # (sliding window or None, number of layers that have it)
    kv_bytes_per_token: int  # all layers
    weight_bytes: int  # that every step reads: no embedding table, of which rows are gathered, no routed experts
    experts: ExpertShape | None = None

    @property
    def num_layers(self) -> int:
        return sum(layers for _, layers in self.windows)

    @property
    def linear_flops_per_token(self) -> int:
        return 2 * self.layer_parameters


def request_flops(shape: ModelShape, new_tokens: int, past_tokens: int, sampled: int = 0) -> int:
    """FLOPs of `new_tokens` after `past_tokens` of one sequence, `sampled` of them with logits."""
    pairs = sum(layers * _pairs(new_tokens, past_tokens, window) for window, layers in shape.windows)
    head = 2 * shape.hidden_size * shape.vocab_size * sampled
    return new_tokens * shape.linear_flops_per_token + shape.pair_flops * pairs + head


def decode_flops(shape: ModelShape, past_tokens: Sequence[int]) -> int:
    """FLOPs of a step in which each of so many sequences computes one token and draws the next."""
    tokens, context = len(past_tokens), sum(past_tokens) + len(past_tokens)
    pairs = sum(
        layers * (context if window is None else sum(min(past + 1, window) for past in past_tokens))
        for window, layers in shape.windows
    )
    linear = tokens * (shape.linear_flops_per_token + 2 * shape.hidden_size * shape.vocab_size)
    return linear + shape.pair_flops * pairs


def _pairs(new: int, past: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, exact causal."""
    if window is None or past + new <= window:
        return new * past + new * (new + 1) // 2
    growing = max(0, window - past)  # queries that still see everything before them
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * window


def step_bytes(shape: ModelShape, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> int:
    """Bytes that a step must move at least: weights once, the KV that its tokens see once, the new KV once.

    Of the routed experts it counts the expected number of distinct ones, as if tokens chose evenly and independently;
    real routers are less even, so they read fewer.
    """
    tokens = sum(new_tokens)
    kv_layers = tokens * shape.num_layers  # written, then read: token positions times layers
    for window, layers in shape.windows:
        if window is None:
            kv_layers += layers * (tokens + sum(past_tokens))
        else:
            kv_layers += layers * sum(
                min(past + new, window + new - 1) for new, past in zip(new_tokens, past_tokens, strict=True)
            )
    moved = shape.weight_bytes + shape.kv_bytes_per_token * kv_layers // shape.num_layers
    if shape.experts is not None:
        experts = shape.experts
        distinct = experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** tokens)
        moved += round(experts.num_layers * distinct * experts.expert_bytes)
    return moved


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


class StepTimeModel:
    """Device time of a step as a linear function of its composition, learnt while the engine runs.

    Features: 1, tokens, tokens of context read by decodes, query-key pairs of prompt chunks. Recursive least squares
    with a forgetting factor (Haykin, Adaptive Filter Theory, ch. 10); a step is predicted before it is learnt from, so
    that the residual is honest. It tells unexpected time from expected time, not a slow device from a slow kernel.
    """

    MIN_STEPS = 50  # before that a residual would be the model's ignorance, not the device's fault
    FORGET = 0.999
    CERTAIN = 1e6  # bound of the covariance: without it, directions that the traffic never excites grow for ever
    SCALE = (1.0, 1e2, 1e4, 1e5)  # brings the features near one, for the conditioning

    def __init__(self) -> None:
        size = range(len(self.SCALE))
        self._weights = [0.0] * len(size)
        self._covariance = [[self.CERTAIN * (row == column) for column in size] for row in size]
        self.steps = 0

    def observe(self, new_tokens: Sequence[int], past_tokens: Sequence[int], device_ns: int) -> int | None:
        """Predicts a step, then learns from it. Nanoseconds, or None while it has seen too few."""
        context, pairs, tokens = sum(past_tokens), 0, sum(new_tokens)
        if tokens != len(new_tokens):
            for new, past in zip(new_tokens, past_tokens, strict=True):
                if new != 1:
                    context -= past
                    pairs += new * past + new * (new + 1) // 2
        # Matrices of four rows: plain numbers are faster than arrays are made.
        x = [feature / scale for feature, scale in zip((1.0, tokens, context, pairs), self.SCALE, strict=True)]
        expected_ms = _dot(x, self._weights)
        predicted = max(0, round(expected_ms * 1e6)) if self.steps >= self.MIN_STEPS else None
        spread = [_dot(row, x) for row in self._covariance]
        certainty = self.FORGET + _dot(x, spread)
        gain = [value / certainty for value in spread]
        error_ms = device_ns / 1e6 - expected_ms
        self._weights = [weight + step * error_ms for weight, step in zip(self._weights, gain, strict=True)]
        covariance = [
            [value - step * other for value, other in zip(row, spread, strict=True)]
            for row, step in zip(self._covariance, gain, strict=True)
        ]
        for row in range(1, len(x)):  # rounding must not make it lopsided
            for column in range(row):
                covariance[row][column] = covariance[column][row]
        if sum(covariance[index][index] for index in range(len(x))) < self.CERTAIN:
            covariance = [[value / self.FORGET for value in row] for row in covariance]
        self._covariance = covariance
        self.steps += 1
        return predicted
