"""Kernels over a paged KV cache, usable alone inside any jitted JAX program.

Public ops, and nothing else:

* `paged_attention`: causal attention of ragged queries over keys and values read through block tables.
* `merge_attention`: attention over disjoint parts of the keys, merged.
* `write_kv`: new keys and values into their slots of the pools.
"""

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.merge import merge_attention

__all__ = ["merge_attention", "paged_attention", "write_kv"]
