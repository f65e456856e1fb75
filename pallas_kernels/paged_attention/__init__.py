"""Attention over a paged KV cache: `api` is the op, `reference` its XLA implementation and oracle."""
