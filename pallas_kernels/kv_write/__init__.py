"""Writing new keys and values into the pools, alone or with rotary embedding.

* `api`: the op `write_kv`; `rope_api`: the op `rope_and_write_kv`; `checks`: what both refuse.
* `reference`: both in XLA; `triton`: rotary embedding and the write in one kernel.
"""
