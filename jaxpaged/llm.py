"""The in-process API: `LLM`, as vLLM's users know it."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from jaxpaged.beam_completion import BeamCompletion
from jaxpaged.build import build_engine
from jaxpaged.completion import Completion
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.outputs import BeamSearchOutput, CacheStats, RequestOutput, TextDelta
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.startup import StartupTimes

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model with a paged KV cache, ready to generate.

    Example:
      >>> llm = LLM(model="demo")
      >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """Loads the model, allocates the pool and compiles the steps.

        Args:
          model: a folder with config.json and safetensors, a .gguf file, "demo", or "random:" and the name of a shape
            (`jaxpaged.models.shapes`): random weights and no tokenizer, for measurements.
          **options: the fields of `jaxpaged.config.EngineConfig`: dtype, max_model_len, block_size,
            num_kv_blocks, kv_cache_memory_bytes, gpu_memory_utilization, max_num_seqs, max_num_batched_tokens,
            seed, max_logprobs, enable_prefix_caching, and others for measurements.

        Raises:
          ValueError: an option is unknown or out of range, or the checkpoint can't be loaded.
        """
        known = [f.name for f in dataclasses.fields(EngineConfig)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; LLM takes {', '.join(known)}")
        path = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.startup = StartupTimes()
        """How long the start took, phase by phase."""
        self.engine: Engine = build_engine(EngineConfig(model=path, **options), self.startup)
        self._request_ids = map(str, itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in their order.

        Args:
          prompts: one prompt (text, or token ids) or a list of them.
          sampling_params: one for all, or one a prompt; the defaults if None.
          use_tqdm: show a progress bar.
          cache_salt: share cached prefixes with requests of the same salt only: tenants stay apart. None: with all that
            have none.

        Raises:
          ValueError: a prompt or a parameter is out of range; then nothing is generated.
        """
        listed = _as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _per_prompt(given, len(listed), SamplingParams, "sampling_params")
        ids = [next(self._request_ids) for _ in listed]
        completions: list[Completion] = []
        try:
            for i, (prompt, p) in enumerate(zip(listed, params, strict=True)):
                completions.append(self._add(ids[i], prompt, p, i, cache_salt))
            for _ in self._run(completions, use_tqdm):
                pass
        finally:
            # Whatever interrupts the run (an error, Ctrl-C), no block stays taken.
            for request_id in ids:
                self.engine.abort_request(request_id)
        return [completion.output() for completion in completions]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the likeliest continuations of every prompt and returns them in the order of the prompts.

        The rules, and so sequences and scores, are those of Transformers' `generate(num_beams=...)`; see
        `jaxpaged.beams`. The beams of a prompt are sequences of the engine's batches that share their KV blocks up to
        where they differ, and take `beam_width` of the `max_num_seqs` places. The first search of a width compiles what
        finds its candidates.

        Args:
          prompts: as for `generate`.
          params: one for all, or one a prompt.
          use_tqdm: as for `generate`.
          cache_salt: as for `generate`.

        Raises:
          ValueError: a prompt or a parameter is out of range; then nothing is searched.
        """
        listed = _as_list(prompts)
        searches = _per_prompt(params, len(listed), BeamSearchParams, "params")
        ids = [next(self._request_ids) for _ in listed]
        completions: list[BeamCompletion] = []
        try:
            for i, (prompt, p) in enumerate(zip(listed, searches, strict=True)):
                with _naming_the_prompt(i):
                    completions.append(self.engine.add_beam_search(ids[i], prompt, p, cache_salt))
            for _ in self._run(completions, use_tqdm):
                pass
        finally:
            for request_id in ids:
                self.engine.abort_request(request_id)
        return [completion.output() for completion in completions]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list, through the model's chat template.

        Args:
          messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
          sampling_params: as for `generate`.
          use_tqdm: as for `generate`.
          add_generation_prompt: end the prompt with the opening of an assistant's turn.
          chat_template_kwargs: passed on to the chat template.
          cache_salt: as for `generate`.

        Raises:
          ValueError: as for `generate`, or the model has no chat template, or it refuses the messages.
        """
        prompts = []
        for i, conversation in enumerate(_conversations(messages)):
            try:
                prompts.append(self.chat_prompt(conversation, add_generation_prompt, chat_template_kwargs))
            except ValueError as error:
                raise ValueError(f"conversation {i}: {error}") from error
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, cache_salt=cache_salt)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Generator[TextDelta, None, None]:
        """Continues one prompt and yields its text as it becomes final; closing the iterator ends the request.

        A piece is a string with an `index`: that of the completion which it continues, where `SamplingParams.n` asks
        for several.

        The request begins, and its errors come, with the first piece. `cache_salt` is as for `generate`.

        Raises:
          ValueError: as for `generate`.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request_id = next(self._request_ids)
        try:
            completion = self._add(request_id, prompt, params, 0, cache_salt)
            for _ in self._run([completion], use_tqdm=False):
                yield from _new_text(completion)
            yield from _new_text(completion)  # it ended while somebody else was stepping the engine
        finally:
            self.engine.abort_request(request_id)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, as `chat` makes them."""
        options = chat_template_kwargs or {}
        return self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt, **options)

    def cache_stats(self) -> CacheStats:
        """The KV pool now and since the start."""
        return self.engine.cache_stats()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, so that the next prompts are computed from their first token on."""
        self.engine.reset_prefix_cache()

    def _add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, index: int, cache_salt: str | None
    ) -> Completion:
        with _naming_the_prompt(index):
            return self.engine.add_request(request_id, prompt, params, cache_salt)

    def _run(self, completions: Sequence[Completion | BeamCompletion], use_tqdm: bool) -> Iterator[None]:
        """Steps until the completions have ended, a yield each."""
        with _Progress(len(completions), disable=not use_tqdm) as progress:
            while not all(c.request_finished for c in completions):
                advanced = self.engine.step()
                progress.update(advanced, self.engine)
                yield
        if any(c.finish_reason == "abort" for first in completions for c in first.all):
            raise RuntimeError("the request was aborted: a step failed or was interrupted in another call; ask again")


class _Progress:
    """Requests done, tokens a second, and KV blocks in use, in a bar."""

    def __init__(self, num_requests: int, *, disable: bool) -> None:
        self._bar = tqdm(
            total=num_requests,
            desc="Requests",
            unit="req",
            dynamic_ncols=True,
            miniters=0,  # draw though no request has finished: the rate and the blocks move on
            disable=disable,
        )
        self._num_tokens = 0
        self._start = time.perf_counter()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, advanced: Iterable[Completion | BeamCompletion], engine: Engine) -> None:
        if self._bar.disable:
            return
        ended = set()
        for completion in advanced:
            self._num_tokens += 1
            if completion.finish_reason is not None:
                ended.add(completion.sequence.request.request_id)
        finished = sum(not engine.is_running(request_id) for request_id in ended)
        rate = self._num_tokens / (time.perf_counter() - self._start)
        blocks = engine.scheduler.blocks
        used = f"{blocks.num_used}/{blocks.pool.num_blocks}"
        self._bar.set_postfix_str(f"{rate:.0f} tok/s, KV blocks {used}", refresh=False)
        self._bar.update(finished)  # draws at most ten times a second


def _new_text(first: Completion) -> Iterator[TextDelta]:
    """What each of a request's completions has grown by since the last call."""
    for completion in first.all:
        if text := completion.take_text():
            yield TextDelta(text, completion.sequence.index)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={prompts!r:.80} must be text, token ids, or a list of either")
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise ValueError(f"prompts[{i}]={prompt!r:.80} must be text or token ids")
    return list(prompts)


def _conversations(messages: Any) -> Sequence[Any]:
    """One conversation or many, as a list; what is neither is left for the tokenizer to refuse."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return [messages]
    return [messages] if not messages or isinstance(messages[0], Mapping) else messages


def _per_prompt[P](params: P | Sequence[P], num_prompts: int, kind: type[P], name: str) -> list[P]:
    if isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, kind) for p in params):
        raise ValueError(f"{name}={params!r:.80} must be a {kind.__name__}, or a list of them")
    if len(params) != num_prompts:
        raise ValueError(f"{name} has {len(params)} entries for {num_prompts} prompts; give one, or one each")
    return list(params)


@contextmanager
def _naming_the_prompt(index: int) -> Iterator[None]:
    """Says in a ValueError which prompt it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error
