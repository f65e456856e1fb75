"""What is static about a launch of the prefill kernel: sizes, how they divide, and where all lies in shared memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.spec import AttentionSpec

ROWS = 64  # of a compute warpgroup: the height of a wgmma
WARPGROUPS = 2  # that compute
TILE_ROWS = WARPGROUPS * ROWS
KV_SLOTS = 2  # of the ring of keys, and of that of values
MATRIX = plgpu.Layout.WGMMA
VECTOR = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a matrix
_BUNDLE_TOKENS = 512  # of a sequence, scheduled together; 128 and 2048 are slower
_MAX_PACK = 8
_TMA_ALIGNMENT = 128  # bytes: of a copy's address in shared memory


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Everything static about a launch. Values of q and the pools have two bytes."""

    tokens: int  # rows of the output
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    block_size: int
    table_width: int
    programs: int
    spec: AttentionSpec
    has_sinks: bool
    zeroes_padding: bool  # in the rows of the output that belong to no sequence

    @property
    def pack(self) -> int:
        """Query heads in a tile: a power of two that divides those of a KV head."""
        group = self.q_heads // self.kv_heads
        return min(group & -group, _MAX_PACK)

    @property
    def tile_tokens(self) -> int:
        return TILE_ROWS // self.pack

    @property
    def warpgroup_tokens(self) -> int:
        return ROWS // self.pack

    @property
    def groups(self) -> int:
        """Items of one tile."""
        return self.q_heads // self.pack

    @property
    def bundle(self) -> int:
        """Tiles of a sequence that are scheduled together."""
        return _BUNDLE_TOKENS // self.tile_tokens

    @property
    def kv_tile(self) -> int:
        """Tokens whose keys and values are loaded at a time; the registers of wide heads leave less room."""
        return 128 if self.head_dim <= 128 else 64

    @property
    def q_slots(self) -> int:
        """Buffers of queries: two, so that the next item's come early, if shared memory allows."""
        return 2 if self.head_dim <= 128 else 1

    @property
    def swizzle(self) -> int:
        """Bytes of a row of a swizzled slab: 128, 64 or 32, the most that divides a head's."""
        return plgpu.find_swizzle(self.head_dim * 16)

    @property
    def slab(self) -> int:
        """Columns of a slab."""
        return self.swizzle // 2

    @property
    def slabs(self) -> int:
        return self.head_dim // self.slab

    @property
    def out_slabs(self) -> int:
        """Slabs of the output that are staged at a time: all, or 128 columns of wide heads."""
        return min(self.slabs, max(128 // self.slab, 1))

    @property
    def aligned_tokens(self) -> int:
        """Copies of the staged output start at multiples of so many tokens; 1 but for narrow slabs of few heads."""
        return max(_TMA_ALIGNMENT // (self.pack * self.swizzle), 1)

    @property
    def copy_rows(self) -> int:
        """Rows that one copy of keys or values brings: of one block."""
        return min(self.block_size, self.kv_tile)

    @property
    def copies(self) -> int:
        return self.kv_tile // self.copy_rows


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory: queries, rings of keys and values, and the staged output, with their barriers."""

    q: Any  # [q_slots, slabs, tile_tokens, pack, slab]: what copies from q[tokens, heads, columns] fill
    q_tiled: Any  # [q_slots, slabs, 128, slab]: the same bytes, as wgmma reads them
    k: Any  # [slots, kv_tile, head_dim]
    v: Any  # [slots, kv_tile, head_dim]
    out: Any  # [warpgroups, out_slabs, warpgroup_tokens, pack, slab]: what copies to the output read
    out_tiled: Any  # [warpgroups, out_slabs, 64, slab]: the same bytes, as registers are stored
    lse: Any  # [warpgroups, 64]
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any

    @classmethod
    def of(cls, scratch: dict[str, Any]) -> Memory:
        """From the references to what `scratch_types` asked for."""
        q, q_tiled = scratch["q"]
        out, out_tiled = scratch["out"]
        rest = {name: ref for name, ref in scratch.items() if name not in ("q", "out")}
        return cls(q=q, q_tiled=q_tiled, out=out, out_tiled=out_tiled, **rest)


def scratch_types(g: Geometry) -> dict[str, Any]:
    smem = functools.partial(plgpu.SMEM, dtype=g.dtype)
    swizzled = (plgpu.SwizzleTransform(g.swizzle),)  # pyright: ignore[reportAbstractUsage]
    tiled = (plgpu.TilingTransform((8, g.slab)), *swizzled)  # pyright: ignore[reportAbstractUsage]
    ring = smem((KV_SLOTS, g.kv_tile, g.head_dim), transforms=tiled)
    # Copies of rows at any offset need rows, wgmma needs tiles of 8: a slab has the same bytes in both.
    q = plgpu.RefUnion(
        smem((g.q_slots, g.slabs, g.tile_tokens, g.pack, g.slab), transforms=swizzled),
        smem((g.q_slots, g.slabs, TILE_ROWS, g.slab), transforms=tiled),
    )
    out = plgpu.RefUnion(
        smem((WARPGROUPS, g.out_slabs, g.warpgroup_tokens, g.pack, g.slab), transforms=swizzled),
        smem((WARPGROUPS, g.out_slabs, ROWS, g.slab), transforms=tiled),
    )
    scratch = {"q": q, "out": out, "k": ring, "v": ring, "lse": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)}
    for name, copies, slots in (("q", g.slabs, g.q_slots), ("k", g.copies, KV_SLOTS), ("v", g.copies, KV_SLOTS)):
        scratch[name + "_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=slots)
        scratch[name + "_empty"] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots)
    return scratch
