"""Tiny random models and MoE blocks of the supported architectures: inputs of tests and of the demo."""
