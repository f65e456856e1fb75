"""Golden outputs of Hugging Face Transformers for SmolLM2-135M-Instruct, as tests/data/goldens_smollm2.json.

    python scripts/make_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf [--out tests/data/goldens_smollm2.json]

Needs torch, transformers (5.24 or later), gguf, accelerate and tokenizers; nothing of jaxpaged, which these figures
check. For each prompt below: its token ids, 48 greedy tokens (the end-of-sequence token does not stop them), their
log-probabilities, the gap between the best and the second logit at each step, the five best alternatives at a few
steps, and for some prompts the log-probabilities of the prompt itself. All in float32 on the CPU.

What the file promises, and this script checks before writing it: the token-by-token loop agrees with
`model.generate`; a float64 pass over the whole sequence picks the same tokens, with log-probabilities within
MAX_NOISE; every gap is above MIN_GAP, so that a correct float32 implementation can't pick another token.
"""

import argparse
import copy
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

NEW_TOKENS = 48
MIN_GAP = 1e-2
MAX_NOISE = 1e-4
TOP = 5
GGUF_CONTROL_TOKEN = 3

LONG_TEXT = """The harbour of Lindesand lies at the end of a narrow fjord, and for three hundred years its people \
lived from what the cold water gave them. In spring the herring came in such numbers that boys could scoop them out \
with baskets; in autumn the cod followed, heavier and slower, and the whole village stood on the quay to gut, salt \
and pack. The barrels went south on sailing ships, and what came back was grain, iron, cloth, and now and then a \
schoolmaster who had been promised a warmer house than the one he got.

The first lighthouse was built in 1764, after the brig Concordia struck the outer rocks with forty people aboard. \
It burned coal, and two keepers carried every basket up a hundred and twelve steps. Their journal has survived. It \
records the weather, the ships that passed, the price of oil when oil replaced coal, and, in a smaller hand, the \
births of eleven children who grew up between the lamp and the sea. One of them, Marta, learned to reckon the tides \
from her father's tables and found two mistakes in them before she was fifteen. The admiralty thanked her with a \
letter addressed to "Mr. Marta Holm", which hangs in the museum today.

Steam changed the harbour more than any storm. A pier of granite replaced the wooden quay, a railway came down the \
valley, and ice from the lake was cut into blocks so that fresh fish could travel to the capital in a single night. \
For a time there was money for everything: a theatre with 300 seats, a band, a newspaper that appeared twice a week. \
Then the herring stayed away. Nobody knew why. Some blamed the trawlers, some the new drains, and the priest blamed \
the theatre. Within ten years half of the houses stood empty, and the newspaper printed mostly advertisements for \
passages to America.

What saved Lindesand was an accident. In 1931 a young engineer on his way elsewhere missed the evening train, took \
a room above the bakery, and noticed that the tide ran through the narrows with a force that he had never seen \
before. He stayed a week to measure it, then a month, then the rest of his life. The first turbine that he built \
turned for only nine days, but"""

# Whitespace before a digit tells the right pre-tokenizer (digits split off first) from plain byte-level BPE.
CODE = '''def moving_average(values, window=  4):
    """Return the means of all runs of `window` values."""
    if window < 1:
        raise ValueError(f"window must be positive, got {window}")
    total = sum(values[:window])
    means = [total /  window]
    for i in range(window, len(values)):
'''

TABLE = """year   harvest   price
1931     1204      3.50
1932      987      4.25
1933     1530      2.75
1934 """


def user(content: str) -> dict[str, str]:
    """A chat message of the user."""
    return {"role": "user", "content": content}


PROMPTS: list[dict[str, Any]] = [
    {"name": "chat_short", "messages": [user("What is the capital of France?")], "prompt_logprobs": True},
    {
        "name": "chat_turns",
        "messages": [
            {"role": "system", "content": "You are a patient gardener who answers in two sentences."},
            user("When should I plant tomatoes?"),
            {"role": "assistant", "content": "After the last frost, when nights stay above 10 degrees."},
            user("And how often do I water them?"),
        ],
    },
    {"name": "chat_emoji", "messages": [user("Translate to emoji, emoji only: I love pizza and the sun. 🍕❤️")]},
    {"name": "plain_story", "text": "Once upon a time, in a village at the edge of the forest,"},
    {"name": "length_1", "text": "Hello", "length": 1},
    {
        "name": "length_15",
        "text": "The old clockmaker opened the shop at seven, and the first thing he",
        "length": 15,
    },
    {
        "name": "length_16",
        "text": "Rain fell on the station roof while the two travellers waited for the other to arrive",
        "length": 16,
    },
    {
        "name": "length_17",
        "text": "My grandmother kept bees behind the house, and every summer morning she walked down to them",
        "length": 17,
    },
    {
        "name": "length_33",
        "text": "The committee met on Tuesday to discuss the budget, the repair of the old roof, and the question "
        "of who should speak at the opening of the new public library.",
        "length": 33,
        "prompt_logprobs": True,
    },
    {"name": "long", "text": LONG_TEXT},
    {"name": "code", "text": CODE},
    {"name": "table", "text": TABLE},
    {"name": "cjk", "text": "日本の首都は東京です。中国的首都是北京。대한민국의 수도는"},
    {
        "name": "accents",
        "text": "Le café « Zoë » à Besançon ouvre dès 7 h ; Ærøskøbing, Łódź et São Paulo 🌍👩‍🚀: naïve",
    },
    # Ids that no tokenizer would give: control tokens, pieces that merge, the last id, half of a character.
    {"name": "ids", "ids": [1, 2, 0, 56, 288, 56, 288, 49151, 200, 201, 16, 3, 1000, 20000, 30000, 40000, 7, 7, 7]},
]


def build_tokenizer(fields: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from GGUF metadata.

    Built by hand because Transformers 5.24 converts this one without the `Digits` pre-tokenizer: whitespace of two
    characters or more before a digit then gives other tokens.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=fields["tokenizer.chat_template"], clean_up_tokenization_spaces=False
    )


def encode(prompt: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, Any]:
    """The entry of one prompt up to its token ids."""
    if "ids" in prompt:
        return {"name": prompt["name"], "kind": "ids", "prompt_ids": prompt["ids"]}
    if "messages" in prompt:
        messages = prompt["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        entry = {"name": prompt["name"], "kind": "chat", "messages": messages, "text": text}
    else:
        text = prompt["text"]
        entry = {"name": prompt["name"], "kind": "plain", "text": text}
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != prompt.get("length", len(ids)):
        raise ValueError(
            f"prompt {prompt['name']} has {len(ids)} tokens, must have {prompt['length']}: change its text"
        )
    if tokenizer.decode(ids) != text:
        raise ValueError(f"prompt {prompt['name']} does not survive tokenisation: change its text")
    return entry | {"prompt_ids": ids}


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt_ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens after the prompt, and the logits of every position fed, prompt included.

    The prompt in one pass, then one token a step with a KV cache. Returns the tokens and float32 logits
    [prompt + count - 1, vocab].
    """
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    feed, cache = prompt_ids, None
    for _ in range(count):
        output = model(input_ids=torch.tensor([feed]), cache=cache, use_cache=True)
        rows.append(output.logits[0])
        tokens.append(int(output.logits[0, -1].argmax()))
        feed, cache = tokens[-1:], output.cache
    return tokens, torch.cat(rows)


@torch.inference_mode()
def check_generate(model: transformers.PreTrainedModel, prompt_ids: list[int], tokens: list[int]) -> None:
    """Raises RuntimeError unless `model.generate` gives these tokens too."""
    prompt = torch.tensor([prompt_ids])
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=len(tokens))
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    if generated[0, len(prompt_ids) :].tolist() != tokens:
        raise RuntimeError(f"model.generate gives other tokens after {prompt_ids[:8]}… than the token-by-token loop")


@torch.inference_mode()
def float64_noise(
    double_model: transformers.PreTrainedModel, ids: list[int], logits: torch.Tensor, steps: int
) -> float:
    """How far float32 log-probabilities are from a float64 pass over the whole sequence, at the likely tokens.

    The largest difference over the ten best tokens of each position of `logits` [positions, vocab], which belong to
    the first ids. Raises RuntimeError if float64 prefers another token anywhere in the last `steps` positions.
    Norms and rope angles stay in float32, as Transformers' Llama has them.
    """
    exact = double_model(input_ids=torch.tensor([ids[: len(logits)]])).logits[0].log_softmax(-1)
    if not torch.equal(exact[-steps:].argmax(-1), logits[-steps:].argmax(-1)):
        raise RuntimeError(f"float64 prefers other tokens after {ids[:8]}… than float32: choose another prompt")
    likely = exact.topk(10).indices
    return float((exact.gather(-1, likely) - logits.double().log_softmax(-1).gather(-1, likely)).abs().max())


def rounded(values: torch.Tensor) -> list[float]:
    """Five decimals, as a list."""
    return [round(value, 5) for value in values.tolist()]


def describe(tokens: list[int], logits: torch.Tensor) -> dict[str, Any]:
    """Tokens, their log-probabilities and the gap of each step, from the logits [steps, vocab] of these steps."""
    logprobs = logits.double().log_softmax(-1)
    best = logits.topk(2).values
    gaps = rounded(best[:, 0] - best[:, 1])
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return {"tokens": tokens, "logprobs": rounded(chosen), "gaps": gaps, "min_gap": min(gaps)}


def top_alternatives(logits: torch.Tensor) -> list[dict[str, Any]]:
    """The TOP best tokens at up to five steps, spread out, whose ranks can't swap through rounding."""
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(TOP + 1)
    apart = (best.values[:, :-1] - best.values[:, 1:]).amin(-1) > 2 * MIN_GAP
    steps = apart.nonzero()[:, 0].tolist()
    stride = max(1, -(-len(steps) // 5))
    return [
        {"step": step, "ids": best.indices[step, :TOP].tolist(), "logprobs": rounded(best.values[step, :TOP])}
        for step in steps[::stride]
    ]


def prompt_logprobs(prompt_ids: list[int], logits: torch.Tensor) -> list[float | None]:
    """log p(token | those before it) of each prompt token; None for the first, which has none before it."""
    logprobs = logits[: len(prompt_ids) - 1].double().log_softmax(-1)
    return [None, *rounded(logprobs.gather(-1, torch.tensor(prompt_ids[1:])[:, None])[:, 0])]


def load(path: Path) -> transformers.PreTrainedModel:
    """The model of the GGUF file in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None  # so that `generate` doesn't stop there either
    return model.eval()


def make(path: Path) -> dict[str, Any]:
    """The whole golden document. Raises RuntimeError where a golden would not be stable."""
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    tokenizer = build_tokenizer(fields)
    model = load(path)
    double_model = copy.deepcopy(model).double()
    entries = []
    for prompt in PROMPTS:
        entry = encode(prompt, tokenizer)
        prompt_ids = entry["prompt_ids"]
        tokens, logits = greedy(model, prompt_ids, NEW_TOKENS)
        check_generate(model, prompt_ids, tokens)
        noise = float64_noise(double_model, prompt_ids + tokens, logits, NEW_TOKENS)
        steps = logits[len(prompt_ids) - 1 :]
        entry |= describe(tokens, steps) | {"top": top_alternatives(steps)}
        entry["output_text"] = tokenizer.decode(tokens)
        if prompt.get("prompt_logprobs"):
            entry["prompt_logprobs"] = prompt_logprobs(prompt_ids, logits)
        report = f"{entry['name']}: {len(prompt_ids)} tokens, smallest gap {entry['min_gap']}, noise {noise:.1e}"
        print(report, repr(entry["output_text"]), sep="\n  ", file=sys.stderr)
        if entry["min_gap"] < MIN_GAP or noise > MAX_NOISE:
            raise RuntimeError(f"{report}: not stable, choose another prompt")
        entries.append(entry)
    header = {
        "command": f"python scripts/make_goldens.py {path.name}",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "dtype": "float32",
        "attention": "eager",
        "new_tokens": NEW_TOKENS,
        "min_gap": min(entry["min_gap"] for entry in entries),
    }
    return {"header": header, "prompts": entries}


def write(make: Callable[[Path], dict[str, Any]], what: str, out: str) -> None:
    """The command line: makes a document of a GGUF file and writes it, a prompt a line."""
    parser = argparse.ArgumentParser(description=f"Write golden {what} of Transformers for SmolLM2-135M-Instruct.")
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=Path(out))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fixed number: the order of sums, and so the last digits, depends on it
    document = make(arguments.gguf)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in document["prompts"])
    header = json.dumps(document["header"], separators=(",", ":"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(f'{{"header":{header},\n"prompts":[\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    write(make, "outputs", "tests/data/goldens_smollm2.json")
