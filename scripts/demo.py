"""`make demo`: a real model answers two dozen prompts of very uneven lengths through the paged KV cache."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the demo has the GPU to itself

from rich.console import Console
from rich.table import Table

from jaxpaged.checkpoints.demo import DemoModelError

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "How many days are there in a week?",
    "Explain in two sentences what a hash table is.",
    "What do bees make?",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "List five animals that live in the ocean.",
    "What is the boiling point of water in Celsius?",
    "Tell me a short story about a fox who learned to read.",
    "What does HTTP stand for?",
    "Give three tips for sleeping better.",
    "Describe the water cycle for a ten-year-old.",
    "What is the largest planet of the solar system?",
    "Write one sentence that uses the word 'serendipity'.",
    "What is the difference between a list and a tuple in Python?",
    "What is the chemical symbol for water?",
]

_FACTS = [
    "The lighthouse was built in 1874 and stands forty metres tall.",
    "Its keeper, Mara, climbs two hundred and six steps every evening.",
    "Storms come from the west in winter and can last for a week.",
    "The village below has one baker, two boats and a school with nine pupils.",
    "On Sundays the ferry brings letters, flour and sometimes a visitor.",
    "In the cellar lies a chart that nobody has been able to read.",
    "The lamp was changed from oil to electricity in 1931.",
]


def conversations() -> list[list[dict[str, str]]]:
    """Short questions, and four that carry a long text, so that prompts run from 30 to over 1,000 tokens."""
    asked = [[{"role": "user", "content": q}] for q in QUESTIONS]
    for repeat, question in [
        (2, "How tall is the lighthouse?"),
        (5, "Summarise the text in one sentence."),
        (8, "When was the lamp changed to electricity?"),
        (11, "Who is the keeper?"),
    ]:
        text = " ".join(f"({i + 1}) {fact}" for i, fact in enumerate(_FACTS * repeat))
        asked.append([{"role": "user", "content": f"Read this text.\n\n{text}\n\n{question}"}])
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="folder, .gguf file, or 'demo' (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens an answer (default: %(default)s)")
    parser.add_argument("--num-kv-blocks", type=int, default=None, help="blocks of the pool (default: what fits)")
    args = parser.parse_args()
    try:
        run(args)
    except (ValueError, DemoModelError) as error:
        sys.exit(f"demo: {error}")


def run(args: argparse.Namespace) -> None:
    import jax

    from jaxpaged import LLM, SamplingParams

    console = Console()
    device = jax.devices()[0].device_kind
    console.print(f"Loading the model and compiling its steps for {device} (cached for the next time) ...")
    start = time.perf_counter()
    llm = LLM(model=args.model, dtype=args.dtype, num_kv_blocks=args.num_kv_blocks)
    loaded = time.perf_counter()
    asked = conversations()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    outputs = llm.chat(asked, params, use_tqdm=sys.stderr.isatty())
    elapsed = time.perf_counter() - loaded

    for messages, output in zip(asked, outputs, strict=True):
        question = messages[-1]["content"].rsplit("\n\n", 1)[-1]
        tokens = f"{len(output.prompt_token_ids)} + {len(output.outputs[0].token_ids)} tokens"
        console.print(f"\n[bold]{question}[/bold] [dim]({tokens})[/dim]")
        console.print(output.outputs[0].text.strip(), markup=False, highlight=False)

    stats = llm.cache_stats()
    num_output = sum(len(o.outputs[0].token_ids) for o in outputs)
    num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
    table = Table(title=f"\n{len(outputs)} requests on {device}", show_header=False)
    table.add_row("start-up", f"{loaded - start:.1f} s; of that {llm.startup}")
    table.add_row("prompt tokens", f"{num_prompt:,}")
    table.add_row("output tokens", f"{num_output:,} in {elapsed:.1f} s")
    table.add_row("output tokens a second", f"{num_output / elapsed:.1f}")
    table.add_row("KV blocks in the pool", f"{stats.num_blocks:,} of {stats.block_size} tokens")
    table.add_row("peak KV blocks used", f"{stats.peak_blocks_used:,}")
    table.add_row("allocated KV slots that held a token", f"{stats.slots_held_share:.1%}")
    table.add_row("preemptions", f"{stats.num_preemptions}")
    console.print(table)


if __name__ == "__main__":
    main()
