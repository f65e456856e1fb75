"""Hugging Face Transformers on PyTorch with the same requests: what most people run without a serving engine.

Two ways: `generate` in static batches, and Transformers' own continuous batching. Both run each request to its exact
length. A static batch takes the requests in their order, unsorted, pads prompts on the left, and runs until its longest
output is complete; what others compute beyond their own end counts as padding. PyTorch is imported when a model is
loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxpaged.bench.latency import Iteration, Latency
from jaxpaged.bench.throughput import Throughput
from jaxpaged.bench.workload import BenchRequest
from jaxpaged.checkpoints.hf import import_transformers
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.shapes import RANDOM, shape

_PAD = 0  # masked out
_WARM_UP_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A causal language model of Transformers, in evaluation mode on its device."""

    torch: Any
    model: Any
    device: str

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def device_name(self) -> str:
        """What the device calls itself."""
        return "cpu" if self.device == "cpu" else self.torch.cuda.get_device_name()

    @property
    def dtype_name(self) -> str:
        """Dtype of the weights."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model was trained for."""
        return self.model.config.max_position_embeddings

    def generate(self, batch: Sequence[BenchRequest], temperature: float, clock: Clock | None = None) -> None:
        """Serves a static batch; returns when the device is done."""
        longest_output = max(r.num_output for r in batch)
        width = max(len(r.prompt) for r in batch)
        ids = [[_PAD] * (width - len(r.prompt)) + r.prompt for r in batch]
        mask = [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch]
        with self.torch.inference_mode():
            sequences = self.model.generate(
                self.torch.tensor(ids, device=self.device),
                attention_mask=self.torch.tensor(mask, device=self.device),
                generation_config=_generation_config(longest_output, temperature),
                stopping_criteria=None if clock is None else [clock],
            )
        self.synchronize()
        assert sequences.shape == (len(batch), width + longest_output), "nothing ends before its length"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def load(model: str, dtype: str, seed: int) -> HFModel:
    """A folder's model, or random weights in a shape (`random:...`), on the GPU if PyTorch has one.

    Args:
      model: as `EngineConfig.model`, without the formats that Transformers doesn't read as they are.
      dtype: of the weights; "auto": bfloat16 on a GPU, float32 on a CPU.
      seed: of weights and sampling.

    Raises:
      ValueError: PyTorch is not installed, or there is no such model.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError("engine='hf' needs PyTorch, which is not installed; run: pip install torch") from None
    transformers = import_transformers()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    torch.manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    if model.startswith(RANDOM):
        with torch.device(device):
            loaded = auto.from_config(_llama_config(shape(model.removeprefix(RANDOM))), dtype=getattr(torch, dtype))
    elif (Path(model) / "config.json").is_file():
        loaded = auto.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
    else:
        raise ValueError(f"model={model!r}: engine='hf' takes the name of a shape, or a folder with safetensors")
    loaded.generation_config.eos_token_id = None  # every request runs its full length
    hf = HFModel(torch, loaded.to(device).eval(), device)
    hf.synchronize()
    return hf


def _llama_config(c: ModelConfig) -> Any:
    """The configuration of Transformers for a shape."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling is not None:
        rope.update(dataclasses.asdict(c.rope_scaling), rope_type="llama3")
    return import_transformers().LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _generation_config(num_tokens: int, temperature: float) -> Any:
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = import_transformers().GenerationConfig
    return config(max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=_PAD, **sampling)


def measure_static(
    hf: HFModel, requests: Sequence[BenchRequest], batch_sizes: Sequence[int], temperature: float, use_tqdm: bool
) -> Throughput:
    """`generate` in static batches of the best of some sizes.

    Of several sizes each serves its first batch, and the one that makes the most output tokens a second serves all; one
    that the memory does not hold is passed over. Sizes above the number of requests mean all of them.

    Raises:
      ValueError: the memory holds none of the sizes.
    """
    batch_sizes = sorted({min(size, len(requests)) for size in batch_sizes})
    trials = {size: rate for size in batch_sizes if (rate := _trial(hf, requests[:size], temperature)) is not None}
    if not trials:
        raise ValueError(f"hf_batch_sizes={','.join(map(str, batch_sizes))}: the memory holds none of these batches")
    best = max(trials, key=lambda size: trials[size])
    batches = [requests[i : i + best] for i in range(0, len(requests), best)]
    bar = tqdm(total=len(requests), desc=f"Batches of {best}", unit="req", dynamic_ncols=True, disable=not use_tqdm)
    start = time.perf_counter()
    with bar:
        for batch in batches:
            hf.generate(batch, temperature)
            bar.update(len(batch))
    seconds = time.perf_counter() - start
    num_output = sum(r.num_output for r in requests)
    num_steps = sum(max(r.num_output for r in batch) for batch in batches)
    computed = sum(
        len(b) * (max(len(r.prompt) for r in b) + max(r.num_output for r in b) - 1) for b in batches
    )  # the last token is sampled and not computed
    return Throughput(
        num_requests=len(requests),
        input_tokens=sum(len(r.prompt) for r in requests),
        output_tokens=num_output,
        seconds=seconds,
        num_steps=num_steps,
        mean_batch=num_output / num_steps,
        padding_share=1 - sum(len(r.prompt) + r.num_output - 1 for r in requests) / computed,
        details={"batch_size": best, "trials": {str(size): rate for size, rate in trials.items()}},
    )


def _trial(hf: HFModel, batch: Sequence[BenchRequest], temperature: float) -> float | None:
    """Output tokens a second of one batch, after a few to warm up; None if the memory does not hold it."""
    try:
        hf.generate([r._replace(num_output=min(r.num_output, _WARM_UP_TOKENS)) for r in batch], temperature)
        start = time.perf_counter()
        hf.generate(batch, temperature)
        return sum(r.num_output for r in batch) / (time.perf_counter() - start)
    except hf.torch.cuda.OutOfMemoryError:
        return None
    finally:
        if hf.device != "cpu":
            hf.torch.cuda.empty_cache()


def measure_continuous(
    hf: HFModel, requests: Sequence[BenchRequest], temperature: float, use_tqdm: bool
) -> tuple[Throughput, float]:
    """Transformers' continuous batching, which `generate_batch` runs, with each request's own length.

    Returns:
      The measurement, and the seconds that its pool and warm-up took before.

    Raises:
      RuntimeError: requests failed; says why.
    """
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    options = ContinuousBatchingConfig()
    if hf.device == "cpu":  # where its pool would take half of the machine's memory
        options.num_blocks = sum(-(-(len(r.prompt) + r.num_output) // options.page_size) for r in requests)
    longest_output = max(r.num_output for r in requests)
    hints = WorkloadHints(
        max_prompt_length=max(len(r.prompt) for r in requests),
        max_generated_length=longest_output,
        num_requests=len(requests),
    )
    bar = tqdm(total=len(requests), desc="Continuous batching", unit="req", dynamic_ncols=True, disable=not use_tqdm)
    loading = time.perf_counter()
    config = _generation_config(longest_output, temperature)
    config.eos_token_id = -1  # none, in its own way of saying so
    manager_context = hf.model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=options, workload_hints=hints
    )
    with bar, manager_context as manager:
        start = time.perf_counter()
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.num_output, eos_token_id=-1)
        lengths = []
        while len(lengths) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("Transformers' continuous batching stopped before all requests were served")
            if result is not None and result.error is not None:
                raise RuntimeError(f"Transformers' continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                lengths.append(len(result.generated_tokens))
                bar.update()
        seconds = time.perf_counter() - start
    assert sum(lengths) == sum(r.num_output for r in requests), "requests run to their exact lengths"
    measured = Throughput(
        num_requests=len(requests),
        input_tokens=sum(len(r.prompt) for r in requests),
        output_tokens=sum(lengths),
        seconds=seconds,
    )
    return measured, start - loading


class Clock:
    """A stopping criterion that stops nothing and notes when each token is there."""

    def __init__(self, hf: HFModel) -> None:
        self._hf = hf
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self._hf.synchronize()
        self.times.append(time.perf_counter())
        return self._hf.torch.zeros(input_ids.shape[0], dtype=self._hf.torch.bool, device=input_ids.device)


def measure_latency(
    hf: HFModel, batches: Sequence[Sequence[BenchRequest]], temperature: float, use_tqdm: bool
) -> Latency:
    """As `latency.measure`, by `generate`: every request of a batch gets its tokens at the same time."""
    iterations = []
    for batch in tqdm(batches, desc="Iterations", unit="it", dynamic_ncols=True, disable=not use_tqdm):
        clock = Clock(hf)
        start = time.perf_counter()
        hf.generate(batch, temperature, clock)
        end = time.perf_counter() - start
        first, last = (time - start for time in (clock.times[0], clock.times[-1]))
        iterations.append(Iteration(end, [first] * len(batch), [last] * len(batch)))
    return Latency.of(iterations[1:], len(batches[0][0].prompt), batches[0][0].num_output)
