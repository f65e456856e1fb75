"""Rebuilds a tokenizer from GGUF metadata with the `tokenizers` library.

GGUF stores vocabulary, merges or scores, and token types, but of the pre-tokenizer only a name; the patterns behind
the supported names are here. The result encodes like the Hugging Face tokenizer that the file was converted from.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxpaged.checkpoints.hf import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """Patterns applied one after another, each splitting what the one before left whole."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole is taken without merging."""

    add_bos: bool = False
    """What holds when the file does not say."""


_LLAMA3 = _PreTokenizer((_CL100K.replace("{DIGITS}", "{1,3}"),), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer((_CL100K.replace("{DIGITS}", ""),)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
}


class _Kind(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes, with its chat template.

    Control tokens become special tokens, user-defined ones added tokens; both are found in any text.

    Raises:
      ValueError: a key is missing or inconsistent, or the kind of tokenizer is not supported.
    """
    vocabulary = _Vocabulary.read(metadata, path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(vocabulary, metadata, path)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(vocabulary, metadata, path)
    else:
        raise ValueError(f"{path}: tokenizer.ggml.model {kind!r} is not supported; supported: 'gpt2', 'llama'")
    backend.add_tokens(vocabulary.added_tokens())
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    prefix = [bos] if bos and metadata.get("tokenizer.ggml.add_bos_token", add_bos) else []
    suffix = [eos] if eos and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A", *suffix],
        pair=[*prefix, "$A", *suffix, *prefix, "$B", *suffix],
        special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(prefix + suffix)],
    )
    names = {"bos_token": bos, "eos_token": eos}
    names |= {"unk_token": vocabulary.special("unknown"), "pad_token": vocabulary.special("padding")}
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in names.items() if token is not None},
    )


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id with their types, checked to be consistent."""

    path: Path
    metadata: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ValueError(f"{path}: metadata key 'tokenizer.ggml.tokens' is missing: the file holds no tokenizer")
        kinds = metadata.get("tokenizer.ggml.token_type") or [int(_Kind.NORMAL)] * len(tokens)
        if len(kinds) != len(tokens):
            raise ValueError(f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
            raise ValueError(f"{path}: tokenizer.ggml.tokens holds {twice!r} twice")
        return cls(path, metadata, tokens, kinds, ids)

    def of(self, *kinds: _Kind) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def special(self, role: str) -> str | None:
        """The token of `tokenizer.ggml.<role>_token_id`."""
        index = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise ValueError(f"{self.path}: tokenizer.ggml.{role}_token_id={index} is outside the vocabulary")
        return self.tokens[index]

    def added_tokens(self) -> list[AddedToken]:
        special = {*self.of(_Kind.CONTROL, _Kind.UNKNOWN), self.special("bos"), self.special("eos")}
        user_defined = set(self.of(_Kind.USER_DEFINED))
        return [
            AddedToken(token, special=token in special, normalized=False)
            for token in self.tokens
            if token and (token in special or token in user_defined)
        ]


def _byte_level_bpe(vocabulary: _Vocabulary, metadata: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        # What llama.cpp does; files from before this key existed are often split otherwise than the model expects.
        name = "default"
        warnings.warn(f"{path}: tokenizer.ggml.pre is missing; text is split as by {name!r}", stacklevel=4)
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(f"{path}: metadata key 'tokenizer.ggml.merges' is missing")
    # Byte-level tokens hold no space; the search starts at 1 as a merge's left side is never empty.
    splits = [merge.find(" ", 1) for merge in merges]
    pairs = [(merge[:at], merge[at + 1 :]) for merge, at in zip(merges, splits, strict=True)]
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: tokenizer.ggml.merges do not fit the vocabulary ({error})") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(vocabulary: _Vocabulary, metadata: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{path}: metadata key 'tokenizer.ggml.scores' must hold one number a token")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of(_Kind.BYTE)),
        )
    )
    to_mark, to_space = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        backend.normalizer = to_mark
        strip = []
    backend.decoder = decoders.Sequence([to_space, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a token from two others, best token first: SentencePiece merges by the result's score."""
    normal = set(vocabulary.of(_Kind.NORMAL))
    ranked = []
    for token in normal:
        score = scores[vocabulary.ids[token]]
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                ranked.append((-score, vocabulary.ids[token], -at, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
