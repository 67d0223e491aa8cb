"""Triton kernels for GPUs. Each has a torch reference beside it or in the module that it replaces."""
