"""The one place that imports transformers: late, as that takes a second, and without its advice to install PyTorch."""

from __future__ import annotations

import os
import sys
from types import ModuleType

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_transformers() -> ModuleType:
    """The transformers module. Its advisory output is switched off only while it is being imported."""
    if "transformers" in sys.modules:
        return sys.modules["transformers"]
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
    return transformers
