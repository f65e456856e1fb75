"""Every engine option once: its name, its rule, its default.

`EngineConfig` is what the user asks for; `SchedulerConfig` is what the engine runs with once the model and the
device are known. Names follow vLLM wherever the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Literal, get_args

from jaxpaged.reservation import KVReservation

DType = Literal["auto", "float32", "bfloat16", "float16"]

BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine.

    Raises:
      ValueError: an option breaks its rule; names the option, the value and what is allowed.
    """

    model: str
    """A folder with config.json and safetensors, a .gguf file, "demo" (SmolLM2-135M-Instruct), or "random:" and the
    name of a published shape (`jaxpaged.models.shapes`): random weights, made on the device, and no tokenizer."""
    dtype: DType = "auto"
    """Dtype of weights, activations and KV cache. "auto": the checkpoint's on a GPU (bfloat16 for a float32
    one), float32 on a CPU."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None: what the model was trained for."""
    block_size: int = 16
    """Tokens a KV block."""
    num_kv_blocks: int | None = None
    """Blocks of the pool; None: as many as the memory allows."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the pool, instead of `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.90
    """Share of the device memory which JAX may use that weights, pool and temporaries take together. On a CPU the
    pool takes 1 GiB unless a size is given."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; None: 256 on a GPU, 32 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step, shared by decodes and prefill chunks; None: 2048 on a GPU, 256 on a CPU."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    max_logprobs: int = 20
    """Most alternatives a token that a request may ask for."""
    enable_prefix_caching: bool = True
    """Whether a prompt that begins like one before it shares the KV blocks that are there already."""
    kv_reservation: KVReservation = "none"
    """"max", "pow2" or "oracle": each sequence takes all its blocks at once, as systems without paging do; to measure
    what paging gives (`jaxpaged.reservation`)."""
    static_batches: bool = False
    """Whether a batch runs to the end of its longest sequence before the next one starts; to measure what continuous
    batching gives."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r} must be a path, or 'demo'")
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(get_args(DType))}")
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size={self.block_size!r} must be one of {', '.join(map(str, BLOCK_SIZES))}")
        _check_integer("max_model_len", self.max_model_len, minimum=2, optional=True)  # a prompt and an output token
        for name in ("num_kv_blocks", "kv_cache_memory_bytes", "max_num_seqs"):
            _check_integer(name, getattr(self, name), minimum=1, optional=True)
        _check_integer("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1, optional=True)
        _check_integer("seed", self.seed, minimum=0)
        _check_integer("max_logprobs", self.max_logprobs, minimum=0)
        if self.kv_reservation not in get_args(KVReservation):
            raise ValueError(
                f"kv_reservation={self.kv_reservation!r} is unknown; choose one of {', '.join(get_args(KVReservation))}"
            )
        for name in ("enable_prefix_caching", "static_batches"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_memory_bytes={self.kv_cache_memory_bytes} both size "
                "the pool; give one of them"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, numbers.Real) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share!r} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The numbers that the scheduler and the block manager work with, all resolved."""

    num_blocks: int
    """Blocks that sequences may own: the pool's without the null block."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    growth_reserve: int = 2
    """Free blocks that admission leaves for each running sequence to grow into. Less admits sooner and preempts more:
    on a ShareGPT-like trace in a pool for 30 sequences, 2 cause 160 preemptions in 1,000 requests, 0.3 cause 1,003."""
    kv_reservation: KVReservation = "none"
    static_batches: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence can decode in one step"
            )
        if self.num_blocks < 1:
            raise ValueError("the pool has no block left for sequences; give it more memory or num_kv_blocks >= 1")

    @property
    def table_width(self) -> int:
        """Entries of a block table: blocks of the longest sequence that can be."""
        return blocks_for(self.max_model_len, self.block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a number of tokens."""
    return -(-num_tokens // block_size)


def _check_integer(name: str, value: object, *, minimum: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        alternative = " or None" if optional else ""
        raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}{alternative}")
