"""KV space that a sequence takes when it is admitted, by policy: paging's none, and what serving systems did before it.

The policies are those of the PagedAttention paper (Kwon et al., 2023, arXiv:2309.06180, section 6.1) for Orca, whose
requests lie in contiguous space that is reserved at once. They are here to be measured against: `jaxpaged bench`.
"""

from __future__ import annotations

from typing import Literal

KVReservation = Literal["none", "max", "pow2", "oracle"]


def reserved_tokens(policy: KVReservation, prompt: int, output: int, max_model_len: int) -> int:
    """Token slots that a sequence takes at its admission and keeps.

    Args:
      policy: "none" takes blocks as tokens need them; "max" as many slots as the longest sequence has; "pow2" room for
        the output's length rounded up to a power of two; "oracle" for exactly the output's length, which no real
        system knows.
      prompt: its tokens.
      output: the most tokens that it may generate, which is how many it does with `ignore_eos`.
      max_model_len: tokens of the longest sequence.
    """
    if policy == "none":
        return 0
    if policy == "max":
        return max_model_len
    if policy == "pow2":
        output = 1 << (output - 1).bit_length()
    return min(prompt + output, max_model_len)
