"""Incremental detokenisation equals whole decoding, in context, for any ids; stop strings do not leak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxpaged.checkpoints.hf import import_transformers
from jaxpaged.detokenizer import IncrementalDetokenizer, StopStringMatcher, token_texts
from jaxpaged.tokenizer import Tokenizer

TEXTS = [
    "Plain text, with numbers 123 and code: for (i = 0; i < n; ++i) {}\n",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇫🇷🇯🇵 and 👍🏽 thumbs",
    "日本語の文章、中文文字、한국어 텍스트",
    "e\u0301 combining n\u0303 a\u0308\u0301 \u0e19\u0e49\u0e33 हिन्दी",
    "\ufffd literal \ufffd\ufffd replacement \ufffd",
    "   spaces   and\t\ttabs \n\n",
]


def wrap(backend: Backend) -> Tokenizer:
    backend.add_tokens([AddedToken("<eos>", special=True), AddedToken("<user>", special=False)])
    fast = import_transformers().PreTrainedTokenizerFast
    return Tokenizer(fast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False))


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return wrap(backend)


def byte_fallback() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "é", "▁▁", "日", "�", "b", "ab"]
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "▁"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return wrap(backend)


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
names = st.sampled_from(sorted(TOKENIZERS))


def byte_ids(tokenizer: Tokenizer, stand_ins: str) -> list[int]:
    """Ids of single bytes, written as byte-level BPE's stand-ins."""
    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[letter] for letter in stand_ins]


def ids_of(tokenizer: Tokenizer, max_size: int) -> st.SearchStrategy[list[int]]:
    every = st.integers(0, tokenizer.vocab_size - 1)
    # Bytes of multi-byte characters, so that half characters are common.
    pieces = ["é", "日", "👩", "\ufffd", "\u200d", " ", "a"]
    broken = [i for piece in pieces for i in tokenizer.hf.encode(piece, add_special_tokens=False)]
    return st.lists(st.one_of(every, st.sampled_from(broken)), max_size=max_size)


def in_context(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode([*prompt, *output], skip)
    if whole.startswith(before):
        return whole[len(before) :]
    # Only an incomplete last character of the prompt may turn into something else.
    assert before.endswith("\ufffd")
    assert whole.startswith(before[:-1])
    return whole[len(before) - 1 :]


def assert_incremental(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    text = ""
    for count, token_id in enumerate(output, 1):
        text += detokenizer.push(token_id)
        so_far = in_context(tokenizer, prompt, output[:count], skip)
        assert text in (so_far, so_far.removesuffix("\ufffd")), "no more than one unfinished character is held"
    text += detokenizer.finish()
    assert text == in_context(tokenizer, prompt, output, skip)
    assert detokenizer.finish() == ""


@settings(deadline=None, max_examples=300)
@given(st.data(), names, st.booleans())
def test_any_ids(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = data.draw(ids_of(tokenizer, 12), label="prompt")
    output = data.draw(ids_of(tokenizer, 40), label="output")
    assert_incremental(tokenizer, prompt, output, skip)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("text", TEXTS)
def test_multi_byte_texts_cut_anywhere(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    for cut in range(0, len(ids), max(1, len(ids) // 12)):
        assert_incremental(tokenizer, ids[:cut], ids[cut:], True)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == text


def test_no_broken_character_is_ever_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    ids = byte_ids(tokenizer, "ðŁĳ©")  # the four bytes of 👩
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "👩"]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.push(i) for i in byte_ids(tokenizer, "ðŁ")] == ["", ""]
    assert detokenizer.finish() == "\ufffd"


def test_invalid_bytes_do_not_stall_the_stream() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    (invalid,) = byte_ids(tokenizer, "ÿ")
    pieces = [detokenizer.push(invalid) for _ in range(50)]
    assert pieces == ["", *["\ufffd"] * 49]
    assert len(detokenizer._window) < 20


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_byte_level_decoding_is_hugging_faces(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = data.draw(ids_of(tokenizer, 30))
    assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_decoding_of_valid_text_is_hugging_faces(text: str) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, skip_special_tokens=True) == text


def test_byte_fallback_keeps_valid_bytes_beside_invalid_ones() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [1 + b for b in b"\n\xc3\xa9\xff!"]
    assert tokenizer.decode(ids) == "\né\ufffd!"


def first_match(text: str, stops: Sequence[str]) -> str | None:
    """Reading letter by letter, the longest stop string that the text read so far ends with."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] + "|" + max(found, key=len)
    return None


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStringMatcher(stops, include)
    emitted, matched = "", None
    for piece in pieces:
        safe, matched = matcher.push(piece)
        emitted += safe
        if matched is None:
            assert all(stop not in emitted for stop in stops)
    emitted += matcher.finish()
    expected = first_match("".join(pieces), stops)
    if expected is None:
        assert (emitted, matched) == ("".join(pieces), None)
    else:
        read, _, stop = expected.rpartition("|")
        assert (emitted, matched) == (read if include else read[: -len(stop)], stop)


@settings(deadline=None, max_examples=200)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_held_without_need(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    emitted = ""
    for letter in text:
        safe, matched = matcher.push(letter)
        emitted += safe
        if matched is not None:
            return
    held = text[len(emitted) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_across_pieces() -> None:
    matcher = StopStringMatcher(["<end>", "STOP"])
    assert matcher.push("hello <e") == ("hello ", None)
    assert matcher.push("nd") == ("", None)
    assert matcher.push("> more") == ("", "<end>")
    assert matcher.push("dropped") == ("", "<end>")
    assert matcher.finish() == ""


def test_held_text_is_released() -> None:
    matcher = StopStringMatcher(["<end>"], include_stop=True)
    assert matcher.push("a<e") == ("a", None)
    assert matcher.push("x<") == ("<ex", None)
    assert matcher.finish() == "<"


@pytest.mark.parametrize("stops", ["abc", [""], [3]])
def test_bad_stop_strings(stops: object) -> None:
    with pytest.raises(ValueError, match="stop must be a list of non-empty strings"):
        StopStringMatcher(stops)  # pyright: ignore[reportArgumentType]


def test_passed_over_stops_do_not_count_and_begun_ones_do():
    matcher = StopStringMatcher(["b", "abc"])
    assert matcher.pass_over("xbab") == "xb"
    assert matcher.push("d") == ("abd", None)
    assert matcher.pass_over("ab") == ""
    assert matcher.push("c") == ("", "abc")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whole_characters_take_the_fast_path(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    last = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert token_texts(tokenizer).following(last) in ("a", " a")
