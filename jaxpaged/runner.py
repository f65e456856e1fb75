"""The device side of a step: sole owner of the parameters and of the pool.

`dispatch` sends a planned step to the device and returns at once; the `StepHandle` it gives is read later, when
the host has the next step planned. The pool passes from step to step by donation and is never copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import batch, logit_passes
from jaxpaged.batch import Bucket, Buckets
from jaxpaged.beam_candidates import Beams, PendingCandidates, start_search
from jaxpaged.executables import Executables, draws_of
from jaxpaged.kv_cache import KVCache
from jaxpaged.logit_edits import EditRequest, LogitEdits, collect_edits
from jaxpaged.sampler import Alternatives, Rating, SampleOutput
from jaxpaged.scheduler import Row, StepPlan
from jaxpaged.step_buffers import StepBuffers


class StepResult(NamedTuple):
    """A step's output on the host, numpy."""

    token_ids: np.ndarray  # [rows]
    rating: Rating  # of each sampled token
    alternatives: Alternatives | None
    """To each sampled token, if a row asks for them."""
    prompt: tuple[Rating, Alternatives] | None
    """Of each prompt token that follows a token of the step (as `prompt_targets`), if a row asks for them."""
    pending: Sequence[PendingCandidates] = ()
    """What `beam_candidates.read_candidates` reads the candidates of the plan's searches from."""


class StepHandle:
    """A step that runs on the device."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: SampleOutput,
        alternatives: Alternatives | None,
        prompt: tuple[Rating, Alternatives] | None,
        pending: list[PendingCandidates],
    ) -> None:
        self.plan = plan
        arrays = (sampled.token_ids, sampled.rating, alternatives, prompt, pending)
        self._arrays = StepResult(*arrays)  # pyright: ignore[reportArgumentType]
        for array in jax.tree.leaves(self._arrays):
            array.copy_to_host_async()

    def read(self) -> StepResult:
        """Waits for the step and gives its output."""
        return jax.device_get(self._arrays)


class Runner:
    """Runs planned steps."""

    def __init__(
        self,
        executables: Executables,
        params: Any,
        cache: KVCache,
        buckets: Buckets,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Nothing compiles from here on.

        Args:
          executables: the step, compiled for all buckets.
          params: the model's parameters, on the device.
          cache: the pool; the runner owns it from here on.
          buckets: the shapes of steps.
          eos_token_ids: what `min_tokens` holds back.
        """
        self._executables = executables
        self._functions = executables.functions
        self._params = params
        self._cache = cache
        self._buckets = buckets
        self._eos_token_ids = eos_token_ids
        f = self._functions
        self._buffers = StepBuffers(f.model, f.dtype, f.shape, f.max_rows, buckets)
        self.steps_by_bucket: Counter[Bucket] = Counter()
        """Steps dispatched so far in each padded shape."""
        self.tokens_by_bucket: Counter[Bucket] = Counter()
        """Tokens of those steps, padding left out."""
        self._vocab_size = self._functions.model.vocab_size

    def dispatch(self, plan: StepPlan, searches: Sequence[Beams] = ()) -> StepHandle:
        """Starts a step; the plans of all steps must be dispatched in the order in which they were made.

        Args: `searches` are the beams of each of the plan's searches.
        """
        bucket = self._buckets.fit(plan.num_tokens, len(plan.rows), plan.num_empty_rows)
        self.steps_by_bucket[bucket] += 1
        self.tokens_by_bucket[bucket] += plan.num_tokens
        if plan.copies:
            self._copy_blocks(plan.copies)
        packed = batch.pack(plan, bucket, self._functions.shape)
        draws = draws_of(batch.unpack(packed, bucket, self._functions.shape).sampling, self._vocab_size)
        buffers, executables = self._buffers, self._executables
        buffers.packed[bucket], sampling = executables.stage[bucket](jax.device_put(packed), buffers.packed[bucket])
        out = executables.forward[bucket](
            self._params,
            self._cache,
            buffers.packed[bucket],
            buffers.previous,
            buffers.hidden[bucket.tokens],
            buffers.logits[bucket.rows],
        )
        buffers.hidden[bucket.tokens], buffers.logits[bucket.rows], self._cache = out
        pending = start_search(out.logits, searches, len(self._eos_token_ids)) if searches else []
        edits = collect_edits(_edit_requests(plan, self._eos_token_ids), bucket.rows)
        edited = out.logits if edits is None else self._edit(out.logits, edits)
        buffers.previous, sampled = executables.sample[bucket.rows, draws](
            out.logits, edited, sampling, buffers.previous
        )
        wants_alternatives = any(row.samples and row.sequence.request.params.logprobs for row in plan.rows)
        alternatives = executables.alternatives[bucket.rows](out.logits) if wants_alternatives else None
        prompt = None
        if any(map(wants_prompt_logprobs, plan.rows)):
            targets = np.zeros(bucket.tokens, np.int32)
            targets[: plan.num_tokens] = np.concatenate([prompt_targets(row) for row in plan.rows])
            prompt = executables.prompt_logprobs[bucket.tokens](self._params, out.hidden, targets)
        return StepHandle(plan, sampled, alternatives, prompt, pending)

    def _edit(self, logits: jax.Array, edits: LogitEdits) -> jax.Array:
        return logit_passes.edit_logits(logits, edits, self._executables.edits[logits.shape[0]])

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Starts the copies of a step, which its rows read and write afterwards."""
        size = next(size for size in self._executables.copy_blocks if size >= len(copies))  # one a row at most
        pairs = np.zeros((2, size), np.int32)
        pairs[1] = self._cache[0].k.shape[0]  # padding goes past the pool
        pairs[:, : len(copies)] = np.transpose(copies)
        self._cache = self._executables.copy_blocks[size](self._cache, jax.device_put(pairs))

    def recover(self) -> None:
        """Makes pool and buffers usable after `dispatch` broke off, which may have given them away; the KV is lost."""
        self._buffers.replace_lost()
        if any(x.is_deleted() for x in jax.tree.leaves(self._cache)):
            self._cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._cache)

    @property
    def num_traces(self) -> int:
        """Traces of step functions so far: stands still after construction."""
        return sum(self._functions.traces.values())

    def addresses(self) -> list[int]:
        """Where the pool and the step buffers lie: the same before and after any step, as donation promises."""
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(self._cache)] + self._buffers.addresses()


def wants_prompt_logprobs(row: Row) -> bool:
    """Whether prompt tokens that follow this row's tokens must be rated."""
    sequence = row.sequence
    return sequence.wants_prompt_logprobs and row.start < sequence.num_prompt_tokens - 1


def prompt_targets(row: Row) -> np.ndarray:
    """The token that follows each of the row's tokens; 0 where it is no prompt token (its rating is not used)."""
    targets = np.zeros(row.count, np.int32)
    following = row.sequence.token_ids[row.start + 1 : min(row.start + row.count + 1, row.sequence.num_prompt_tokens)]
    targets[: len(following)] = following
    return targets


def _edit_requests(plan: StepPlan, eos_token_ids: tuple[int, ...]) -> list[EditRequest]:
    return [
        EditRequest(
            row=i,
            params=row.sequence.request.params,
            prompt_ids=row.sequence.request.prompt_token_ids,
            output_ids=row.sequence.output_token_ids,
            # The row's own sample is in flight already, and not counted.
            num_output=row.sequence.num_output_tokens - 1,
            eos_ids=eos_token_ids,
            bad_words=row.sequence.request.bad_words,
        )
        for i, row in enumerate(plan.rows)
        if row.samples and row.sequence.request.params.has_logit_edits
    ]
