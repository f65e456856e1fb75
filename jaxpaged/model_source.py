"""Where a model comes from: a checkpoint with its tokenizer, or a published shape with random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpaged.checkpoints.demo import demo_model_path
from jaxpaged.checkpoints.reader import open_checkpoint
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.loading import load_params
from jaxpaged.models.random_params import random_params
from jaxpaged.models.registry import FAMILIES, Family, family_of
from jaxpaged.models.shapes import RANDOM, shape
from jaxpaged.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """All that an engine needs of a model; the parameters are read or made when they are asked for."""

    family: Family
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None for random weights."""
    eos_token_ids: tuple[int, ...]
    params: Callable[[jnp.dtype], dict[str, Any]]
    """Gives the parameters, on the default device, in a dtype."""


def open_model(model: str) -> ModelSource:
    """Opens what `EngineConfig.model` names; no tensor is read.

    Raises:
      ValueError: there is no such checkpoint or shape, or the checkpoint is at fault.
    """
    if model.startswith(RANDOM):
        return _random(model.removeprefix(RANDOM))
    reader = open_checkpoint(demo_model_path() if model == "demo" else Path(model))
    family = family_of(reader.hf_config, str(reader.path))
    config = family.config(reader.hf_config, str(reader.path))
    tokenizer = Tokenizer.from_checkpoint(reader)
    return ModelSource(
        family,
        config,
        tokenizer,
        reader.eos_token_ids or tuple(i for i in [tokenizer.eos_token_id] if i is not None),
        lambda dtype: load_params(reader, family.weights(config), family.ignored_tensors, dtype),
    )


def _random(name: str) -> ModelSource:
    config = shape(name)
    family = FAMILIES[config.architecture]
    return ModelSource(family, config, None, (), functools.partial(random_params, family.weights(config)))
