"""Copying blocks inside the pools: `api` is the op, `reference` its XLA implementation, `triton` its kernel."""
