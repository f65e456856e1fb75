"""Percentiles, the table and the JSON file."""

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxpaged.bench import report


@pytest.mark.parametrize("num", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(num):
    values = [random.Random(num).expovariate(1) for _ in range(num)]
    np.testing.assert_allclose(report.percentiles(values), np.percentile(values, [50, 90, 99]), rtol=1e-12)


def test_a_run_without_a_figure_leaves_its_cell_empty():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table({"one": {"seconds": "1", "steps": "2"}, "two": {"seconds": "3"}}))
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in console.export_text().splitlines()]
    assert ["seconds", "1", "3"] in rows
    assert ["steps", "2", ""] in rows


def test_a_spread_keeps_four_digits():
    assert report.spread(report.Percentiles(0.123456, 12.3456, 12345.6), "ms") == "0.1235 / 12.35 / 12,346 ms"


def test_the_json_file_tells_the_date_and_the_versions(tmp_path):
    path = tmp_path / "results.json"
    report.write_json(path, {"runs": {"a": 1}})
    written = json.loads(path.read_text())
    assert written["runs"] == {"a": 1}
    assert written["versions"]["jax"]
    assert written["date"].endswith("+00:00")


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "new.json"):
        with pytest.raises(ValueError, match=r"json='.*' must be a file in a folder that exists"):
            report.check_writable("json", path)
        with pytest.raises(ValueError, match="can't be written"):
            report.write_json(path, {})
    # What only an attempt tells: rights, a name that is too long, a file system that takes no files.
    for path in (tmp_path / ("x" * 300), Path("/proc/new.json")):
        with pytest.raises(ValueError, match=r"plot='.*' can't be written: "):
            report.check_writable("plot", path)


def test_the_check_leaves_files_as_they_are(tmp_path):
    report.check_writable("json", None)
    report.check_writable("json", tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("kept")
    report.check_writable("json", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is always full")
def test_a_json_file_that_fails_after_the_run_is_one_line_under_the_results(run):
    args = ["--batch-size", 2, "--input-len", 3, "--output-len", 2, "--iters", 1, "--json", "/dev/full"]
    result = run("latency", "--model", "tiny", *args)
    assert result.exit_code == 2
    assert "seconds an iteration" in result.stdout
    assert result.stderr.startswith("jaxpaged: json='/dev/full' can't be written: ")
    assert result.stderr.count("\n") == 1
