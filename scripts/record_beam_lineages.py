"""Which beams survive in beam search over a real model, as workloads/beam_lineages.json.

    python scripts/record_beam_lineages.py SmolLM2-135M-Instruct.Q4_1.gguf [--out workloads/beam_lineages.json]

`scripts/memory_report.py` replays these lineages. Needs torch, transformers (5.24 or later), gguf, accelerate and
tokenizers; nothing of jaxpaged. For each prompt and each width k, `STEPS` steps of beam search in float32 on the CPU:
the k continuations with the highest sum of log-probabilities go on. The end-of-sequence token is barred, as every
output of the traces has a given length. The file has, for each prompt and step after the first, whose continuations
the survivors are: k digits, indices into the beams of the step before, which are ordered by score, best first. In the
first step all of them continue the prompt.

Before anything is written, the best beam of `CHECKED` steps is compared with that of `model.generate(num_beams=k)`.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import gguf
import tokenizers
import torch
import transformers
from make_goldens import build_tokenizer, load, user

STEPS = 256
WIDTHS = (2, 4, 6)
CHECKED = 32

QUESTIONS = [
    "Tell me a story about a fox who learned to read.",
    "Explain how a refrigerator works.",
    "Describe the water cycle for a ten-year-old.",
    "What are the advantages and disadvantages of living in a big city?",
    "Write a Python class for a bank account, with comments.",
    "Give me a recipe for vegetable soup.",
    "Write a letter to a friend about a journey through the mountains.",
    "Who was Marie Curie, and why is she remembered?",
    "How do vaccines protect us from disease?",
    "Plan a three-day trip to Rome for a family.",
    "Explain the difference between weather and climate.",
    "Write a dialogue between a teacher and a pupil who is late.",
    "What should I consider when I buy a used car?",
    "Summarise the history of the bicycle.",
    "Why do leaves change their colour in autumn?",
    "Give tips for preparing a job interview.",
]


@torch.inference_mode()
def search(
    model: transformers.PreTrainedModel, prompt: list[int], width: int, steps: int, barred: int
) -> tuple[list[list[int]], list[int]]:
    """Beam search without an end.

    Returns:
      For each step after the first, the beam of the step before that each survivor continues, and the tokens of the
      best beam after the last.
    """
    output = model(input_ids=torch.tensor([prompt] * width), use_cache=True)
    scores = torch.full((width,), -torch.inf)
    scores[0] = 0.0  # all beams are the prompt, so one of them has all the candidates
    tokens = torch.empty((width, 0), dtype=torch.long)
    parents = []
    for step in range(steps):
        logprobs = output.logits[:, -1].log_softmax(-1)
        logprobs[:, barred] = -torch.inf
        scores, best = (scores[:, None] + logprobs).flatten().topk(width)
        parent, token = best // logprobs.shape[1], best % logprobs.shape[1]
        tokens = torch.cat([tokens[parent], token[:, None]], dim=1)
        if step:
            parents.append(parent.tolist())
        if step + 1 < steps:
            cache = output.cache
            cache.reorder_cache(parent)
            output = model(input_ids=token[:, None], cache=cache, use_cache=True)
    return parents, tokens[0].tolist()


@torch.inference_mode()
def check(model: transformers.PreTrainedModel, prompt: list[int], width: int, tokens: list[int], barred: int) -> None:
    """Raises RuntimeError unless `model.generate` has this best beam too."""
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(
        num_beams=width, do_sample=False, max_new_tokens=len(tokens), suppress_tokens=[barred], length_penalty=0.0
    )
    best = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()
    if best != tokens:
        raise RuntimeError(f"model.generate has another best beam of {width} after {prompt[:8]}…")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=Path("workloads/beam_lineages.json"))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each search (default: {STEPS})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fixed number: near ties depend on the order of sums
    fields = {name: field.contents() for name, field in gguf.GGUFReader(arguments.gguf).fields.items()}
    tokenizer = build_tokenizer(fields)
    barred = fields["tokenizer.ggml.eos_token_id"]
    model = load(arguments.gguf)
    lineages: dict[str, list[str]] = {str(width): [] for width in WIDTHS}
    for number, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template([user(question)], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for width in WIDTHS:
            parents, best = search(model, prompt, width, arguments.steps, barred)
            if number == 0:
                check(model, prompt, width, search(model, prompt, width, CHECKED, barred)[1], barred)
            lineages[str(width)].append("".join(str(parent) for step in parents for parent in step))
            print(f"{question} {width} beams: {tokenizer.decode(best)[:80]!r}", file=sys.stderr, flush=True)
    header = {
        "command": f"python scripts/record_beam_lineages.py {arguments.gguf.name}",
        "sha256": hashlib.sha256(arguments.gguf.read_bytes()).hexdigest(),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "steps": arguments.steps,
    }
    arguments.out.write_text(json.dumps({"header": header, "lineages": lineages}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
