"""Kernels over a paged KV cache, and around it, usable alone inside any jitted JAX program.

Public ops, and `debug_checks`, under which attention checks the numbers in its tables:

* `paged_attention`: attention, causal by default, of ragged queries over keys and values read through block tables.
* `cascade_attention`: the same for groups of sequences with a common prefix, whose cache is read once for the group.
* `merge_attention`: attention over disjoint parts of the keys, merged.
* `write_kv`: new keys and values into their slots of the pools.
* `rope_and_write_kv`: rotary embedding of queries and keys, and that write, in one go.
* `copy_blocks`: blocks of the pools copied over others, for copy-on-write.
* `add_rms_norm`: the residual addition and the norm between two matrix products of a decoder.
"""

from pallas_kernels.block_copy.api import copy_blocks
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.kv_write.rope_api import rope_and_write_kv
from pallas_kernels.norm.api import add_rms_norm
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.cascade import cascade_attention
from pallas_kernels.paged_attention.debug import debug_checks
from pallas_kernels.paged_attention.merge import merge_attention

__all__ = [
    "add_rms_norm",
    "cascade_attention",
    "copy_blocks",
    "debug_checks",
    "merge_attention",
    "paged_attention",
    "rope_and_write_kv",
    "write_kv",
]
