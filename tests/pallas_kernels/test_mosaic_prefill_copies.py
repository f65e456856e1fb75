"""Which copies the Hopper prefill kernel makes between global and shared memory: its own code is run with numbers in
place of what it has in registers, and its copies are noted instead of made.

TMA faults on an address in shared memory that is no multiple of 128 bytes; nothing says so before the kernel runs.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_prefill import BLOCK_SIZES, HEAD_DIMS
from pallas_kernels.paged_attention.mosaic_prefill_geometry import ROWS, WARPGROUPS, Geometry, Memory, scratch_types
from pallas_kernels.paged_attention.mosaic_prefill_load import load
from pallas_kernels.paged_attention.mosaic_prefill_store import Output
from pallas_kernels.paged_attention.spec import AttentionSpec

PACKS = (1, 2, 4, 8)
ALIGNMENT = 128  # bytes
WARPS = 4  # of the loading warpgroup


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of every dimension of a reference."""

    ref: Ref
    ranges: tuple[range, ...]

    @property
    def offset(self) -> int:
        """Bytes to its start from that of the reference, which in shared memory is a multiple of 1024."""
        shape, start = list(self.ref.shape), [r.start for r in self.ranges]
        if self.ref.tiling is not None:
            rows, columns = self.ref.tiling
            shape[-2:] = shape[-2] // rows, shape[-1] // columns, rows, columns
            start[-2:] = start[-2] // rows, start[-1] // columns, start[-2] % rows, start[-1] % columns
        return int(np.ravel_multi_index(start, shape)) * jnp.dtype(self.ref.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Ref:
    """In place of a reference to memory: makes parts, and forgets what is stored."""

    shape: tuple[int, ...]
    dtype: Any = jnp.bfloat16
    tiling: Any = None  # [rows, columns]

    @classmethod
    def to(cls, scratch: Any) -> Any:
        """To scratch memory: one, or those of a union."""
        if isinstance(scratch, plgpu.RefUnion):
            return tuple(cls.to(ref) for ref in scratch.refs)
        if isinstance(scratch, plgpu.Barrier):
            return MagicMock()
        tilings = [t.tiling for t in scratch.transforms if isinstance(t, plgpu.TilingTransform)]
        return cls(scratch.shape, scratch.dtype, *tilings)

    @property
    def at(self) -> Ref:
        return self

    def __getitem__(self, index: Any) -> Part:
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        ranges = []
        for i, size in zip(index, self.shape, strict=True):
            if isinstance(i, slice):
                ranges.append(range(size))
            elif hasattr(i, "size") and hasattr(i, "start"):  # pl.ds
                ranges.append(range(int(i.start), int(i.start) + int(i.size)))
            else:
                ranges.append(range(int(i), int(i) + 1))
            assert 0 <= ranges[-1].start < ranges[-1].stop <= size
        return Part(self, tuple(ranges))

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


@pytest.fixture
def copies(monkeypatch):
    """Pairs of source and target, as the kernel makes them."""
    made: list[tuple[Part, Part]] = []

    def copy(source: Part, target: Part, *_: Any, predicate: Any = True, **__: Any) -> None:
        if predicate:
            made.append((source, target))

    for name in ("barrier_wait", "wait_smem_to_gmem", "commit_smem", "commit_smem_to_gmem_group"):
        monkeypatch.setattr(plgpu, name, lambda *_, **__: None)
    for name in ("copy_gmem_to_smem", "copy_smem_to_gmem"):
        monkeypatch.setattr(plgpu, name, copy)
    monkeypatch.setattr(plgpu, "warp_map", lambda body: [body(warp) for warp in range(WARPS)])
    with jax.disable_jit():  # so that loops and branches are Python's
        yield made


def geometry(head_dim: int, pack: int, block_size: int = 16) -> Geometry:
    g = Geometry(
        tokens=300,
        q_heads=2 * pack,
        kv_heads=2,
        head_dim=head_dim,
        dtype=jnp.bfloat16,
        block_size=block_size,
        table_width=4096 // block_size,
        programs=132,
        spec=AttentionSpec(scale=1.0),
        has_sinks=False,
        zeroes_padding=True,
    )
    assert g.pack == pack
    return g


def memory_of(g: Geometry) -> Any:
    return Memory.of({name: Ref.to(scratch) for name, scratch in scratch_types(g).items()})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_loads_bring_every_row_to_its_place_at_addresses_that_tma_takes(copies, head_dim, pack, block_size):
    g = geometry(head_dim, pack, block_size)
    memory = memory_of(g)
    last, kv_len = 2, 2 * g.kv_tile + 19
    item = SimpleNamespace(seq=0, row=37, head=pack, kv_head=1, kv_len=kv_len, first=0, last=last)
    table = np.random.default_rng(0).permutation(g.table_width)[None]
    q, *pools = Ref((300, 2 * pack, head_dim)), *(Ref((g.table_width, block_size, 2, head_dim)) for _ in range(2))
    load(g, memory, SimpleNamespace(num=1, get=lambda n: item), q, *pools, table)

    assert [target.offset for _, target in copies if target.offset % ALIGNMENT] == []
    queries = [(source, target) for source, target in copies if source.ref is q]
    assert len(queries) == g.slabs
    for slab, (source, target) in enumerate(queries):
        rows, heads, columns = source.ranges
        assert (rows, heads) == (range(37, 37 + g.tile_tokens), range(pack, 2 * pack))
        assert columns == range(slab * g.slab, (slab + 1) * g.slab)
        assert target.ref is memory.q
        assert target.ranges[:2] == (range(1), range(slab, slab + 1))
    for pool, ring in zip(pools, (memory.k, memory.v), strict=True):
        brought = []  # position of each row, its slot and its place there
        for source, target in ((s, t) for s, t in copies if s.ref is pool):
            (block,), rows, heads, columns = source.ranges
            assert (heads, columns) == (range(1, 2), range(head_dim))
            assert target.ref is ring
            position = int(np.flatnonzero(table[0] == block)[0]) * block_size
            (slot,), places, _ = target.ranges
            brought += [(position + row, slot, place) for row, place in zip(rows, places, strict=True)]
        count = -(-kv_len // g.copy_rows) * g.copy_rows  # whole copies
        assert sorted(brought) == [(p, (last - p // g.kv_tile) % 2, p % g.kv_tile) for p in range(count)]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_stores_take_every_row_once_from_addresses_that_tma_takes(copies, head_dim, pack):
    g = geometry(head_dim, pack)
    memory, out, lse = memory_of(g), Ref((300, 2 * pack, head_dim)), Ref((9, 2, WARPGROUPS, ROWS), jnp.float32)
    acc, row_value = jnp.ones((ROWS, head_dim), jnp.float32), jnp.ones(ROWS, jnp.float32)
    for warpgroup in range(WARPGROUPS):
        output = Output(g, memory, out, lse, warpgroup)
        for rows in range(1, g.tile_tokens + 1):
            copies.clear()
            item: Any = SimpleNamespace(tile=5, group=1, row=37, rows=rows, head=pack)
            output.store(item, acc, row_value, row_value)
            assert [source.offset for source, _ in copies if source.offset % ALIGNMENT] == [], rows
            before = warpgroup * g.warpgroup_tokens
            written = []
            *of_rows, (source, target) = copies
            assert (source.ref, target.ref) == (memory.lse, lse)
            assert [r.start for r in target.ranges] == [5, 1, warpgroup, 0]
            for source, target in of_rows:
                assert source.ref is memory.out
                of_warpgroup, (slab,), tokens, heads, _ = source.ranges
                assert of_warpgroup == range(warpgroup, warpgroup + 1)
                assert heads == range(pack)
                assert target.ranges[0] == range(37 + before + tokens.start, 37 + before + tokens.stop)
                assert target.ranges[1] == range(pack, 2 * pack)
                assert target.ranges[2].start // g.slab % g.out_slabs == slab
                written += [(token, target.ranges[2].start) for token in tokens]
            mine = min(max(rows - before, 0), g.warpgroup_tokens)
            assert sorted(written) == [(t, c) for t in range(mine) for c in range(0, head_dim, g.slab)]
