"""Kernels for CPUs in C++, built on first use."""
