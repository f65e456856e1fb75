"""The static side of a paged attention call: everything but the arrays."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Hashable, so that it can key compiled kernels. See `pallas_kernels.paged_attention` for the meanings."""

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    max_query_len: int | None = None
    return_lse: bool = False
