"""Figures of the PagedAttention paper (Kwon et al., SOSP 2023, arXiv:2309.06180) to stand beside ours, by trace.

OPT-13B on a GPU with 40 GB, at request rates that keep the baselines' memory full. Shares are fractions.
"""

from __future__ import annotations

from typing import NamedTuple


class Served(NamedTuple):
    held_of_pool: float
    """Figure 2."""
    mean_running: float
    """Figure 13a: 2 requests a second."""


USAGE = {
    "sharegpt_like": {
        "Orca (Max)": Served(0.204, 7.00),
        "Orca (Pow2)": Served(0.268, 9.81),
        "Orca (Oracle)": Served(0.382, 13.62),
        "paged": Served(0.963, 30.42),
    }
}

PARALLEL = {"alpaca_like": {2: 0.061, 4: 0.085, 6: 0.098}, "sharegpt_like": {2: 0.162, 6: 0.305}}
"""Blocks saved by sharing, by sequences of a request: section 6.3. For ShareGPT it gives the range alone."""

BEAM = {"alpaca_like": {2: 0.376, 4: 0.531, 6: 0.552}, "sharegpt_like": {2: 0.443, 6: 0.663}}
