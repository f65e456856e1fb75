"""Golden beams of Hugging Face Transformers for SmolLM2-135M-Instruct, as tests/data/goldens_beams.json.

    python scripts/make_beam_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf [--out tests/data/goldens_beams.json]

Needs what `make_goldens.py` needs, and nothing of jaxpaged, which these figures check. For each prompt below and each
of RUNS: the four sequences that `generate(num_beams=4, num_return_sequences=4)` returns, best first, with their scores
and the sums of their log-probabilities, in float32 on the CPU. A sequence ends with its end-of-sequence token if it has
one; equal sequences of a prompt are stored once, and named by their index.

What the file promises, and this script checks before writing it: float64 gives the same sequences in the same order,
with scores within MAX_NOISE; no choice that decides which beams live on was nearer than MIN_GAP; with an
end-of-sequence token, some sequences end with it and others do not, and not all length penalties give the same ones.
"""

import copy
import hashlib
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import tokenizers
import torch
import transformers
from make_goldens import build_tokenizer, encode, load, user, write

NUM_BEAMS = 4
NEW_TOKENS = 20
MIN_GAP = 3e-4
MAX_NOISE = 1e-4
EOS = 2  # <|im_end|>


class Run(NamedTuple):
    """How one golden is generated."""

    ignore_eos: bool
    length_penalty: float
    early_stopping: bool | str


RUNS = [
    *(Run(ignore_eos, penalty, False) for ignore_eos in (False, True) for penalty in (0.6, 1.0, 2.0)),
    Run(False, 1.0, True),
    Run(False, 1.0, "never"),
]

PROMPTS: list[dict[str, Any]] = [
    {"name": "capital", "messages": [user("What is the capital of France?")]},
    {"name": "hi", "messages": [user("Hi")]},
    {"name": "fire", "messages": [user("Is fire hot? Reply with yes or no only.")]},
    {"name": "colours", "messages": [user("Name one colour of the rainbow.")]},
    {"name": "banana", "messages": [user("Repeat after me: banana")]},
    {"name": "opposite", "messages": [user("What is the opposite of hot?")]},
    {"name": "story", "text": "Once upon a time, in a village at the edge of the forest,"},
    {"name": "one_token", "text": "Hello"},
    {"name": "code", "text": "def add(a, b):"},
]


class Gaps:
    """Watches a model's beam search: how near the nearest choice was that decides which beams live on."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.smallest = float("inf")
        self._choose = model._get_running_beams_for_next_iteration
        model._get_running_beams_for_next_iteration = self._watch

    def _watch(self, *, topk_log_probs: torch.Tensor, next_token_hits_stopping_criteria: torch.Tensor, **rest: Any):
        scores, ended = topk_log_probs[0], next_token_hits_stopping_criteria[0]
        alive = scores[~ended]
        if len(alive) > NUM_BEAMS:
            self._note(alive[NUM_BEAMS - 1] - alive[NUM_BEAMS])
        if ended[: NUM_BEAMS + 1].any():  # only what is among the best may end
            self._note(scores[NUM_BEAMS - 1] - scores[NUM_BEAMS])
        return self._choose(
            topk_log_probs=topk_log_probs, next_token_hits_stopping_criteria=next_token_hits_stopping_criteria, **rest
        )

    def _note(self, gap: torch.Tensor) -> None:
        self.smallest = min(self.smallest, float(gap))


@torch.inference_mode()
def search(model: transformers.PreTrainedModel, prompt_ids: list[int], run: Run) -> list[dict[str, Any]]:
    """The beams of one prompt, best first: tokens, score and sum of log-probabilities."""
    prompt = torch.tensor([prompt_ids])
    config = transformers.GenerationConfig(
        do_sample=False,
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        max_new_tokens=NEW_TOKENS,
        length_penalty=run.length_penalty,
        early_stopping=run.early_stopping,
        eos_token_id=None if run.ignore_eos else EOS,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    beams = []
    for tokens, score, indices in zip(output.sequences, output.sequences_scores, output.beam_indices, strict=True):
        length = int((indices >= 0).sum())
        kept = tokens[len(prompt_ids) : len(prompt_ids) + length].tolist()
        total = float(score) * length**run.length_penalty
        beams.append({"tokens": kept, "score": float(score), "total": total})
    return beams


def golden(
    model: transformers.PreTrainedModel, double_model: transformers.PreTrainedModel, prompt_ids: list[int], run: Run
) -> list[dict[str, Any]]:
    """`search`, checked against float64. Raises RuntimeError if it would not be stable."""
    gaps = Gaps(model)
    beams = search(model, prompt_ids, run)
    del model._get_running_beams_for_next_iteration  # the class's own again
    exact = search(double_model, prompt_ids, run)
    noise = max(abs(a["score"] - b["score"]) for a, b in zip(beams, exact, strict=True))
    same = [b["tokens"] for b in beams] == [b["tokens"] for b in exact]
    apart = min(a["score"] - b["score"] for a, b in itertools.pairwise(beams))
    print(f"  {run}: gap {gaps.smallest:.1e}, scores apart {apart:.1e}, noise {noise:.1e}", file=sys.stderr)
    if not same or noise > MAX_NOISE or gaps.smallest < MIN_GAP or apart < MIN_GAP / 20:
        raise RuntimeError(f"{run} is not stable after {prompt_ids[:8]}…: choose another prompt")
    return beams


def make_entry(entry: dict[str, Any], runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One prompt's goldens, equal sequences stored once."""
    sequences: dict[tuple[int, ...], int] = {}
    listed = []
    for run, beams in zip(RUNS, runs, strict=True):
        indices = [sequences.setdefault(tuple(beam["tokens"]), len(sequences)) for beam in beams]
        scores, totals = ([round(beam[name], 5) for beam in beams] for name in ("score", "total"))
        listed.append({**run._asdict(), "sequences": indices, "scores": scores, "totals": totals})
    kept = {key: entry[key] for key in ("name", "prompt_ids")}
    return kept | {"sequences": [list(tokens) for tokens in sequences], "runs": listed}


def check_variety(entries: list[dict[str, Any]]) -> None:
    """Raises RuntimeError unless the end-of-sequence token, the penalty and early stopping each make a difference."""

    def chosen(entry: dict[str, Any], run: Run) -> list[int]:
        return entry["runs"][RUNS.index(run)]["sequences"]

    def num_apart(one: Run, other: Run) -> int:
        return sum(chosen(entry, one) != chosen(entry, other) for entry in entries)

    ends = [entry["sequences"][i][-1] == EOS for entry in entries for i in chosen(entry, Run(False, 1.0, False))]
    counts = {
        "ending": sum(ends),
        "cut off": len(ends) - sum(ends),
        "penalty 0.6 or 1.0": num_apart(Run(False, 0.6, False), Run(False, 1.0, False)),
        "penalty 1.0 or 2.0": num_apart(Run(False, 1.0, False), Run(False, 2.0, False)),
        "early stopping or not": num_apart(Run(False, 1.0, False), Run(False, 1.0, True)),
    }
    print(counts, file=sys.stderr)
    if not all(counts.values()):
        raise RuntimeError(f"{counts}: choose prompts where each makes a difference")


def make(path: Path) -> dict[str, Any]:
    """The whole golden document. Raises RuntimeError where a golden would not be stable."""
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    tokenizer = build_tokenizer(fields)
    model = load(path)
    double_model = copy.deepcopy(model).double()
    entries = []
    for prompt in PROMPTS:
        entry = encode(prompt, tokenizer)
        print(f"{entry['name']}: {len(entry['prompt_ids'])} tokens", file=sys.stderr)
        runs = [golden(model, double_model, entry["prompt_ids"], run) for run in RUNS]
        for beam in runs[1]:
            print(f"    {beam['score']:.4f} {tokenizer.decode(beam['tokens'])!r}", file=sys.stderr)
        entries.append(make_entry(entry, runs))
    check_variety(entries)
    header = {
        "command": f"python scripts/make_beam_goldens.py {path.name}",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "dtype": "float32",
        "num_beams": NUM_BEAMS,
        "new_tokens": NEW_TOKENS,
    }
    return {"header": header, "prompts": entries}


if __name__ == "__main__":
    write(make, "beams", "tests/data/goldens_beams.json")
