"""The distribution that a request draws from, by its definition, in plain Python: the oracle of the sampler's tests."""

import math
from dataclasses import dataclass

from sojourn.engine.sampling import SamplingParams

# 99.99 % points of the chi-square distribution by degrees of freedom. Seeds are fixed, so that a test never flips.
CHI_SQUARE = {0: 0.1, 1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88, 8: 31.83, 9: 33.72}


@dataclass
class Row:
    """A request as the sampler knows it."""

    id: str
    sampling: SamplingParams
    token_ids: list[int]
    prompt_tokens: int


def distribution(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Probabilities of all tokens; all 0 where nothing may be drawn."""
    values = penalised(list(logits), params, prompt, output)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in range(len(values)):
        if forbidden(token, params, prompt + output, len(output)):
            values[token] = -math.inf
    if max(values) == -math.inf:
        return [0.0] * len(values)
    if params.temperature == 0:
        return [float(token == values.index(max(values))) for token in range(len(values))]
    return truncated([value / params.temperature for value in values], params)


def penalised(values: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    for token in set(prompt + output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    window = output[-512:]
    for token in set(window) if params.lz_penalty else ():
        places = [place for place, other in enumerate(window) if other == token]
        place = max(places, key=lambda place: (copied(window, place), place))
        saved = math.log2(len(values)) - math.log2(len(window) - place)
        values[token] -= params.lz_penalty * max(0.0, saved)
    return values


def copied(window: list[int], place: int) -> int:
    """How many tokens before `place` are those that the window ends with, 32 at most."""
    length = 0
    while length < min(32, place) and window[place - 1 - length] == window[len(window) - 1 - length]:
        length += 1
    return length


def forbidden(token: int, params: SamplingParams, tokens: list[int], num_output: int) -> bool:
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return True
    if num_output < params.min_tokens and token in params.stop_token_ids:
        return True
    output = [*tokens[len(tokens) - num_output :], token]
    return any(output[-len(word) :] == word for word in params.bad_words)


def truncated(values: list[float], params: SamplingParams) -> list[float]:
    best = max(values)
    finite = [value for value in values if value > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    weights = {token: math.exp(value - best) for token, value in enumerate(values) if value > -math.inf}
    if params.top_n_sigma:
        weights = {t: w for t, w in weights.items() if values[t] >= best - params.top_n_sigma * sigma}
    if params.min_p:
        weights = {t: w for t, w in weights.items() if w >= params.min_p}
    ranked = sorted(weights, key=lambda token: -weights[token])[: params.top_k or None]
    total, kept, mass = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weights[token] / total
        if mass >= params.top_p:
            break
    scale = sum(weights[token] for token in kept)
    return [weights[token] / scale if token in kept else 0.0 for token in range(len(values))]


def assert_sampled_from(counts: list[int], probabilities: list[float]) -> None:
    """Pearson's chi-square test; tokens that are expected fewer than five times count as one."""
    draws = sum(counts)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0), "an impossible token"
    cells = [(count, draws * p) for count, p in zip(counts, probabilities, strict=True) if draws * p >= 5]
    rare = [(count, draws * p) for count, p in zip(counts, probabilities, strict=True) if 0 < draws * p < 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    assert chi_square < CHI_SQUARE[len(cells) - 1]
