"""Checkpoints in: safetensors folders and GGUF files, both seen as Hugging Face names, shapes and config.

`open_checkpoint(path)` is the entry; `demo_model_path()` fetches the small model behind the name `demo`.
Nothing here imports JAX: readers hand out numpy arrays, one tensor at a time.
"""

from jaxpaged.checkpoints.demo import demo_model_path
from jaxpaged.checkpoints.reader import CheckpointReader, open_checkpoint

__all__ = ["CheckpointReader", "demo_model_path", "open_checkpoint"]
