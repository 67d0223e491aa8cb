"""The normal distribution's quantile, for draws that are made by inversion."""

from statistics import NormalDist

_STANDARD = NormalDist()


def normal_quantile(probability: float) -> float:
    """The value below which a standard normal lies with this probability; 0 and 1 are moved inside by 1e-12."""
    return _STANDARD.inv_cdf(min(max(probability, 1e-12), 1 - 1e-12))
