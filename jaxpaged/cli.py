"""The command line: `jaxpaged generate` and `jaxpaged chat`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jaxpaged.llm import LLM

app = typer.Typer(
    help="PagedAttention for JAX: generate and chat from the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_ENGINE = "Engine"
_SAMPLING = "Sampling"


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _engine(help: str, **rules: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=_ENGINE, **rules)


def _sampling(help: str, **rules: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=_SAMPLING, **rules)


Model = Annotated[str, _engine("Folder with safetensors, a .gguf file, or 'demo' (SmolLM2-135M-Instruct).")]
Dtype = Annotated[DType, _engine("Dtype of weights, activations and KV cache.")]
MaxModelLen = Annotated[int | None, _engine("Longest prompt + output, tokens; the model's own limit if not given.")]
BlockSize = Annotated[int, _engine("Tokens a KV block: 8, 16, 32, 64 or 128.")]
NumKvBlocks = Annotated[int | None, _engine("Blocks of the KV pool; as many as fit if not given.")]
MemoryShare = Annotated[float, _engine("Share of the GPU memory for weights, pool and temporaries, in (0, 1].")]
MaxNumSeqs = Annotated[int | None, _engine("Most sequences at once; 256 if not given, 32 on a CPU.")]
TokenBudget = Annotated[int | None, _engine("Token budget of a step; 2048 if not given, 256 on a CPU.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what loads and how long it takes.")]

MaxTokens = Annotated[int, _sampling("Most tokens to generate.", min=1)]
TopK = Annotated[int, _sampling("Sample among the k best tokens; 0 = all.")]
TopP = Annotated[float, _sampling("Sample among the best tokens of this probability mass, in (0, 1].")]
Seed = Annotated[int | None, _sampling("Makes sampling reproducible.")]


@app.callback()
def _main() -> None:
    """PagedAttention for JAX."""


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="Prompts; '-' reads one from standard input.")],
    model: Model = "demo",
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: TokenBudget = None,
    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Continue prompts, all of them in one batch."""
    params = _params(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed)
    texts = [sys.stdin.read() if p == "-" else p for p in prompts]
    llm = _load(
        verbose,
        model=model,
        dtype=dtype.value,
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    with _one_line_errors():
        outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        typer.echo(text + output.outputs[0].text)


@app.command()
def chat(
    model: Model = "demo",
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.2,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Talk with the model; answers stream. An empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts over."""
    params = _params(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed)
    llm = _load(
        verbose,
        model=model,
        dtype=dtype.value,
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=1,
        max_num_batched_tokens=256,
    )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while line := _ask():
        if line == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
        except ValueError as error:
            messages.pop()
            typer.secho(f"{error} (/new starts over)", fg="red", err=True)


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any) -> str:
    """Streams an answer to the terminal; what came before a Ctrl-C counts as the answer."""
    pieces: list[str] = []
    prompt = llm.chat_prompt(messages)
    room = llm.engine.scheduler.config.max_model_len - len(prompt)
    if room < 1:
        raise ValueError(f"the conversation's {len(prompt)} tokens fill the context")
    stream = llm.stream(prompt, dataclasses.replace(params, max_tokens=min(params.max_tokens, room)))
    try:
        for piece in stream:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            pieces.append(piece)
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()
    typer.echo()
    return "".join(pieces)


def _params(**fields: Any) -> Any:
    from jaxpaged.sampling_params import SamplingParams

    with _one_line_errors():
        return SamplingParams(**fields)


def _load(verbose: bool, *, gpu_memory_utilization: float, **options: Any) -> LLM:
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("jaxpaged").setLevel(logging.INFO if verbose else logging.WARNING)
    # The command line has the process to itself, so JAX's allocator may have the GPU; must be set before JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if sys.stderr.isatty():
        typer.secho(f"Loading {options['model']} ...", fg="bright_black", err=True)
    with _one_line_errors():
        from jaxpaged.llm import LLM

        return LLM(gpu_memory_utilization=gpu_memory_utilization, **options)


class _one_line_errors:
    """Turns an error that the user can mend into one line and exit code 2."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from jaxpaged.checkpoints.demo import DemoModelError

        if isinstance(error, ValueError | DemoModelError):
            typer.secho(f"jaxpaged: {error}", fg="red", err=True)
            raise typer.Exit(2) from error


def main() -> None:
    """The `jaxpaged` program."""
    app()


if __name__ == "__main__":
    main()
