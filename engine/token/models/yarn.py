"""YaRN's sharpening of attention. Knows no torch: what reads a GGUF file needs it too."""

import math


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens attention for a context stretched by `factor` (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
