import dataclasses

import pytest

from jaxpaged.config import BLOCK_SIZES, EngineConfig, SchedulerConfig, blocks_for


def test_defaults():
    config = EngineConfig(model="demo")
    assert (config.block_size, config.gpu_memory_utilization, config.dtype, config.seed) == (16, 0.9, "auto", 0)
    given = dataclasses.asdict(config)
    optional = ("max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens")
    assert [given[name] for name in optional] == [None] * 5


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(block_size):
    assert EngineConfig(model="demo", block_size=block_size).block_size == block_size


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("model", "", "must be a path"),
        ("model", None, "must be a path"),
        ("dtype", "int8", "is unknown; choose one of auto, float32, bfloat16, float16"),
        ("dtype", ["float32"], "is unknown"),
        ("block_size", 0, "must be one of 8, 16, 32, 64, 128"),
        ("block_size", 24, "must be one of"),
        ("block_size", 16.0, "must be one of"),
        ("block_size", True, "must be one of"),
        ("max_model_len", 1, "must be an integer of at least 2 or None"),
        ("max_model_len", 10.5, "must be an integer"),
        ("num_kv_blocks", -1, "must be an integer of at least 1"),
        ("num_kv_blocks", True, "must be an integer"),
        ("kv_cache_memory_bytes", "1G", "must be an integer"),
        ("max_num_seqs", 0, "must be an integer of at least 1"),
        ("max_num_batched_tokens", 0, "must be an integer of at least 1"),
        ("seed", None, "must be an integer of at least 0"),
        ("seed", -1, "must be an integer of at least 0"),
        ("max_logprobs", -1, "must be an integer of at least 0"),
        ("kv_reservation", "all", "is unknown; choose one of none, max, pow2, oracle"),
        ("enable_prefix_caching", "yes", "must be True or False"),
        ("static_batches", 1, "must be True or False"),
        ("gpu_memory_utilization", 0, r"must be in \(0, 1\]"),
        ("gpu_memory_utilization", 1.01, r"must be in \(0, 1\]"),
        ("gpu_memory_utilization", float("nan"), r"must be in \(0, 1\]"),
        ("gpu_memory_utilization", "0.9", r"must be in \(0, 1\]"),
        ("gpu_memory_utilization", True, r"must be in \(0, 1\]"),
    ],
)
def test_each_rule_names_field_and_value(field, value, rule):
    with pytest.raises(ValueError, match=rf"^{field}=.*{rule}") as caught:
        EngineConfig(**{"model": "demo", field: value})
    assert repr(value) in str(caught.value)


def test_one_size_for_the_pool_at_most():
    with pytest.raises(ValueError, match="num_kv_blocks=4 and kv_cache_memory_bytes=1024 both size the pool; give one"):
        EngineConfig(model="demo", num_kv_blocks=4, kv_cache_memory_bytes=1024)


def scheduler_config(**changes):
    fields = {"num_blocks": 8, "block_size": 16, "max_model_len": 100, "max_num_seqs": 4, "max_num_batched_tokens": 4}
    return SchedulerConfig(**{**fields, **changes})


def test_the_table_is_as_wide_as_the_longest_sequence_needs():
    assert scheduler_config().table_width == 7
    assert scheduler_config(max_model_len=96).table_width == 6
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_numbers_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=3 must be at least max_num_seqs=4"):
        scheduler_config(max_num_batched_tokens=3)
    with pytest.raises(ValueError, match="no block left for sequences"):
        scheduler_config(num_blocks=0)
