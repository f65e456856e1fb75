"""jaxpaged: PagedAttention for JAX.

`LLM` and `SamplingParams` are all that most programs need. Names are imported on first use, so that the host-side
rooms (scheduler, block manager) can be used without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.llm import LLM
    from jaxpaged.outputs import BeamSearchOutput, BeamSequence, CompletionOutput, RequestOutput
    from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxpaged.llm",
    "BeamSearchOutput": "jaxpaged.outputs",
    "BeamSearchParams": "jaxpaged.sampling_params",
    "BeamSequence": "jaxpaged.outputs",
    "CompletionOutput": "jaxpaged.outputs",
    "RequestOutput": "jaxpaged.outputs",
    "SamplingParams": "jaxpaged.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
