"""Programs compiled ahead: lowered in other processes, compiled in threads, kept on disk from start to start.

`Program` is what is compiled, `Compilation` compiles many in the background, `ExecutableCache` keeps them.
"""

from jaxpaged.compiling.cache import ExecutableCache
from jaxpaged.compiling.compilation import Compilation
from jaxpaged.compiling.program import Program

__all__ = ["Compilation", "ExecutableCache", "Program"]
