"""The command line: `jaxpaged generate`, `jaxpaged chat` and `jaxpaged bench`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpaged.bench.app import app as bench_app
from jaxpaged.cli_options import (
    BlockSize,
    DType,
    Dtype,
    MaxModelLen,
    MaxNumSeqs,
    MaxTokens,
    MemoryShare,
    Model,
    NumCompletions,
    NumKvBlocks,
    PrefixCaching,
    Seed,
    TokenBudget,
    TopK,
    TopP,
    Verbose,
    load_llm,
    one_line_errors,
    sampling_option,
    sampling_params,
)

if TYPE_CHECKING:
    from jaxpaged.llm import LLM

app = typer.Typer(
    help="PagedAttention for JAX: generate, chat and measure from the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


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
    enable_prefix_caching: PrefixCaching = True,
    temperature: Annotated[float, sampling_option("0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    n: NumCompletions = 1,
    verbose: Verbose = False,
) -> None:
    """Continue prompts, all of them in one batch."""
    params = sampling_params(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, n=n)
    texts = [sys.stdin.read() if p == "-" else p for p in prompts]
    llm = load_llm(
        verbose,
        model=model,
        dtype=dtype.value,
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    with one_line_errors():
        outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        for completion in output.outputs:
            typer.echo(text + completion.text)


@app.command()
def chat(
    model: Model = "demo",
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, sampling_option("0 is greedy.")] = 0.2,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Talk with the model; answers stream. An empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts over."""
    params = sampling_params(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed)
    llm = load_llm(
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


def main() -> None:
    """The `jaxpaged` program."""
    app()


if __name__ == "__main__":
    main()
