"""The Python in README and docs runs as printed, and the benchmarks' commands start."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxpaged.cli import app

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "Paris", "docs/kernels.md": "(20, 8, 64)", "docs/benchmarks.md": "8\n"}
"""Each with something that it prints."""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_python_runs_as_printed(page, demo_path, capsys):
    code = blocks(page)
    assert code
    scope: dict = {}
    for block in code:
        exec(compile(block, page, "exec"), scope)
    printed = capsys.readouterr().out
    assert PAGES[page] in printed


def test_every_page_that_is_linked_exists():
    for page in ["README.md", *(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def bench_commands() -> list[str]:
    lines = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    return [line.removeprefix(".venv/bin/") for line in lines if line.startswith(".venv/bin/jaxpaged bench")]


@pytest.mark.parametrize("command", bench_commands())
def test_benchmarks_get_as_far_as_loading_the_model(command, monkeypatch, tmp_path):
    """Options, traces and shapes of the printed commands are right; what follows needs a GPU."""

    def load(*args, **options):
        raise ValueError("loading")

    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workloads").symlink_to(ROOT / "workloads")
    monkeypatch.setattr("jaxpaged.llm.LLM", load)
    monkeypatch.setattr("jaxpaged.bench.hf.load", load)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert (result.stderr, result.exit_code) == ("jaxpaged: loading\n", 2)
