"""GGUF tokenizers against independent statements of the same algorithms, on text that tells pre-tokenizers apart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpaged.checkpoints.gguf_file import GGUFFile
from jaxpaged.checkpoints.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "",
    "Hello, world!  I'm here; they'LL see we've 12345 apples and 3.14159 pies.",
    "def f(x):\n    return x**2  # comment\r\n\n\n\tif x >= 10_000:\n\t\tpass\n   ",
    "   leading,   many     spaces   and trailing    ",
    "日本語の文章と中文文字、한국어 텍스트。١٢٣ ²³ Ⅷ",
    "👩‍👩‍👧 🇫🇷 e\u0301 n\u0303 naïve Ünïcödé \u200b\u00a0nbsp\u3000ideographic",
    "a$b+c<d=e>f^g~h|i`j'k\"l (m) [n] {o} — “p” …",
    "\n\n \n  \r\n\t x\u2028y",
]
# As llama.cpp lists them: applied one after another, each to what the ones before left unmatched and matched alike.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
APOSTROPHES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama-bpe": [APOSTROPHES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "qwen2": [APOSTROPHES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST],
}


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(plain))
    return table


def split(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        smaller = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                smaller += [piece[at : match.start()], match[0]]
                at = match.end()
            smaller.append(piece[at:])
        pieces = [piece for piece in smaller if piece]
    return pieces


def merge(piece: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    parts = list(piece)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, 1 << 30), i) for i, pair in enumerate(itertools.pairwise(parts)))
        if rank == 1 << 30:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def reference_encode(text: str, metadata: dict[str, Any]) -> list[int]:
    pre = metadata["tokenizer.ggml.pre"]
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    alphabet = byte_alphabet()
    found = []
    for piece in split(text, PATTERNS[pre]):
        mapped = "".join(alphabet[b] for b in piece.encode())
        whole = pre == "llama-bpe" and mapped in ids
        found += [mapped] if whole else merge(mapped, ranks)
    return [ids[token] for token in found]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Metadata of a small byte-level BPE trained without a pre-tokenizer: its merges cross every boundary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=sorted(byte_alphabet().values()),
        special_tokens=["<s>", "</s>", "<|x|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text[i:] for text in TEXTS for i in range(0, len(text), 2)], trainer)
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<user>"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_byte_level_against_reference(trained: dict[str, Any], pre: str) -> None:
    metadata = trained | {"tokenizer.ggml.pre": pre}
    tokenizer = tokenizer_from_gguf(metadata, Path("x.gguf"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference_encode(text, metadata), text
        assert tokenizer.decode(ids) == text


def test_pre_tokenizers_differ(trained: dict[str, Any]) -> None:
    # Otherwise the test above could not tell a wrong pattern.
    encoded = {
        pre: tuple(i for text in TEXTS for i in reference_encode(text, trained | {"tokenizer.ggml.pre": pre}))
        for pre in PATTERNS
    }
    assert len(set(encoded.values())) == len(PATTERNS)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40), st.sampled_from(sorted(PATTERNS)))
def test_byte_level_on_any_text(trained: dict[str, Any], text: str, pre: str) -> None:
    metadata = trained | {"tokenizer.ggml.pre": pre}
    tokenizer = _cached(metadata)
    if any(special in text for special in ("<s>", "</s>", "<|x|>", "<user>")):
        return
    if regex.search(r"[\p{Cn}\p{Co}]", text):
        return  # unassigned code points: Unicode versions differ between the two regex libraries
    assert tokenizer.encode(text) == reference_encode(text, metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


_CACHE: dict[str, Any] = {}


def _cached(metadata: dict[str, Any]) -> Any:
    pre = metadata["tokenizer.ggml.pre"]
    return _CACHE.setdefault(pre, _CACHE.get(pre) or tokenizer_from_gguf(metadata, Path("x.gguf")))


def test_demo_model_against_reference(demo_path: Path) -> None:
    metadata = GGUFFile(demo_path).metadata
    tokenizer = tokenizer_from_gguf(metadata, demo_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference_encode(text, metadata), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == "<|im_end|>"
    # Known ids of SmolLM2's own tokenizer.
    assert tokenizer.encode("Hello, we can use") == [19556, 28, 392, 416, 722]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"tokenizer.ggml.add_bos_token": True}, [0]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [0, 1]),
        ({"tokenizer.ggml.add_eos_token": True}, [1]),
    ],
)
def test_bos_and_eos(trained: dict[str, Any], keys: dict[str, Any], expected: list[int]) -> None:
    tokenizer = tokenizer_from_gguf(trained | {"tokenizer.ggml.pre": "gpt-2"} | keys, Path("x.gguf"))
    assert tokenizer.encode("") == expected
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("gpt-2", False)])
def test_bos_where_the_file_does_not_say(trained: dict[str, Any], pre: str, adds: bool) -> None:
    metadata = {k: v for k, v in trained.items() if k != "tokenizer.ggml.add_bos_token"}
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": pre}, Path("x.gguf"))
    assert (tokenizer.encode("")[:1] == [0]) is adds


def test_special_and_added_tokens(trained: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(trained | {"tokenizer.ggml.pre": "gpt-2"}, Path("x.gguf"))
    user = len(trained["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode("<|x|><user></s>")
    assert ids == [2, user, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<user>"
    assert len(tokenizer) == user + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported; supported: default, gpt-2"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ["a zzzz"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for"),
        ({"tokenizer.ggml.bos_token_id": 1 << 20}, "bos_token_id=1048576 is outside the vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, "'tokenizer.ggml.scores' must hold one number a token"),
    ],
)
def test_unsupported_or_inconsistent(trained: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_from_gguf(trained | {"tokenizer.ggml.pre": "gpt-2"} | changes, Path("some.gguf"))
    assert str(error.value).startswith("some.gguf: ")


def test_missing_pre_tokenizer_is_said(trained: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"x\.gguf: tokenizer\.ggml\.pre is missing; text is split as by 'default'"):
        tokenizer = tokenizer_from_gguf(trained, Path("x.gguf"))
    assert tokenizer.encode(TEXTS[6]) == reference_encode(TEXTS[6], trained | {"tokenizer.ggml.pre": "default"})


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("gpt-2", 4)])
def test_a_whole_token_without_merges(trained: dict[str, Any], pre: str, count: int) -> None:
    # Llama 3 takes a piece that is a token as it is, though no merges lead to it.
    metadata = trained | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*trained["tokenizer.ggml.tokens"], "qqqq"],
        "tokenizer.ggml.token_type": [*trained["tokenizer.ggml.token_type"], 1],
    }
    ids = tokenizer_from_gguf(metadata, Path("x.gguf")).encode("qqqq")
    assert len(ids) == count
    assert ids == reference_encode("qqqq", metadata)


def test_duplicate_token(trained: dict[str, Any]) -> None:
    tokens = [*trained["tokenizer.ggml.tokens"][:-1], "<s>"]
    with pytest.raises(ValueError, match="holds '<s>' twice"):
        tokenizer_from_gguf(trained | {"tokenizer.ggml.tokens": tokens}, Path("x.gguf"))


def sentencepiece_metadata() -> dict[str, Any]:
    words = [
        "▁the",
        "▁th",
        "he",
        "th",
        "▁t",
        "▁a",
        "▁an",
        "and",
        "▁and",
        "nd",
        "▁he",
        "ll",
        "llo",
        "▁hello",
        "▁▁",
        "▁▁▁▁",
        "in",
        "ing",
        "▁x",
        "é",
        "日本",
        "er",
        "▁w",
        "or",
        "ld",
        "▁world",
    ]
    letters = sorted({letter for word in words for letter in word} - set(words))
    special, byte = ["<unk>", "<s>", "</s>", "[INST]"], [f"<0x{b:02X}>" for b in range(256)]
    tokens = [*special, *byte, *words, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(i) for i in range(len(words) + len(letters))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_encode(text: str, metadata: dict[str, Any], prefix: bool) -> list[int]:
    """SentencePiece's BPE: join the neighbours whose union scores best, leftmost first; bytes for the rest."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = {t: metadata["tokenizer.ggml.scores"][i] for t, i in ids.items() if i >= 260}
    marked = text.replace(" ", "▁")
    parts = list("▁" + marked if prefix and marked else marked)
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = [1]
    for part in parts:
        found += [ids[part]] if part in scores else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_against_reference(prefix: bool) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = tokenizer_from_gguf(metadata, Path("x.gguf"))
    texts = ["the hello and", "  the    world", "日本 日 hélló Ω 👩‍👩‍👧", "another thing\nthe\tend", "x", " ", ""]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == sentencepiece_encode(text, metadata, prefix), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_added_tokens() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), Path("x.gguf"))
    ids = tokenizer.encode("[INST]</s>", add_special_tokens=False)
    assert ids == [3, 2]
    assert tokenizer.unk_token == "<unk>"


def test_decoders_are_what_detokenisation_expects() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), Path("x.gguf"))
    assert isinstance(tokenizer.backend_tokenizer.decoder, decoders.Sequence)
    assert b"ByteFallback" in tokenizer.backend_tokenizer.decoder.__getstate__()
