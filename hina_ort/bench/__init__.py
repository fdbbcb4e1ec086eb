"""Benchmarks: one MoE layer against the kernels of other runtimes, in the same process, on the same weights."""
