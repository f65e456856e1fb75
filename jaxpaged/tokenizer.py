"""Text to token ids and back, with chat templates: the only tokenizer the engine knows.

Wraps a fast Hugging Face tokenizer, whether it came from a folder or was rebuilt from GGUF metadata. Decoding is
made concatenative: a run of byte tokens decodes byte by byte as UTF-8, so that text known to be complete never
changes when more tokens follow (`detokenizer` depends on that).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.checkpoints.hf import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxpaged.checkpoints.reader import CheckpointReader

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A fast Hugging Face tokenizer behind the few operations that serving needs."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        """ValueError if the tokenizer is not a fast one (backed by the `tokenizers` library)."""
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer={type(hf_tokenizer).__name__} is not backed by the tokenizers library; "
                "convert it to tokenizer.json"
            )
        self.hf = hf_tokenizer
        """The wrapped tokenizer, for what this class does not offer."""
        self._backend = backend
        self.special_token_ids = frozenset(i for i, token in hf_tokenizer.added_tokens_decoder.items() if token.special)
        """Ids that `decode` leaves out by default."""
        self._byte_of = _byte_tokens(backend)

    @classmethod
    def from_checkpoint(cls, reader: CheckpointReader) -> Tokenizer:
        """The tokenizer that lies in a checkpoint's folder, or in a GGUF file's metadata.

        Nothing is fetched and no code of the checkpoint is run. ValueError names the folder or file at fault.
        """
        from jaxpaged.checkpoints.gguf_reader import GGUFReader
        from jaxpaged.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        path = reader.path
        if isinstance(reader, GGUFReader):
            return cls(tokenizer_from_gguf(reader.metadata, path))
        if not any((path / name).exists() for name in _TOKENIZER_FILES):
            raise ValueError(f"{path}: there is no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
        try:
            return cls(_load_folder(path))
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path}: the tokenizer cannot be loaded: {reason}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's logits may be wider."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""
        token_id = self.hf.eos_token_id
        return token_id if isinstance(token_id, int) else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja template for `apply_chat_template`, if there is one; of several, the one named `default`."""
        template = self.hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with BOS or EOS where the tokenizer adds them (unless told not to).

        Special tokens written out in the text become their ids, as with Hugging Face. ValueError if `text` is not a
        string that UTF-8 can represent.
        """
        if not isinstance(text, str):
            raise ValueError(f"prompt must be a string, found {type(text).__name__}")
        _check_encodable(text, "prompt")
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation, rendered by the chat template.

        Args:
          messages: mappings with `role` and `content`, oldest first.
          add_generation_prompt: end with the opening of an assistant's turn.
          **kwargs: passed to the template (`tools`, `chat_template`, a model's own switches).

        Raises:
          ValueError: no chat template, malformed messages, or the template refuses them.
        """
        _check_messages(messages)
        if self.chat_template is None and kwargs.get("chat_template") is None:
            raise ValueError("the model has no chat template; use generate with a plain prompt, or pass chat_template")
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:  # a template is a program, and can fail in any way
            raise ValueError(f"messages: the chat template refuses them: {error}") from error
        assert isinstance(text, str)
        _check_encodable(text, "messages")
        # The template writes BOS and all other special tokens itself.
        return list(self.hf.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary decode to nothing."""
        if self._byte_of and any(i in self._byte_of for i in ids):
            return self._decode_with_bytes(ids, skip_special_tokens)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _decode_with_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        # The library's ByteFallback turns every byte of a run into U+FFFD if any one of them is invalid.
        tokens: list[str] = []
        run = bytearray()
        for i in ids:
            if skip_special_tokens and i in self.special_token_ids:
                continue
            if i in self._byte_of:
                run.append(self._byte_of[i])
                continue
            token = self._backend.id_to_token(i)
            if token is not None:
                _flush(run, tokens)
                tokens.append(token)
        _flush(run, tokens)
        return self._backend.decoder.decode(tokens)


def _flush(run: bytearray, tokens: list[str]) -> None:
    if run:
        tokens.append(run.decode("utf-8", errors="replace"))
        run.clear()


def _byte_tokens(backend: Any) -> dict[int, int]:
    """Ids of the tokens `<0x00>` to `<0xFF>` with their values, if the decoder gives them that meaning."""
    decoder = backend.decoder
    if decoder is None or "ByteFallback" not in _decoder_types(json.loads(decoder.__getstate__())):
        return {}
    names = [f"<0x{value:02X}>" for value in range(256)]
    found = {backend.token_to_id(name): value for value, name in enumerate(names)}
    found.pop(None, None)
    return found


def _decoder_types(state: dict[str, Any]) -> set[str]:
    return {state["type"]}.union(*(_decoder_types(part) for part in state.get("decoders", ())))


def _check_encodable(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{field}: lone surrogate {text[error.start]!r} is not valid text; remove it") from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list of mappings with 'role' and 'content'")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a mapping with 'role' and 'content', found {message!r:.80}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}]['role'] must be a string, found {message.get('role')!r:.80}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str | list):
            raise ValueError(f"messages[{index}]['content'] must be a string, found {content!r:.80}")


def _load_folder(path: Any) -> PreTrainedTokenizerFast:
    transformers = import_transformers()
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
