"""Writing new keys and values into the pools: `api` is the op, `reference` its XLA implementation."""
