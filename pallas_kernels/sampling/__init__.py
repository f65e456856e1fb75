"""Sampling a token of a large vocabulary without sorting it, and without one row ever touching another.

`threshold` finds where top-k and top-p cut, `fixed_point` turns probabilities into integers whose sums do not
depend on the order of summation, `draw` picks a token by inverse CDF from those integers.
"""

from pallas_kernels.sampling.draw import draw
from pallas_kernels.sampling.fixed_point import fixed_point_weights
from pallas_kernels.sampling.threshold import kth_largest, top_p_threshold

__all__ = ["draw", "fixed_point_weights", "kth_largest", "top_p_threshold"]
