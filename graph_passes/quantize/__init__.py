"""Formats of quantised weights, and rounding to them."""
