"""FLOPs, bytes and time of steps; roofline, utilisation, kernels."""
