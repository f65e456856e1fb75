"""`run`: the benchmarks' command line on the session's tiny model."""

import json
import logging

import pytest
import tiny
from typer.testing import CliRunner

from jaxpaged.cli import app


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture
def run(llm, monkeypatch, tmp_path):
    """Runs `jaxpaged bench ...`; `run.options` are what was loaded, `run.json()` is what was written."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # what the user sets stands
    monkeypatch.setenv("COLUMNS", "200")
    level = logging.getLogger("jaxpaged").level
    path = tmp_path / "results.json"

    def load(**options):
        run.options = options
        return llm

    def run(command: str, *args: object):
        run.options = None
        with monkeypatch.context() as patch:
            patch.setattr("jaxpaged.llm.LLM", load)
            return CliRunner().invoke(app, ["bench", command, "--json", str(path), *map(str, args)])

    run.json = lambda: json.loads(path.read_text())
    yield run
    logging.getLogger("jaxpaged").setLevel(level)


@pytest.fixture
def trace(tmp_path):
    """Writes a trace and gives its path."""

    def write(*lines: str):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
