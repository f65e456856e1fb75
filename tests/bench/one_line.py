"""How a command fails by a user's mistake."""

from __future__ import annotations

from click.testing import Result


def assert_one_line_error(result: Result, message: str) -> None:
    """The command failed as a user's mistake, with this message alone."""
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("jaxpaged: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
