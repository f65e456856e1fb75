"""Fixtures that several rooms' tests share. Compiled engines are made once a session: compiling is what takes time."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def demo_path():
    """The demo model's GGUF file, fetched once into the user's cache."""
    from jaxpaged.checkpoints.demo import demo_model_path

    return demo_model_path()
