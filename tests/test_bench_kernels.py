"""The kernel benchmark's figures mean what it says; its speed is measured on a GPU, its calls run or lower here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench_kernels.py"
H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)


@pytest.fixture
def bench(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_kernels", module)
    spec.loader.exec_module(module)
    return module


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, env=environment, timeout=60
    )


def small_row(bench, kind: str):
    small = {"decode": (40, 3, 17), "prefill": (256, 256), "mixed": (40, 3, 17), "cascade": (50, 50), "write": (6,)}
    return bench.Row(f"small {kind}", kind, small[kind], 4, 2, (None,), shared=32 if kind == "cascade" else 0)


# --- what is counted


def test_rows_are_of_the_sizes_that_their_names_say(bench):
    rows = {row.name: row for row in bench.all_rows()}
    assert {name: (sum(row.lengths), len(row.lengths)) for name, row in rows.items() if "ragged" not in name} == {
        "decode-128x2048": (262144, 128),
        "decode-64x1024-mha": (65536, 64),
        "decode-8x16384": (131072, 8),
        "decode-1x8192": (8192, 1),
        "prefill-1x8192": (8192, 1),
        "prefill-8x2048": (16384, 8),
        "prefill-32x512": (16384, 32),
        "mixed-255-and-1024": (255 * 400 + 1024, 256),
        "cascade-64x4096-and-128": (64 * (4096 + 128), 64),
        "rope-write-256": (256, 1),
    }
    heads = {name: (row.q_heads, row.kv_heads) for name, row in rows.items()}
    assert {n for n, h in heads.items() if h == (40, 40)} == {"decode-64x1024-mha", "decode-256-ragged-mha"}
    assert {h for n, h in heads.items() if not n.endswith("mha")} == {(32, 8)}


def test_ragged_lengths_are_prompts_and_half_of_their_outputs(bench, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n20,5\n30,8\n1,1\n")
    assert bench.ragged_lengths(trace, rows=2) == (22, 34)
    bundled = bench.ragged_lengths()
    assert len(bundled) == 256
    assert bundled[0] == 108 + 711 // 2


def test_bytes_and_flops_by_hand(bench):
    row = bench.Row("", "decode", (3, 5), 8, 2, ())
    assert row.kv_bytes == 8 * (2 * 2 * 128 * 2)  # tokens times K and V of two heads in bfloat16
    assert row.flops == (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) * 8 * 2 * (2 * 128)  # pairs, heads, QK and PV
    assert row.reached(1e-6) == pytest.approx(row.kv_bytes * 1e-6)
    assert bench.Row("", "prefill", (3, 5), 8, 2, ()).reached(2e-6) == pytest.approx(row.flops * 0.5e-6)
    assert bench.Row("", "write", (3, 5), 8, 2, ()).reached(1.0) is None


def test_pools_are_beyond_the_l2_whatever_the_row(bench):
    for row in bench.all_rows():
        if row.kind != "write":
            assert row.kv_bytes * bench.num_pools(row) > 4 * 60e6


def test_tables_hold_each_block_once_in_random_order(bench):
    tables, blocks = bench.make_tables((33, 1, 16), width_multiple=4)
    assert tables.shape == (3, 4)
    assert (tables > 0).sum(axis=1).tolist() == [3, 1, 1]
    assert sorted(tables[tables > 0]) == list(range(1, blocks)) == [1, 2, 3, 4, 5]
    big, _ = bench.make_tables((2048,))
    assert (np.diff(big[0]) != 1).mean() > 0.9


def test_kernel_time_is_that_of_the_gpus_streams_without_copies(bench):
    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(name=n, duration_ns=d) for n, d in events])

    stream = line("Stream #7", ("plan", 1000), ("attend", 2000), ("MemcpyD2D", 50), ("CudaGraph:3", 4000))
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[stream, line("XLA Ops", ("x", 9))])
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream of thought", ("y", 7))])
    assert bench.kernel_seconds([gpu, host], calls=2) == pytest.approx(1.5e-6)
    assert bench.kernel_seconds([host], calls=2) is None


# --- what runs


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed", "cascade", "write"])
def test_measuring_on_the_cpu(bench, kind, monkeypatch):
    """The same code as on a GPU, with the reference: it runs, and gives a time."""
    for name, value in {"CALLS": 2, "ROUND_SECONDS": 1e-4, "ROUNDS": 2, "POOL_BYTES": 1e5}.items():
        monkeypatch.setattr(bench, name, value)
    timing = bench.OURS[kind](small_row(bench, kind), "reference")
    assert timing.seconds > 0
    assert timing.kernel_seconds is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pallas-Triton
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *[(kind, "mosaic") for kind in ("decode", "prefill", "mixed", "cascade")],
        ("decode", "triton"),
        *[(kind, "in-tree") for kind in ("decode", "prefill", "cascade")],
    ],
)
def test_what_runs_on_a_gpu_only_lowers(bench, kind, implementation, monkeypatch):
    def lower(run, *args, profile):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        return bench.Timing(text.count("custom_call"))

    from jax.experimental.pallas.ops.gpu import attention_mgpu

    cuda = SimpleNamespace(cuda_runtime_get_version=lambda: 13000)  # it asks for CUDA's version
    monkeypatch.setattr(attention_mgpu, "cuda_versions", cuda)
    monkeypatch.setattr(bench, "measure", lower)
    monkeypatch.setattr(bench, "CALLS", 2)
    row = small_row(bench, kind)
    with jax.sharding.use_abstract_mesh(H200):
        run = bench.IN_TREE[kind] if implementation == "in-tree" else bench.OURS[kind]
        timing = run(row) if implementation == "in-tree" else run(row, implementation)
    assert timing.seconds >= 1


def test_what_fails_is_told_and_stops_nothing(bench, monkeypatch):
    def fail(row):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(bench.OURS, "decode", lambda row, implementation: bench.Timing(1e-3))
    monkeypatch.setitem(bench.IN_TREE, "decode", fail)
    results = list(bench.measure_row(small_row(bench, "decode"), ("mosaic", "triton")))
    assert [r.implementation for r in results] == ["mosaic", "triton"]
    assert {r.error for r in results} == {"in-tree: RuntimeError: no such kernel"}
    assert all(r.ours.seconds == 1e-3 and r.in_tree is None for r in results)


# --- what comes out


@pytest.fixture
def results(bench):
    decode = bench.Row("reading", "decode", (1000,), 32, 8, ("mosaic",))  # 4.096e6 bytes
    prefill = bench.Row("products", "prefill", (1023,), 32, 8, ("mosaic",))  # 16384 * 523776 FLOPs
    write = bench.Row("writing", "write", (256,), 32, 8, (None,))
    return [
        bench.Result(decode, "mosaic", bench.Timing(1e-6, 0.9e-6), bench.Timing(2e-6)),
        bench.Result(prefill, "mosaic", bench.Timing(1e-5), None, "in-tree: none here"),
        bench.Result(write, None, bench.Timing(5e-6), bench.Timing(7e-6)),
        bench.Result(decode, "triton", None, bench.Timing(2e-6), "ours: refused"),
    ]


def test_the_table_has_figures_shares_and_ratios(bench, results, capsys):
    bench.Console(width=150).print(bench.render(results, (4.5, 1000.0), "a GPU"))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line] == [
        ["reading", "mosaic", "1.0 us", "0.9 us", "4.10 TB/s", "91.0%", "2.05 TB/s", "2.00"],
        ["products", "mosaic", "10.0 us", "-", "858 TFLOP/s", "85.8%", "-", "-"],
        ["writing", "best", "5.0 us", "-", "5.0 us", "-", "7.0 us", "1.40"],
        ["reading", "triton", "-", "-", "-", "-", "2.05 TB/s", "-"],
    ]


def test_the_json_has_all_of_it(bench, results):
    whole = json.loads(json.dumps(bench.as_json(results, (4.5, 1000.0), {"device": "a GPU"})))
    assert (whole["device"], whole["read_tb_s"], whole["product_tflop_s"]) == ("a GPU", 4.5, 1000.0)
    first, second, third, fourth = whole["rows"]
    assert (first["row"], first["ours"]["unit"], first["in_tree"]["seconds"]) == ("reading", "TB/s", 2e-6)
    assert first["ours"]["reached"] == pytest.approx(4.096)
    assert (second["in_tree"], second["error"]) == (None, "in-tree: none here")
    assert (third["ours"]["reached"], third["ours"]["unit"]) == (None, None)
    assert fourth["ours"] is None


def test_list_names_the_rows(bench):
    done = run_script("--list")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [row.name for row in bench.all_rows()]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_without_a_gpu_it_says_in_one_line_what_it_needs():
    done = run_script()
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "needs an NVIDIA GPU and JAX with CUDA; JAX finds" in line


def test_an_unknown_row_is_refused():
    done = run_script("--rows", "decode-3x3")
    assert done.returncode == 2
    assert "invalid choice: 'decode-3x3'" in done.stderr
