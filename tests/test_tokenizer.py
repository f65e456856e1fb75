"""The tokenizer that the engine sees: loading, encoding, chat templates, and one clear error for each misuse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxpaged.checkpoints import open_checkpoint
from jaxpaged.checkpoints.hf import import_transformers
from jaxpaged.tokenizer import Tokenizer

TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ extra }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclasses.dataclass
class Folder:
    """As much of a checkpoint reader as the tokenizer needs."""

    path: Path


def make_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return backend


def save(folder: Path, template: str | None) -> Tokenizer:
    fast = import_transformers().PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=make_backend(), bos_token="<bos>", eos_token="<eos>", chat_template=template)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return Tokenizer.from_checkpoint(Folder(folder))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return save(tmp_path, TEMPLATE)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hé <eos> 日")
    assert all(type(i) is int for i in ids)
    assert ids[0] == 256, "BOS as the tokenizer's own template says"
    assert ids.count(257) == 1, "special tokens in a prompt are recognised"
    assert tokenizer.decode(ids) == "hé  日"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hé <eos> 日"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([*ids, 10_000]) == "hé  日", "ids past the vocabulary decode to nothing"


def test_properties(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 258
    assert tokenizer.eos_token_id == 257
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.special_token_ids == {256, 257}


def test_spaces_before_punctuation_survive(tokenizer: Tokenizer) -> None:
    tokenizer.hf.clean_up_tokenization_spaces = True
    assert tokenizer.decode(tokenizer.encode("Hello , world !")) == "Hello , world !"


@pytest.mark.parametrize(("value", "message"), [(3, "found int"), (["a"], "found list"), ("a\ud800", "lone surrogate")])
def test_bad_prompts(tokenizer: Tokenizer, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"prompt.*{message}"):
        tokenizer.encode(value)


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    ids = tokenizer.apply_chat_template(messages)
    assert all(type(i) is int for i in ids)
    assert text_of(tokenizer, ids) == "<bos>[user]hi<eos>[assistant]ho<eos>[assistant]"
    assert ids.count(256) == 1, "BOS comes from the template alone"
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=False, extra="!")
    assert text_of(tokenizer, ids) == "<bos>[user]hi!<eos>"


def test_chat_agrees_with_hugging_face(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "日本 <eos>"}]
    expected = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a non-empty list"),
        ("hi", "messages must be a non-empty list"),
        ({"role": "user", "content": "x"}, "messages must be a non-empty list"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\]\['role'\] must be a string, found None"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]\['content'\] must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] must be a string, found 3"),
        ([{"role": "user", "content": "\ud800"}], "messages: lone surrogate"),
        ([{"role": "tool", "content": "x"}], "the chat template refuses them: no tools here"),
    ],
)
def test_malformed_messages(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(messages)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, None)
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="the model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=TEMPLATE)
    assert text_of(tokenizer, ids) == "<bos>[user]hi<eos>[assistant]"


def test_named_chat_templates(tokenizer: Tokenizer) -> None:
    tokenizer.hf.chat_template = {"default": TEMPLATE, "tool_use": "x"}
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text_of(tokenizer, ids) == "<bos>[user]hi<eos>[assistant]"


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no tokenizer \(none of tokenizer\.json"):
        Tokenizer.from_checkpoint(Folder(tmp_path))  # pyright: ignore[reportArgumentType]


def test_damaged_tokenizer(tmp_path: Path) -> None:
    save(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded") as error:
        Tokenizer.from_checkpoint(Folder(tmp_path))  # pyright: ignore[reportArgumentType]
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer=object is not backed by the tokenizers library"):
        Tokenizer(object())  # pyright: ignore[reportArgumentType]


def test_demo_model(demo_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(demo_path))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 👋"}])
    assert text_of(tokenizer, ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 👋<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_id == 2


def test_importing_is_quiet_and_loads_no_jax() -> None:
    code = (
        "import os, sys, jaxpaged.tokenizer, jaxpaged.detokenizer, jaxpaged.checkpoints\n"
        "from jaxpaged.checkpoints.hf import import_transformers\n"
        "assert 'transformers' not in sys.modules\n"
        "import_transformers().AutoTokenizer\n"
        "assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ\n"
        "assert 'jax' not in sys.modules\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
