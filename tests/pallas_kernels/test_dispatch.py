import pytest

from pallas_kernels.dispatch import Implementation, choose

FAST = Implementation("fast", lambda x: "fast", lambda x: None if x % 2 == 0 else "x is odd")
SLOW = Implementation("slow", lambda x: "slow", lambda x: None if x >= 0 else "x is negative")
BOTH = (FAST, SLOW)


def test_none_takes_the_first_that_serves():
    assert choose("op", BOTH, None, 2) is FAST
    assert choose("op", BOTH, None, 3) is SLOW


def test_a_wanted_one_serves_or_says_why_not():
    assert choose("op", BOTH, "slow", 2) is SLOW
    with pytest.raises(ValueError, match="op: implementation='fast' can't serve this call: x is odd"):
        choose("op", BOTH, "fast", 3)


def test_nobody_serves():
    with pytest.raises(ValueError, match="fast: x is odd; slow: x is negative"):
        choose("op", BOTH, None, -1)
