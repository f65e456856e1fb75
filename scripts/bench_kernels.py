"""How fast the kernels are on this GPU, beside the ceilings of the same run and beside JAX's in-tree kernels.

    python scripts/bench_kernels.py                           all rows
    python scripts/bench_kernels.py --rows decode-128x2048    some of them (--list names them)

bfloat16, head_dim 128, blocks of 16, tables permuted at random. The pools that calls take turns with hold about 1 GB or
more, far beyond the L2. 16 calls run in one jit, each on what the one before gave, and share the plan of their work as
the layers of a model do; `time` is wall clock a call over many such jits, the median of 5 rounds, and `kernels` the sum
of the kernels' durations in a profile, the plan's included, launch gaps not.

What is counted. Decode: each token's K and V read once, 2 * tokens * kv_heads * head_dim * 2 bytes. Prefill: the pairs
of query and key that the causal mask lets through, 4 * q_heads * head_dim * pairs FLOPs. The ceilings: summing 4.3 GB,
and the product of two 8192 x 8192 bfloat16 matrices of random numbers.

Two rows are told in time alone: a step of the engine's usual kind, 255 decodes and a chunk of a prompt, and 64
sequences that share a prefix (cascade attention).

In-tree, in the last columns: decode by jax.experimental.pallas.ops.gpu.paged_attention (best of three `k_splits`),
prefill by attention_mgpu of the same package (contiguous K and V, float16), RoPE and KV write by XLA; beside cascade
attention stands paged_attention of this package, which reads the prefix once a sequence.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

HEAD_DIM = 128
BLOCK_SIZE = 16
CALLS = 16  # in one jit
ROUNDS = 5
ROUND_SECONDS = 0.03
POOL_BYTES = 1.2e9  # of all pools that the calls of a row take turns with: far beyond any L2
READ_BYTES = 2**32
MATRIX = 8192
TRACE = Path(__file__).parent.parent / "workloads" / "sharegpt_like.csv"


# --- the rows


@dataclasses.dataclass(frozen=True)
class Row:
    """Work of one kind: `lengths` are tokens of each sequence, in the cache or, for a write, new."""

    name: str
    kind: str  # decode, prefill, mixed, cascade or write
    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    implementations: tuple[str | None, ...]
    shared: int = 0
    """Tokens at the beginning of all sequences that lie in the same blocks."""

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values, once."""
        return 2 * sum(self.lengths) * self.kv_heads * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        """Of causal attention over whole sequences."""
        return 4 * self.q_heads * HEAD_DIM * sum(n * (n + 1) // 2 for n in self.lengths)

    def reached(self, seconds: float) -> float | None:
        """TB/s of a decode, TFLOP/s of a prefill; others are told in time alone."""
        amount = {"decode": self.kv_bytes, "prefill": self.flops}.get(self.kind)
        return None if amount is None else amount / seconds / 1e12


UNITS = {"decode": "TB/s", "prefill": "TFLOP/s"}


def ragged_lengths(path: Path = TRACE, rows: int = 256) -> tuple[int, ...]:
    """Of the trace's first requests, half of whose output is there."""
    with path.open(newline="") as file:
        requests = list(csv.DictReader(file))[:rows]
    return tuple(int(r["prompt_tokens"]) + int(r["output_tokens"]) // 2 for r in requests)


def all_rows() -> list[Row]:
    hopper, both = ("mosaic",), ("mosaic", "triton")
    ragged = ragged_lengths()
    return [
        Row("decode-128x2048", "decode", (2048,) * 128, 32, 8, both),
        Row("decode-64x1024-mha", "decode", (1024,) * 64, 40, 40, hopper),
        Row("decode-8x16384", "decode", (16384,) * 8, 32, 8, hopper),
        Row("decode-1x8192", "decode", (8192,), 32, 8, hopper),
        Row("decode-256-ragged", "decode", ragged, 32, 8, both),
        Row("decode-256-ragged-mha", "decode", ragged, 40, 40, hopper),
        Row("prefill-1x8192", "prefill", (8192,), 32, 8, hopper),
        Row("prefill-8x2048", "prefill", (2048,) * 8, 32, 8, hopper),
        Row("prefill-32x512", "prefill", (512,) * 32, 32, 8, hopper),
        Row("mixed-255-and-1024", "mixed", (400,) * 255 + (1024,), 32, 8, hopper),
        Row("cascade-64x4096-and-128", "cascade", (4096 + 128,) * 64, 32, 8, hopper, shared=4096),
        Row("rope-write-256", "write", (256,), 32, 8, (None,)),
    ]


# --- measuring


@dataclasses.dataclass
class Timing:
    seconds: float
    """Wall clock a call."""
    kernel_seconds: float | None = None
    """Durations of the call's kernels, summed; None where there is no profile."""
    note: str = ""


def measure(run: Callable[..., tuple[Any, Any]], carry: Any, *args: Any, calls: int = CALLS, profile: bool) -> Timing:
    """Times `carry, _ = run(carry, *args)`, which makes `calls` calls; what it returns goes into the next."""
    import jax

    def several(carry: Any, times: int) -> tuple[Any, float]:
        start = time.perf_counter()
        for _ in range(times):
            carry, _ = run(carry, *args)
        jax.block_until_ready(carry)
        return carry, time.perf_counter() - start

    carry, _ = several(carry, 1)  # compiles
    if not all(jax.numpy.isfinite(x).all() for x in jax.tree.leaves(carry)):
        raise FloatingPointError("the result is not finite")
    carry, once = several(carry, 3)
    times = max(3, round(ROUND_SECONDS / (once / 3)))  # the host's dispatch hides behind the device's work
    rounds = []
    for _ in range(ROUNDS):
        carry, seconds = several(carry, times)
        rounds.append(seconds / times / calls)
    timing = Timing(statistics.median(rounds))
    if profile:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                several(carry, 1)
            for path in Path(folder).rglob("*.xplane.pb"):
                planes = jax.profiler.ProfileData.from_file(str(path)).planes
                timing.kernel_seconds = kernel_seconds(planes, calls)
    return timing


def kernel_seconds(planes: Iterable[Any], calls: int) -> float | None:
    """Durations of the kernels on a profile's GPU streams, over `calls`; None if there are none."""
    streams = (
        line
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
    )
    not_kernels = ("Memcpy", "CudaGraph")  # a graph's kernels are there one by one as well
    durations = [e.duration_ns for line in streams for e in line.events if not e.name.startswith(not_kernels)]
    return sum(durations) * 1e-9 / calls if durations else None


def measure_ceilings() -> tuple[float, float]:
    """TB/s of reading and TFLOP/s of a matrix product."""
    import jax
    import jax.numpy as jnp

    big = random_array(0, READ_BYTES // 2)
    read = jax.jit(lambda total, x: (total * 0 + jnp.sum(x.astype(jnp.float32)), None))
    reading = measure(read, jnp.float32(0), big, calls=1, profile=False)
    del big
    factor = random_array(1, MATRIX, MATRIX) * MATRIX**-0.5  # keeps what it multiplies at the same size

    @jax.jit
    def multiply(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(CALLS):
            x = x @ factor
        return x, None

    product = measure(multiply, random_array(2, MATRIX, MATRIX), factor, profile=False)
    return READ_BYTES / reading.seconds / 1e12, 2 * MATRIX**3 / product.seconds / 1e12


def random_array(seed: int, *shape: int) -> Any:
    import jax

    return jax.random.normal(jax.random.key(seed), shape, jax.numpy.bfloat16)


def num_pools(row: Row) -> int:
    """How many pools the calls take turns with."""
    return max(1, min(CALLS, int(POOL_BYTES // row.kv_bytes)))


def make_tables(lengths: tuple[int, ...], width_multiple: int = 1) -> tuple[np.ndarray, int]:
    """Block tables over all blocks but the null block, permuted; and the number of blocks."""
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    blocks = sum(counts) + 1
    ids = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
    width = -(-max(counts) // width_multiple) * width_multiple
    tables = np.zeros((len(lengths), width), np.int32)
    for row, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        row[:count] = ids[end - count : end]
    return tables, blocks


def measure_decode(row: Row, implementation: str | None) -> Timing:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention

    tables, blocks = make_tables(row.lengths)
    pools = [random_array(i, blocks, BLOCK_SIZE, row.kv_heads, HEAD_DIM) for i in range(2 * num_pools(row))]
    lens, starts = jnp.array(row.lengths, jnp.int32), jnp.arange(len(row.lengths) + 1, dtype=jnp.int32)

    @jax.jit
    def run(q: Any, pools: list[Any], *batch: Any) -> tuple[Any, None]:
        for i in range(CALLS):
            k, v = pools[2 * i % len(pools)], pools[(2 * i + 1) % len(pools)]
            q = paged_attention(q, k, v, *batch, max_query_len=1, implementation=implementation)
        return q, None

    q = random_array(99, len(row.lengths), row.q_heads, HEAD_DIM)
    return measure(run, q, pools, jnp.asarray(tables), lens, starts, profile=True)


def measure_in_tree_decode(row: Row) -> Timing:
    """JAX's paged attention, head-major pools; the best of a few splits."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    tables, blocks = make_tables(row.lengths, width_multiple=128)  # 16 splits of 8 pages
    pools = [random_array(i, row.kv_heads, blocks, BLOCK_SIZE, HEAD_DIM) for i in range(2 * num_pools(row))]
    batch, best = (jnp.asarray(tables), jnp.array(row.lengths, jnp.int32)), None

    @functools.partial(jax.jit, static_argnames="splits")
    def run(q: Any, pools: list[Any], *batch: Any, splits: int) -> tuple[Any, None]:
        for i in range(CALLS):
            q = paged_attention(q, pools[2 * i % len(pools)], pools[(2 * i + 1) % len(pools)], *batch, k_splits=splits)
        return q, None

    for splits in (1, 4, 16):
        q = random_array(99, len(row.lengths), row.q_heads, HEAD_DIM)
        timing = measure(functools.partial(run, splits=splits), q, pools, *batch, profile=False)
        timing.note = f"k_splits={splits}"
        best = timing if best is None or timing.seconds < best.seconds else best
    assert best is not None
    return best


def chained_prefill(attend: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    """Calls of `attend(q, k, v, *batch)`, of which the next one's first query takes a little from the output.

    (All of the output would not do: means of random values leave nothing of it, and products with next to nothing
    take less power.)
    """

    def run(q: Any, pools: list[Any], *batch: Any) -> tuple[Any, None]:
        first = (0,) * (q.ndim - 2)
        for i in range(CALLS):
            out = attend(q, pools[2 * i % len(pools)], pools[(2 * i + 1) % len(pools)], *batch)
            q = q.at[first].add(out[first] * 2**-7)
        return q, None

    return run


def measure_prefill(row: Row, implementation: str | None) -> Timing:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention

    tables, blocks = make_tables(row.lengths)
    pools = [random_array(i, blocks, BLOCK_SIZE, row.kv_heads, HEAD_DIM) for i in range(2 * num_pools(row))]
    lens = jnp.array(row.lengths, jnp.int32)
    starts = jnp.array([0, *np.cumsum(row.lengths)], jnp.int32)
    run = jax.jit(chained_prefill(functools.partial(paged_attention, implementation=implementation)))
    q = random_array(99, sum(row.lengths), row.q_heads, HEAD_DIM)
    return measure(run, q, pools, jnp.asarray(tables), lens, starts, profile=True)


def measure_mixed(row: Row, implementation: str | None) -> Timing:
    """All of the last sequence is new, of each other one its last token."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention

    tables, blocks = make_tables(row.lengths)
    pools = [random_array(i, blocks, BLOCK_SIZE, row.kv_heads, HEAD_DIM) for i in range(2 * num_pools(row))]
    queries = [1] * (len(row.lengths) - 1) + [row.lengths[-1]]
    lens, starts = jnp.array(row.lengths, jnp.int32), jnp.array([0, *np.cumsum(queries)], jnp.int32)
    run = jax.jit(chained_prefill(functools.partial(paged_attention, implementation=implementation)))
    return measure(
        run,
        random_array(99, sum(queries), row.q_heads, HEAD_DIM),
        pools,
        jnp.asarray(tables),
        lens,
        starts,
        profile=True,
    )


def measure_cascade(row: Row, implementation: str | None, *, plain: bool = False) -> Timing:
    """Decodes of sequences in one group, or `plain`: by `paged_attention`, as if they shared nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import cascade_attention, paged_attention

    tables, blocks = make_tables(row.lengths)
    tables[:, : row.shared // BLOCK_SIZE] = tables[0, : row.shared // BLOCK_SIZE]
    pools = [random_array(i, blocks, BLOCK_SIZE, row.kv_heads, HEAD_DIM) for i in range(2 * num_pools(row))]
    seqs = len(row.lengths)
    batch = [jnp.asarray(tables), jnp.array(row.lengths, jnp.int32), jnp.arange(seqs + 1, dtype=jnp.int32)]
    if not plain:
        batch += [jnp.array([0, seqs], jnp.int32), jnp.array([row.shared], jnp.int32)]
    attend = functools.partial(
        paged_attention if plain else cascade_attention, max_query_len=1, implementation=implementation
    )

    @jax.jit
    def run(q: Any, pools: list[Any], *batch: Any) -> tuple[Any, None]:
        for i in range(CALLS):
            q = attend(q, pools[2 * i % len(pools)], pools[(2 * i + 1) % len(pools)], *batch)
        return q, None

    return measure(run, random_array(99, seqs, row.q_heads, HEAD_DIM), pools, *batch, profile=True)


def measure_in_tree_prefill(row: Row) -> Timing:
    """JAX's attention for Hopper, contiguous K and V; its shared memory holds float16 whatever it is given."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig, attention

    config = TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    batch, length = len(row.lengths), row.lengths[0]
    keys = [random_array(i, batch, length, row.kv_heads, HEAD_DIM) for i in range(2 * num_pools(row))]
    q = random_array(99, batch, length, row.q_heads, HEAD_DIM).astype(jnp.float16) * HEAD_DIM**-0.5
    run = jax.jit(chained_prefill(lambda q, k, v: attention(q, k, v, config, False)))
    return measure(run, q, [k.astype(jnp.float16) for k in keys], profile=False)


def measure_write(row: Row, implementation: str | None) -> Timing:
    """Rotary embedding and KV write of all tokens, each call into other slots of the same pools, in place."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import rope_and_write_kv

    tokens, blocks = sum(row.lengths), 4096
    slots = np.random.default_rng(0).permutation(blocks * BLOCK_SIZE)[: CALLS * tokens].reshape(CALLS, tokens)
    angles = jax.random.uniform(jax.random.key(3), (tokens, HEAD_DIM // 2)) * 6
    qkvs = [random_array(i, tokens, row.q_heads + 2 * row.kv_heads, HEAD_DIM) for i in range(CALLS)]
    pools = tuple(random_array(97 + i, blocks, BLOCK_SIZE, row.kv_heads, HEAD_DIM) for i in range(2))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools: Any, qkvs: list[Any], cos: Any, sin: Any, slots: Any) -> tuple[Any, Any]:
        queries, (k, v) = [], pools
        for qkv, where in zip(qkvs, slots, strict=True):
            q, k, v = rope_and_write_kv(qkv, cos, sin, k, v, where, implementation=implementation)
            queries.append(q)  # handed out, or XLA would leave the rotation away
        return (k, v), queries

    each = tuple(jnp.asarray(s, jnp.int32) for s in slots)
    return measure(run, pools, qkvs, jnp.cos(angles), jnp.sin(angles), each, profile=True)


def nothing_in_tree(row: Row) -> Timing:
    raise NotImplementedError("JAX has nothing like it")


OURS = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "mixed": measure_mixed,
    "cascade": measure_cascade,
    "write": measure_write,
}
IN_TREE = {
    "decode": measure_in_tree_decode,
    "prefill": measure_in_tree_prefill,
    "mixed": nothing_in_tree,
    "cascade": functools.partial(measure_cascade, implementation=None, plain=True),
    "write": functools.partial(measure_write, implementation="reference"),
}


# --- what comes out


@dataclasses.dataclass
class Result:
    row: Row
    implementation: str | None
    ours: Timing | None
    in_tree: Timing | None
    error: str = ""


def measure_row(row: Row, implementations: tuple[str | None, ...]) -> Iterable[Result]:
    """A result for each implementation; what fails says why and stops nothing else."""
    in_tree, failed = attempt(lambda: IN_TREE[row.kind](row))
    for implementation in implementations:
        ours, error = attempt(functools.partial(OURS[row.kind], row, implementation))
        reasons = [error and f"ours: {error}", failed and f"in-tree: {failed}"]
        yield Result(row, implementation, ours, in_tree, "; ".join(filter(None, reasons)))


def attempt(run: Callable[[], Timing]) -> tuple[Timing | None, str]:
    try:
        return run(), ""
    except Exception as error:
        first_line = (str(error) or "no message").splitlines()[0]
        return None, f"{type(error).__name__}: {first_line[:300]}"


def render(results: list[Result], ceilings: tuple[float, float], title: str) -> Table:
    """One line a result: ours, its share of the ceiling, in-tree, and how many times as fast as that."""
    caption = f"ceilings of this run: reading {ceilings[0]:.2f} TB/s, matrix product {ceilings[1]:.0f} TFLOP/s"
    table = Table("row", "implementation", title=title, caption=caption)
    for name in ("time", "kernels", "reached", "of ceiling", "in-tree", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        row, ours, in_tree = result.row, result.ours, result.in_tree
        ceiling = ceilings[0] if row.kind == "decode" else ceilings[1]
        reached = row.reached(ours.seconds) if ours else None
        table.add_row(
            row.name,
            result.implementation or "best",
            in_us(ours and ours.seconds),
            in_us(ours and ours.kernel_seconds),
            in_units(row, ours),
            "-" if reached is None else f"{reached / ceiling:.1%}",
            in_units(row, in_tree),
            f"{in_tree.seconds / ours.seconds:.2f}" if ours and in_tree else "-",
        )
    return table


def in_us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.1f} us"


def in_units(row: Row, timing: Timing | None) -> str:
    if timing is None:
        return "-"
    reached = row.reached(timing.seconds)
    if reached is None:
        return in_us(timing.seconds)
    return f"{reached:.{2 if row.kind == 'decode' else 0}f} {UNITS[row.kind]}"


def as_json(results: list[Result], ceilings: tuple[float, float], machine: dict[str, str]) -> dict[str, Any]:
    def timing(row: Row, t: Timing | None) -> dict[str, Any] | None:
        return t and {**dataclasses.asdict(t), "reached": row.reached(t.seconds), "unit": UNITS.get(row.kind)}

    rows = [
        {
            "row": r.row.name,
            "implementation": r.implementation,
            "ours": timing(r.row, r.ours),
            "in_tree": timing(r.row, r.in_tree),
            "error": r.error,
        }
        for r in results
    ]
    return {**machine, "read_tb_s": ceilings[0], "product_tflop_s": ceilings[1], "rows": rows}


def gpu() -> dict[str, str]:
    """What the figures are of; ends the program where there is no GPU."""
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit(f"bench_kernels.py needs an NVIDIA GPU and JAX with CUDA; JAX finds {jax.devices()[0]} only")
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main() -> None:
    rows = {row.name: row for row in all_rows()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", choices=rows, default=list(rows), help="default: all")
    parser.add_argument("--implementation", nargs="+", help="of attention, by name (default: those of the row)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    args = parser.parse_args()
    if args.list:
        print(*rows, sep="\n")
        return
    machine = gpu()
    ceilings = measure_ceilings()
    results: list[Result] = []
    progress = Console(stderr=True, highlight=False)
    for row in (rows[name] for name in args.rows):
        wanted = row.implementations if row.kind == "write" else tuple(args.implementation or row.implementations)
        for result in measure_row(row, wanted):
            results.append(result)
            ours, in_tree = result.ours, result.in_tree
            progress.print(
                f"{row.name} ({result.implementation or 'best'}): {in_us(ours and ours.seconds)}, "
                f"kernels {in_us(ours and ours.kernel_seconds)}, in-tree {in_us(in_tree and in_tree.seconds)}"
            )
    console = Console(width=150)
    console.print(render(results, ceilings, f"{machine['device']}, JAX {machine['jax']}, {machine['date']}"))
    for result in results:
        if result.error:
            console.print(f"{result.row.name} ({result.implementation or 'best'}): {result.error}", highlight=False)
    if args.json:
        args.json.write_text(json.dumps(as_json(results, ceilings, machine), indent=2) + "\n")


if __name__ == "__main__":
    main()
