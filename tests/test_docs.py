"""The Python in README and docs runs as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/kernels.md"]


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
    assert {"README.md": "Paris", "docs/kernels.md": "(20, 8, 64)"}[page] in printed


def test_every_page_that_is_linked_exists():
    for page in ["README.md", *(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
