"""Residual addition and RMS normalisation: `api` is the op, `reference` its XLA implementation, `triton` its kernel."""
