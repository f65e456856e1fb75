"""The memory report: its allocators and counts against others that know nothing of the scheduler, and its files."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from jaxpaged.bench.memory import lineages, plots, report, sharing, systems, usage
from jaxpaged.bench.memory.contiguous import BuddySpace
from jaxpaged.bench.memory.systems import Memory
from jaxpaged.bench.workload import Lengths, read_trace
from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Request, Sequence
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "memory_report.py"
WORKLOADS = ROOT / "workloads"
TINY = [Lengths(5, 4), Lengths(3, 9), Lengths(6, 2), Lengths(2, 5), Lengths(7, 7), Lengths(1, 1)]
POOL = Memory(num_slots=32, max_model_len=16, block_size=4)


# --- chunks of a buddy allocator


def test_a_buddy_space_by_hand():
    space = BuddySpace(12)  # chunks of 8 and 4
    assert space.largest_free == 8
    assert space.allocate(3) == 8  # the chunk of 4, not a half of the 8
    assert (space.allocate(1), space.allocate(2)) == (0, 2)  # 8 = 1 + 1 + 2 + 4
    assert (space.num_used, space.largest_free) == (4 + 1 + 2, 4)
    space.release(0, 1)
    assert space.largest_free == 4
    space.release(2, 2)
    assert (space.num_used, space.largest_free) == (4, 8)


@pytest.mark.parametrize("num_slots", [1, 37, 64, 15_700])
def test_chunks_never_overlap_and_merge_again(num_slots):
    draw, space, owned = random.Random(0), BuddySpace(num_slots), {}
    for _ in range(400):
        size = draw.randint(1, max(1, num_slots // 3))
        if space.largest_free >= size and draw.random() < 0.6:
            start = space.allocate(size)
            chunk = range(start, start + (1 << (size - 1).bit_length()))
            assert chunk.stop <= num_slots
            assert not any(chunk.start < other.stop and other.start < chunk.stop for other, _ in owned.values())
            owned[start] = chunk, size
        elif owned:
            start = draw.choice(list(owned))
            space.release(start, owned.pop(start)[1])
        assert space.num_used == sum(len(chunk) for chunk, _ in owned.values())
    for start, (_, size) in owned.items():
        space.release(start, size)
    assert (space.num_used, space.largest_free) == (0, BuddySpace(num_slots).largest_free)


# --- slots in use


def count_by_hand(trace, fits, allocated):
    """(running, allocated, held) of each step. A request runs for a step an output token and one in which the last of
    them is read; `fits(live, request)` admits it, `allocated(live)` are its slots with those of the others."""
    waiting, live, steps = list(trace), [], []
    while waiting or live:
        live = [(request, age + 1) for request, age in live if age < request.output]
        while waiting and fits([request for request, _ in live], waiting[0]):
            live.append((waiting.pop(0), 0))
        if any(age < request.output for request, age in live):  # else there is nothing to compute
            held = sum(request.prompt + min(age, request.output - 1) for request, age in live)
            steps.append((len(live), allocated(live), held))
    return steps


def counted(scheduler, trace=TINY):
    served = usage.serve(scheduler, trace)
    scheduler.check_integrity()
    assert scheduler.blocks.num_used == 0
    return served, [(m.running, m.allocated, m.held) for m in served.moments]


RESERVED = {
    "max": lambda r: 16,
    "pow2": lambda r: min(16, r.prompt + {1: 1, 2: 2, 4: 4, 5: 8, 7: 8, 9: 16}[r.output]),
    "oracle": lambda r: r.prompt + r.output,
}


@pytest.mark.parametrize("policy", RESERVED)
def test_reserved_slots_are_those_counted_by_hand(policy):
    slots = RESERVED[policy]
    expected = count_by_hand(
        TINY,
        lambda live, r: sum(map(slots, live)) + slots(r) <= 32,
        lambda live: sum(slots(request) for request, _ in live),
    )
    assert counted(systems.reserving(POOL, TINY, policy))[1] == expected


def test_orcas_chunks_are_those_counted_by_hand():
    # All chunks are of 16, so that two fit: prompts and outputs of 9 to 16 tokens.
    trace = [Lengths(5, 4), Lengths(3, 9), Lengths(6, 5), Lengths(4, 5), Lengths(7, 7)]
    expected = count_by_hand(trace, lambda live, r: len(live) < 2, lambda live: 16 * len(live))
    served, found = counted(systems.orca(POOL, trace, "oracle"), trace)
    assert found == expected
    first = served.moments[0]  # 5 + 3 held; they will hold 8 and 11, and 9 and 12 are reserved
    assert (first.held, first.coming, first.allocated) == (8, 11, 32)


def test_paged_slots_are_those_counted_by_hand():
    def blocks(request, age):
        return 4 * -(-(request.prompt + min(age, request.output - 1)) // 4)

    memory = POOL._replace(num_slots=400)  # all of them at once
    expected = count_by_hand(TINY, lambda live, r: True, lambda live: sum(blocks(*one) for one in live))
    assert counted(systems.paged(memory, TINY))[1] == expected


def test_a_static_batch_is_a_rectangle_counted_by_hand():
    trace = [Lengths(5, 2), Lengths(3, 4), Lengths(6, 1), Lengths(2, 3)]
    assert systems.static_batch_size(16, trace) == 2  # 2 × (5 + 4 - 1) slots; of three it would be 3 × (6 + 4 - 1)
    served, found = counted(systems.static(Memory(16, 16, 4), trace), trace)
    # Prompts of 5 and 3 padded to 5, a column a step; the first one is answered after two steps, and read after three.
    assert found[:4] == [(2, 10, 8), (2, 12, 10), (2, 14, 11), (1, 16, 6)]
    assert found[4:] == [(2, 12, 8), (2, 14, 9), (1, 16, 4)]
    assert [m.waiting for m in served.moments] == [2, 2, 2, 2, 0, 0, 0]


def test_averages_are_of_the_steps_in_which_requests_wait():
    def moment(waiting, finished, held):
        return usage.Moment(5, waiting, finished, allocated=20, held=held, coming=4)

    moments = [moment(15, 0, 1), moment(15, 1, 1), moment(13, 2, 10), moment(1, 14, 14), moment(0, 15, 2)]
    served = usage.Usage(num_slots=40, num_preemptions=0, moments=moments)  # 20 requests, so from the second one on
    assert served.window == moments[2:4]
    assert served.held_of_pool == 12 / 40
    assert (served.coming_of_pool, served.wasted_of_pool, served.free_of_pool) == (4 / 40, 4 / 40, 20 / 40)
    assert served.held_of_allocated == 12 / 20
    short = usage.Usage(num_slots=40, num_preemptions=0, moments=moments[4:])
    assert short.window == moments[4:]


def test_the_systems_are_in_the_papers_order():
    trace = read_trace(WORKLOADS / "sharegpt_like.csv", 60)
    served = {name: usage.serve(make(Memory(), trace), trace) for name, make in systems.SYSTEMS.items()}
    order = ["static batches (HF)", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged"]
    for measure in ("held_of_pool", "mean_running"):
        values = [getattr(served[name], measure) for name in order]
        assert values == sorted(values), measure
        assert len(set(values)) == len(values), measure
        assert getattr(served["Orca (Oracle)"], measure) < getattr(served["Oracle without fragmentation"], measure)
    assert served["Orca (Max)"].mean_running == 7  # 15,700 slots / 2,048
    assert served["paged"].held_of_allocated >= 0.965
    for u in served.values():
        parts = (u.held_of_pool, u.coming_of_pool, u.wasted_of_pool, u.free_of_pool)
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= 0


# --- sharing


def count_shared(trace, width, lineage, block_size):
    """(blocks, entries) of all steps, from what the blocks would contain: no table, no references."""
    used = entries = 0
    for prompt, output in trace:
        beams = [tuple((t, "prompt") for t in range(prompt))] * width
        for step in range(output):
            if step > 1:
                beams = [beams[parent] for parent in next(lineage)]
            if step:
                beams = [(*beam, (step, index)) for index, beam in enumerate(beams)]
            starts = range(0, len(beams[0]), block_size)
            used += sum(len({beam[: start + block_size] for beam in beams}) for start in starts)
            entries += len(starts) * width
    return used, entries


def half_speed(width):
    return lineages.HalfSpeed(lineages.Recorded.read(WORKLOADS / "beam_lineages.json", width))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("model", [lineages.Independent, half_speed, lineages.Apart])
def test_shared_blocks_are_those_with_the_same_contents(model, width):
    trace = [Lengths(5, 30), Lengths(8, 9), Lengths(3, 1), Lengths(1, 40)]

    class Once:  # one lineage for all requests, as `count_shared` has it; a request's first two steps need none
        source = model(width).lineage(random.Random(1))

        def lineage(self, draw):
            return self.source

    found = sharing.measure_sharing(trace, width, Once(), block_size=4)
    used, entries = count_shared(trace, width, model(width).lineage(random.Random(1)), 4)
    assert found.saved == pytest.approx(1 - used / entries)
    assert found.num_requests == 4


def test_parallel_sampling_shares_the_prompts_full_blocks():
    # Blocks of 4: a prompt of 9 is 2 full blocks and a partial one, which all share in the first of 8 steps. Then 10 to
    # 16 tokens: 3 blocks for 3 steps, 4 for 4 steps, of which 2 are shared.
    found = sharing.measure_sharing([Lengths(9, 8)], 3, lineages.Apart(3), block_size=4)
    entries = 3 * (3 + 3 * 3 + 4 * 4)
    assert found.saved == pytest.approx((2 * 3 + 2 * 2 * 7) / entries)
    assert found.copies_per_token == pytest.approx(2 / (3 * 7))  # the last of the three writes in place


def test_the_scheduler_shares_as_much_among_the_samples_of_a_request():
    config = SchedulerConfig(num_blocks=99, block_size=4, max_model_len=99, max_num_seqs=8, max_num_batched_tokens=99)
    scheduler = Scheduler(config)
    request = Request("a", [0] * 9, SamplingParams(n=3, max_tokens=8, ignore_eos=True), 0)
    first, *others = (Sequence(request, index, b"") for index in range(3))
    first.unforked = list(others)
    scheduler.add(first)
    used = entries = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        used += plan.num_blocks_used
        entries += scheduler.blocks.num_entries
        for row in plan.rows:
            scheduler.append(row.sequence, 0)
            if row.sequence.num_output_tokens == 8:
                scheduler.finish(row.sequence)
    found = sharing.measure_sharing([Lengths(9, 8)], 3, lineages.Apart(3), block_size=4)
    assert found.saved == pytest.approx(1 - used / entries)


def test_more_beams_save_more_than_samples_and_lineages_that_meet_sooner_save_more():
    trace = read_trace(WORKLOADS / "alpaca_like.csv", 40)
    saved = {
        (model, width): sharing.measure_sharing(trace, width, source).saved
        for width in report.WIDTHS
        for model, source in report._lineages(WORKLOADS / "beam_lineages.json", width).items()
    }
    for width in report.WIDTHS:
        samples = sharing.measure_sharing(trace, width, lineages.Apart(width)).saved
        assert samples < min(share for (_, w), share in saved.items() if w == width)
        assert saved["recorded at half speed", width] < saved["recorded", width] < saved["independent", width]
    for model in ("recorded", "recorded at half speed", "independent"):
        assert saved[model, 2] < saved[model, 4] < saved[model, 6]


def test_a_sample_has_the_lengths_of_the_trace():
    trace = read_trace(WORKLOADS / "sharegpt_like.csv")
    few = sharing.spread(trace, 100)
    assert len(few) == 100
    assert sum(r.output for r in few) / 100 == pytest.approx(sum(r.output for r in trace) / 1000, rel=0.02)
    assert Counter(sharing.spread(trace, 5000)) == Counter(trace)


# --- lineages


def test_the_recorded_lineages_go_on_past_their_end():
    recorded = lineages.Recorded([[(0, 0), (0, 1)], [(1, 0), (1, 1)]])
    draw = random.Random(0)
    assert {tuple(zip(range(3), recorded.lineage(draw), strict=False)) for _ in range(50)} == {
        tuple(enumerate([*search, other[1]])) for search in recorded.searches for other in recorded.searches
    }


@pytest.mark.parametrize("width", report.WIDTHS)
def test_the_bundled_lineages_are_searches_of_a_model(width):
    recorded = lineages.Recorded.read(WORKLOADS / "beam_lineages.json", width)
    assert [len(search) for search in recorded.searches] == [255] * 16
    steps = [step for search in recorded.searches for step in search]
    survivors = sum(len(set(step)) for step in steps) / len(steps)
    assert 1 < survivors < width  # neither the best beam alone nor each one by itself


def test_models_of_lineages():
    draw = random.Random(0)
    half = lineages.HalfSpeed(lineages.Recorded([[(0, 0, 2), (1, 1, 1)]])).lineage(draw)
    assert [next(half) for _ in range(4)] == [(0, 0, 2), (0, 1, 2), (1, 1, 1), (0, 1, 2)]
    independent = lineages.Independent(4).lineage(draw)
    chosen = Counter(parent for _ in range(1000) for parent in next(independent))
    assert all(count == pytest.approx(1000, rel=0.15) for count in chosen.values())
    assert next(lineages.Apart(4).lineage(draw)) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't be read: JSONDecodeError"),
        ("[]", "can't be read: TypeError"),
        ("{}", "can't be read: KeyError"),
        ('{"lineages": {"4": ["0123"]}}', "has no search with 2 beams, but with 4"),
        ('{"lineages": {"2": ["011"]}}', "'011' is no search with 2 beams"),
        ('{"lineages": {"2": ["02"]}}', "'02' is no search with 2 beams"),
        ('{"lineages": {"2": ["0x"]}}', "can't be read: ValueError"),
    ],
)
def test_a_file_of_lineages_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "beams.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        lineages.Recorded.read(path, 2)
    assert str(error.value).startswith(f"lineages={str(path)!r} ")


# --- the command


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "tiny.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in TINY))
    return path


def test_the_report_is_written_without_jax(trace, tmp_path):
    pytest.importorskip("matplotlib")
    trace = trace.rename(tmp_path / "alpaca_like.csv")  # so that the paper has figures for it
    arguments = [str(SCRIPT), "--trace", str(trace), "--num-prompts", "5"]
    arguments += ["--json", str(tmp_path / "report.json"), "--plots", str(tmp_path)]
    script = (
        f"import runpy, sys; sys.argv = {arguments!r}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "assert 'jax' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for shown in ("5 requests in 15,700 slots", "paged, by block size", "blocks saved by sharing", "(9.8%)", "(55.2%)"):
        assert shown in done.stdout
    written = json.loads((tmp_path / "report.json").read_text())
    assert {"num_slots", "max_model_len", "block_size", "seed", "lineages", "date", "versions"} < written.keys()
    assert list(written["traces"]) == ["alpaca_like"]
    found = written["traces"]["alpaca_like"]
    assert found["num_requests"] == 5
    assert list(found["systems"]) == list(systems.SYSTEMS)
    for served in found["systems"].values():
        assert list(served["moments"]) == ["step", *usage.Moment._fields]
        assert {len(values) for values in served["moments"].values()} == {served["num_steps"]}  # 100 at most
    assert [int(size) for size in found["block_sizes"]] == list(report.BLOCK_SIZES)
    assert list(found["sharing"]["parallel"]) == ["2", "4", "6"]
    assert set(found["sharing"]["beam"]) == {"recorded", "recorded at half speed", "independent"}
    assert {tuple(by_width) for by_width in found["sharing"]["beam"].values()} == {("2", "4", "6")}
    for kind in ("over_time", "parts", "block_sizes", "sharing"):
        picture = (tmp_path / f"alpaca_like_{kind}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5_000


def test_a_long_runs_moments_are_thinned_out():
    moments = [usage.Moment(1, 0, 0, 8, 4, 0)] * 1_001
    steps = usage.Usage(8, 0, moments).as_json()["moments"]["step"]
    assert steps == list(range(0, 1_001, 11))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-prompts", "7"], "num_prompts=7 is more than the 6 requests"),
        (["--num-prompts", "0"], "num_prompts=0 must be at least 1"),
        (["--num-slots", "2000"], "num_slots=2000 give a buddy allocator no chunk larger than 1024, but "),
        (["--max-model-len", "15"], "request 2 has 3 prompt"),
        (["--max-model-len", "0"], "max_model_len=0 must be at least 1"),
        (["--block-size", "-1"], "block_size=-1 must be at least 1"),
        (["--block-size", "9000", "--num-slots", "8999"], "block_size=9000 leaves the 8999 slots no room"),
        (["--beam-requests", "0"], "beam_requests=0 must be at least 1"),
        (["--json", "/nowhere/report.json"], "json='/nowhere/report.json' must be a file in a folder that exists"),
        (["--plots", "/nowhere"], "plots='/nowhere' must be a folder that exists"),
        (["--lineages", "/nowhere"], "lineages='/nowhere' can't be read"),
    ],
)
def test_errors_are_one_line_before_anything_is_simulated(command, trace, options, message, monkeypatch, capsys):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(report, "serve", lambda *args: pytest.fail("simulated"))
    short = trace.read_text().replace("\n3,9\n", "\n3,13\n") if "15" in options else trace.read_text()
    trace.write_text(short)
    monkeypatch.setattr(sys, "argv", ["memory_report.py", "--trace", str(trace), *options])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"memory_report: {message}"), shown.err
    assert shown.err.count("\n") == 1


def test_the_commands_of_the_docs_are_right(command):
    page = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    lines = [line for line in page if line.startswith(".venv/bin/python scripts/memory_report.py")]
    assert len(lines) == 3
    for line in lines:
        args = command.parse(line.split()[2:])
        traces = [path if path.is_absolute() else ROOT / path for path in args.trace]
        assert report.read_traces(report.Options(traces, args.lineages, command.memory_of(args)))


def test_plots_without_matplotlib_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--plots needs matplotlib, .* pip install 'jaxpaged\[bench\]'$"):
        plots.check_plots(tmp_path)
    plots.check_plots(None)


def test_two_traces_of_one_name_are_refused(trace, tmp_path):
    other = tmp_path / "more" / trace.name
    other.parent.mkdir()
    other.write_text(trace.read_text())
    options = report.Options(traces=[trace, other], lineages=WORKLOADS / "beam_lineages.json")
    with pytest.raises(ValueError, match="there is another one with the name tiny"):
        report.make(options)
