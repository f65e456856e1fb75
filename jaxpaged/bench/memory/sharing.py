"""Blocks that sequences of one request share, counted by the real block manager.

The steps are those of the engine: a prefill, after which the sequences are forks of it, then steps in which each one
writes one token. In a beam search the survivors of a step are forked from the beams that they continue, and the beams
without survivors are freed, before the next step writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple, Protocol

from jaxpaged.bench.memory.lineages import Step
from jaxpaged.bench.workload import Lengths
from jaxpaged.block_manager import BlockManager
from jaxpaged.config import blocks_for
from jaxpaged.request import Request
from jaxpaged.request import Sequence as Branch
from jaxpaged.sampling_params import SamplingParams

_REQUEST = Request("", [], SamplingParams(), 0)  # without tokens: nothing here depends on them


class Lineages(Protocol):
    def lineage(self, draw: Random) -> Iterator[Step]: ...


class Sharing(NamedTuple):
    """What a trace came to."""

    saved: float
    """Blocks that sharing saves / blocks without sharing, each summed over all steps of all requests."""
    copies_per_token: float
    """Blocks copied on write, a token that was written after the prompt."""
    num_requests: int


def measure_sharing(
    trace: Sequence[Lengths], width: int, lineages: Lineages, *, block_size: int = 16, seed: int = 0
) -> Sharing:
    """Serves each request as `width` sequences of its whole length, and counts the blocks of each step, with those that
    it writes.

    What is saved is the average over time of a server that always has requests: each is there for as many steps as it
    has output tokens, whenever it comes and whatever runs beside it. So they are served one after the other.
    """
    draw = Random(seed)
    longest = max(blocks_for(sum(lengths), block_size) for lengths in trace)
    blocks = BlockManager(width * (longest + 1), block_size, caches_prefixes=False)
    num_used = num_entries = num_copied = num_written = 0
    for lengths in trace:
        group = Group(lengths, width, lineages.lineage(draw))
        for step in range(lengths.output):
            group.step(blocks)
            num_used += blocks.num_used
            num_entries += blocks.num_entries  # each sequence would own every block of its table
            num_copied += len(blocks.take_copies())
            num_written += width * (step > 0)
        group.free(blocks)
    return Sharing(1 - num_used / num_entries, num_copied / max(num_written, 1), len(trace))


def spread(trace: Sequence[Lengths], num_requests: int) -> list[Lengths]:
    """So many requests of a trace, with short and long ones in its proportions: in order of their length, every so many
    one. All, if it has no more."""
    ordered = sorted(trace, key=lambda lengths: (lengths.output, lengths.prompt))
    num_requests = min(num_requests, len(ordered))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * num_requests)] for i in range(num_requests)]


class Group:
    """The sequences of one request, in as many steps as it has output tokens; the last one needs no slot."""

    def __init__(self, lengths: Lengths, width: int, lineage: Iterator[Step]) -> None:
        self._prompt = lengths.prompt
        self._width = width
        self._lineage = lineage
        self._length = 0
        self._branches: list[Branch] = []

    def step(self, blocks: BlockManager) -> None:
        """The prefill, or the next token of each."""
        if not self._branches:
            self._length = self._prompt
            root = Branch(_REQUEST)
            self._grow(blocks, root)
            self._branches = [root, *(self._fork(blocks, root) for _ in range(self._width - 1))]
            return
        if self._length > self._prompt:
            self._select(blocks, next(self._lineage))
        self._length += 1
        for branch in self._branches:
            self._grow(blocks, branch)

    def free(self, blocks: BlockManager) -> None:
        for branch in self._branches:
            blocks.free(branch)

    def _select(self, blocks: BlockManager, parents: Step) -> None:
        """The first survivor of a beam takes its sequence over; the others are forks of it."""
        before, taken = self._branches, set()
        self._branches = []
        for parent in parents:
            branch = before[parent]
            self._branches.append(self._fork(blocks, branch) if parent in taken else branch)
            taken.add(parent)
        for index, branch in enumerate(before):
            if index not in taken:
                blocks.free(branch)

    def _fork(self, blocks: BlockManager, parent: Branch) -> Branch:
        child = Branch(_REQUEST)
        blocks.fork(parent, child)
        child.num_computed = parent.num_computed
        return child

    def _grow(self, blocks: BlockManager, branch: Branch) -> None:
        grown = blocks.grow(branch, self._length)
        assert grown, "the pool holds all that can come"
        branch.num_computed = self._length
