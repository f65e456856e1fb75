"""A request's beams as the scheduler sees them: several sequences that advance together.

One of them, the leader, stands for all in the scheduler's queues: what admits, preempts or ends it does so to all. The
beams have the same length. A step computes either one token of each, or what they still lack to be able to.

- At first the leader alone computes the prompt.
- When a step's candidates were read, `advance` makes the beams that live on: a beam's first child goes on in its
  sequence, further ones fork from it, and what has no child is freed.
- After a preemption the leader alone computes what all begin with; the others fork from it there, and each computes
  its own rest. So a group never takes more blocks than those of its common beginning once and of the rest for each
  beam, whatever the prefix cache does.
"""

from __future__ import annotations

from jaxpaged.block_manager import BlockManager
from jaxpaged.config import blocks_for
from jaxpaged.request import Request, Sequence


class BeamGroup:
    """The beams of one request: who they are, and what they compute next."""

    def __init__(self, request: Request, width: int) -> None:
        """Starts with one beam, the prompt; there will be `width` at most."""
        self.leader = Sequence(request)
        self.leader.beams = self
        self.members = [self.leader]
        """The running beams, best first, as the search counts them."""
        self.width = width
        self._num_common: int | None = None
        """Tokens that the leader computes for all, while the others wait for it."""

    @property
    def request_id(self) -> str:
        return self.leader.request.request_id

    @property
    def num_held(self) -> int:
        """Tokens computed, of all."""
        return sum(member.num_computed for member in self.members)

    @property
    def num_alone(self) -> int:
        """How many tokens the leader computes before the others join it; all that there are if it has no others."""
        return self.leader.num_tokens if self._num_common is None else self._num_common

    @property
    def is_apart(self) -> bool:
        """Whether the leader has computed all that it computes alone, and the others are still to be forked from it."""
        return self._num_common is not None and self.leader.num_computed == self._num_common

    def num_blocks_to_resume(self, block_size: int) -> int:
        """Blocks that the group takes, once all have computed their tokens."""
        total, common = blocks_for(self.leader.num_tokens, block_size), self.num_alone // block_size
        return common + len(self.members) * (total - common)

    def next_ends(self, budget: int) -> list[tuple[Sequence, int]]:
        """What the next step computes within a budget of tokens: sequences, and where each one's row ends."""
        leader = self.leader
        if leader.num_in_flight:
            return []  # nothing, until the candidates were read
        if len(self.members) == 1 or self._num_common is not None:
            return [(leader, min(self.num_alone, leader.num_computed + budget))]
        last = leader.num_tokens - 1
        behind = [member for member in self.members if member.num_computed < last]
        if not behind:
            return [(member, last + 1) for member in self.members] if budget >= len(self.members) else []
        ends = []
        for member in behind:
            if budget:
                end = min(last, member.num_computed + budget)
                budget -= end - member.num_computed
                ends.append((member, end))
        return ends

    def join(self, blocks: BlockManager) -> None:
        """Forks the others from the leader where it `is_apart`."""
        for member in self.members:
            if member is not self.leader:
                blocks.fork(self.leader, member)
                member.num_computed = self.leader.num_computed
        self._num_common = None

    def advance(self, blocks: BlockManager, survivors: list[tuple[int, int]]) -> None:
        """Makes the beams that live on, at least one.

        Args:
          blocks: whose tables change.
          survivors: of each (its parent's place among `members`, the token that follows), best first.
        """
        old = self.members
        parents = {parent for parent, _ in survivors}
        for member in old:
            member.num_in_flight, member.num_tokens = 0, len(member.token_ids)
        idle = [member for i, member in enumerate(old) if i not in parents]
        for member in idle:
            _clear(blocks, member)
        new: list[Sequence] = []
        for parent, _ in survivors:
            child = old[parent]
            if child in new:
                child = idle.pop() if idle else Sequence(self.leader.request)
                _copy(blocks, old[parent], child)
            new.append(child)
        if self.leader not in new:  # it has to stay
            _copy(blocks, new[0], self.leader)
            _clear(blocks, new[0])
            new[0] = self.leader
        for member, (_, token_id) in zip(new, survivors, strict=True):
            member.token_ids.append(token_id)
            member.num_tokens += 1
            if member.block_table and not (member.num_tokens - 1) % blocks.block_size:
                blocks.publish(member)  # the block before this token is full, and its tokens are known now
        self.members = new
        if not self.leader.num_computed:  # they were preempted while the candidates were on their way
            self._part()

    def clear(self, blocks: BlockManager) -> None:
        """Frees the blocks of all; they begin anew."""
        for member in self.members:
            _clear(blocks, member)
        self._part()

    def _part(self) -> None:
        """Notes how far the leader, which has computed nothing, goes alone: to where the first of them differs."""
        self._num_common = None
        if len(self.members) > 1:
            tokens = [member.token_ids for member in self.members]
            first, last = min(tokens), max(tokens)
            self._num_common = next(i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)


def _copy(blocks: BlockManager, parent: Sequence, child: Sequence) -> None:
    """Makes a sequence without blocks the same as another one, whose blocks it shares."""
    child.token_ids = parent.token_ids[:]
    child.num_tokens = parent.num_tokens
    child.num_in_flight = 0
    blocks.fork(parent, child)
    child.num_computed = parent.num_computed


def _clear(blocks: BlockManager, member: Sequence) -> None:
    blocks.free(member)
    member.num_computed = 0
