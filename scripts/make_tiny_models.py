"""Tiny random Llama checkpoints with golden outputs, made by Hugging Face Transformers, under tests/data/tiny.

    python scripts/make_tiny_models.py [--out tests/data/tiny]

Needs torch, transformers (5.24 or later) and tokenizers; nothing of jaxpaged, which these figures check. Three folders,
each a checkpoint as `save_pretrained` writes it:

- llama_gqa: float32, 4 query heads on 2 KV heads, head_dim other than hidden_size / heads, an untied head, and
  llama3 rope scaling that already bites within 70 tokens;
- llama_tied_sharded: float32, multi-head attention, a tied head, several safetensors files with an index, another rope
  theta, and a byte-level ChatML tokenizer beside it;
- llama_bf16: bfloat16 weights, 4 query heads on 1 KV head, a list of end-of-sequence ids, and config.json in the
  spelling of Transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`), as most published Llamas have it.

Beside each: golden.json (a random prompt of 70 tokens, 24 greedy tokens with log-probabilities and gaps) and
golden_logits.npy (float32 [70, vocab], the logits of every prompt position). The weights are spread wide, norms
included, so that no part of the model can be wrong without moving the logits. All goldens are computed in float32 from
the checkpoint as read back from its folder, and checked against a float64 pass. Reruns write identical files.
"""

import argparse
import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import check_generate, describe, float64_noise, greedy
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PROMPT_TOKENS = 70
NEW_TOKENS = 24
MIN_GAP = 1e-2
MAX_NOISE = 1e-4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# fmt: off
MERGES = [
    "Ġ t", "h e", "Ġt he", "i n", "r e", "o n", "a n", "e r", "Ġ a", "o u", "Ġ s", "e n", "Ġ w", "l l", "Ġ o",
    "s t", "in g", "n d", "Ġa nd", "Ġo f", "e s", "Ġt o", "u s", "us er", "a s", "s y", "sy st", "e m", "syst em",
]
# fmt: on
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLES = ["the user and the system", "In 2024,  17 hens", "café 東京 😀", "\n\tx = [1, 2]  # of", "<|im_start|>user\n"]


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: its folder, its seed, the width of its weights and its config."""

    name: str
    seed: int
    weight_std: float
    head_std: float
    dtype: torch.dtype
    config: dict[str, Any]
    shard_size: str = "10MB"
    transformers_4_config: bool = False
    tokenizer: bool = False


COMMON: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
TINY = [
    Tiny(
        name="llama_gqa",
        seed=0,
        weight_std=0.2,
        head_std=0.3,
        dtype=torch.float32,
        config=COMMON
        | {
            "vocab_size": 160,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    Tiny(
        name="llama_tied_sharded",
        seed=8,
        weight_std=0.2,
        head_std=0.3,
        dtype=torch.float32,
        config=COMMON
        | {
            "vocab_size": 288,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2500.0},
        },
        shard_size="60KB",
        tokenizer=True,
    ),
    Tiny(
        name="llama_bf16",
        seed=3,
        weight_std=0.2,
        head_std=0.3,
        dtype=torch.bfloat16,
        config=COMMON
        | {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": [2, 3],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        transformers_4_config=True,
    ),
]


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level ChatML tokenizer of 288 ids: three special tokens, the 256 bytes, some merges of English."""
    vocab = {token: index for index, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocab |= {left + right: len(vocab) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def spread_weights(model: transformers.PreTrainedModel, tiny: Tiny) -> None:
    """Fills every parameter, in the order of their names, from the seed: matrices normal, norms uniform in [0.5, 2]."""
    generator = torch.Generator().manual_seed(tiny.seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 2.0, generator=generator)
        else:
            std = tiny.head_std if "embed" in name or "lm_head" in name else tiny.weight_std
            parameter.normal_(0.0, std, generator=generator)


def use_transformers_4_config(folder: Path) -> None:
    """Rewrites config.json in the spelling of Transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_tokenizer(folder: Path) -> dict[str, Any]:
    """Writes the tokenizer into the folder; returns what it makes of SAMPLES and of a chat."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that Transformers 4 knows as well
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the end?"}]
    return {
        "samples": [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in SAMPLES],
        "chat": {
            "messages": messages,
            "text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
        },
    }


def save_checkpoint(tiny: Tiny, folder: Path) -> None:
    """Writes config and weights into the folder."""
    special_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(special_ids | tiny.config)))
    spread_weights(model, tiny)
    model.to(tiny.dtype).save_pretrained(folder, max_shard_size=tiny.shard_size)
    if tiny.transformers_4_config:
        use_transformers_4_config(folder)


def make_goldens(tiny: Tiny, folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """golden.json and the prompt's logits. Raises RuntimeError where a golden would not be stable."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stops = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # so that `generate` doesn't stop there either
    generator = torch.Generator().manual_seed(tiny.seed + 1000)
    vocab = model.config.vocab_size
    prompt_ids = torch.randint(len(SPECIAL) + 1, vocab, (PROMPT_TOKENS,), generator=generator).tolist()
    tokens, logits = greedy(model, prompt_ids, NEW_TOKENS)
    check_generate(model, prompt_ids, tokens)
    noise = float64_noise(copy.deepcopy(model).double(), prompt_ids + tokens, logits, NEW_TOKENS)
    golden = describe(tokens, logits[PROMPT_TOKENS - 1 :])
    stopped = [token for token in tokens if token in np.atleast_1d(stops)]
    report = (
        f"{tiny.name}: smallest gap {golden['min_gap']}, noise {noise:.1e}, logits' deviation {logits.std():.2f}, "
        f"{len(set(tokens))} different tokens, stops {stopped}"
    )
    print(report)
    if golden["min_gap"] < MIN_GAP or noise > MAX_NOISE or stopped or len(set(tokens)) < NEW_TOKENS // 2:
        raise RuntimeError(f"{report}: not a good golden, choose another seed")
    header = {
        "versions": {module.__name__: module.__version__ for module in (torch, transformers)},
        "command": "python scripts/make_tiny_models.py",
        "seed": tiny.seed,
        "dtype": "float32",
    }
    return {"header": header, "prompt_ids": prompt_ids} | golden, logits[:PROMPT_TOKENS].numpy()


def make(tiny: Tiny, out: Path) -> None:
    """One folder, made anew."""
    folder = out / tiny.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_checkpoint(tiny, folder)
    golden, logits = make_goldens(tiny, folder)
    if tiny.tokenizer:
        golden["tokenizer"] = save_tokenizer(folder)
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")
    np.save(folder / "golden_logits.npy", logits)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tiny random Llama checkpoints with golden outputs.")
    parser.add_argument("--out", type=Path, default=Path("tests/data/tiny"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fixed number: the order of sums, and so the last digits, depends on it
    for tiny in TINY:
        make(tiny, arguments.out)


if __name__ == "__main__":
    main()
