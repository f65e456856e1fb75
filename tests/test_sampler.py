"""The sampler against exact integer and float64 references, its independence of the batch, and its edits."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpaged.batch import sampling_words
from jaxpaged.executables import draws_of
from jaxpaged.sampler import Draws, SampleOutput, SamplingInputs, alternatives, sample
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.sampling import draw, fixed_point_weights, kth_largest, top_p_threshold
from pallas_kernels.sampling.fixed_point import Mass, fraction, limb_bits, total_mass

MAX_LOGPROBS = 5
jitted_sample = jax.jit(sample, static_argnames="draws")
jitted_draw = jax.jit(draw)


def awkward_logits(rows: int, vocab: int, seed: int, tiny: float = 1e-37) -> np.ndarray:
    """Rows with ties, -inf, huge and tiny values, both zeros, and wide spreads."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * rng.choice([1e-3, 1.0, 4.0, 1e3], size=(rows, 1))
    logits = np.where(rng.random((rows, 1)) < 0.3, np.round(logits), logits)
    for value in (-np.inf, 3e38, -3e38, tiny, 0.0, -0.0):
        logits = np.where((rng.random((rows, 1)) < 0.2) & (rng.random(logits.shape) < 0.05), value, logits)
    return logits.astype(np.float32)


def make_inputs(rows: int, vocab: int, **given: Any) -> SamplingInputs:
    """Inputs of `rows` rows; scalars stand for every row. Seeds are single numbers."""
    asked = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0, **given}
    dtypes = {"top_k": np.int32, "positions": np.int32, "seeds": np.uint32}
    columns = {name: np.broadcast_to(v, (rows,)).astype(dtypes.get(name, np.float32)) for name, v in asked.items()}
    columns["seeds"] = np.stack([columns["seeds"] * 0 + 9, columns["seeds"]], axis=1)
    return SamplingInputs(**columns)  # pyright: ignore[reportArgumentType]


def run(
    raw: np.ndarray, inputs: SamplingInputs, edited: np.ndarray | None = None, draws: Draws = Draws.CUT
) -> SampleOutput:
    return jax.tree.map(np.asarray, jitted_sample(raw, raw if edited is None else edited, inputs, draws=draws))


def reference_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """vLLM's order, in float64, with sorting."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs = np.where(probs >= min_p, probs, 0)
    probs = np.where(logits >= np.sort(logits)[::-1][top_k - 1], probs, 0)
    order = np.sort(probs)[::-1]
    reached = np.searchsorted(np.cumsum(order) / order.sum(), top_p, side="left") if top_p < 1 else len(order) - 1
    probs = np.where(probs >= order[reached], probs, 0)
    return probs / probs.sum()


class TestThresholds:
    @pytest.mark.parametrize("k", [1, 2, 7, 50, 299, 300])
    def test_kth_largest_is_exact(self, k: int) -> None:
        x = awkward_logits(64, 300, seed=k, tiny=1e-40)  # a subnormal
        found = jax.jit(kth_largest)(x, np.full(64, k, np.int32))
        np.testing.assert_array_equal(found, np.sort(x, axis=1)[:, 300 - k])

    def test_kth_largest_takes_a_k_for_each_row_and_clips_it(self) -> None:
        x = awkward_logits(300, 300, seed=1)
        found = np.asarray(kth_largest(jnp.asarray(x), jnp.arange(0, 600, 2)))
        k = np.clip(np.arange(0, 600, 2), 1, 300)
        np.testing.assert_array_equal(found, np.sort(x, axis=1)[np.arange(300), 300 - k])

    @pytest.mark.parametrize("p", [1e-30, 0.1, 0.5, 0.9, 0.999, 1.0])
    def test_top_p_threshold_is_exact(self, p: float) -> None:
        rng = np.random.default_rng(5)
        weights = rng.integers(0, 2**30, (40, 300), dtype=np.uint32) >> rng.integers(0, 30, (40, 300), dtype=np.uint32)
        weights[::3] &= 0x30000000  # ties
        weights[:, 0] = 77
        found = jax.jit(top_p_threshold)(weights, np.full(40, p, np.float32))
        for row, threshold in zip(weights.tolist(), found.tolist(), strict=True):
            target = Fraction(float(np.float32(p))) * sum(row)
            largest = max(t for t in row if sum(w for w in row if w >= t) >= target)
            kept, expected = sum(w for w in row if w >= threshold), sum(w for w in row if w >= largest)
            if kept != expected:  # only where float32 can't tell the mass from the target
                assert abs(kept - target) <= 3e-7 * target

    def test_top_p_stops_where_the_mass_is_just_enough(self) -> None:
        weights = np.array([[1, 0, 4, 1, 2]] * 5, np.uint32)
        p = np.array([0.5, 0.5000001, 0.75, 0.76, 1.0], np.float32)
        assert jax.jit(top_p_threshold)(weights, p).tolist() == [4, 2, 2, 1, 1]

    @pytest.mark.parametrize("vocab", [1, 300, 49152, 2**17, 2**17 + 1, 2**18, 2**21])
    def test_no_sum_of_weights_overflows(self, vocab: int) -> None:
        bits = limb_bits(vocab)
        weights = jax.jit(fixed_point_weights)(np.ones((1, vocab), np.float32))
        largest = int(weights[0, 0])
        assert 2 ** (2 * bits) * (1 - 2.0**-20) <= largest < 2 ** (2 * bits)
        mass = total_mass(weights, bits)
        assert int(mass.high[0]) * 2**bits + int(mass.low[0]) == largest * vocab

    def test_weights_of_odd_values(self) -> None:
        values = np.array([[np.nan, -1.0, -np.inf, 0.0, 1e-30, 0.5, 1.0, 2.0, np.inf]], np.float32)
        full = 2**30 - 64
        expected = [0, 0, 0, 0, 0, full // 2, full, full, full]
        assert fixed_point_weights(jnp.asarray(values))[0].tolist() == expected


class TestDraw:
    @pytest.mark.parametrize("vocab", [1, 512, 513, 3000])
    def test_inverse_cdf_in_exact_integers(self, vocab: int) -> None:
        rng = np.random.default_rng(vocab)
        uniform = np.concatenate([[0, 1, 2**31, 2**32 - 2, 2**32 - 1], rng.integers(0, 2**32, 35)]).astype(np.uint32)
        weights = rng.integers(0, 2**30, (40, vocab), dtype=np.uint32) >> rng.integers(0, 30, (40, 1), dtype=np.uint32)
        weights[rng.random(weights.shape) < 0.4] = 0
        weights[:, -1] = 0 if vocab > 1 else 1  # the ends must not be drawn either
        weights[np.arange(40), rng.integers(0, max(vocab - 1, 1), 40)] += 1
        drawn = np.asarray(jitted_draw(weights, uniform, np.full(40, -7, np.int32)))
        ends = np.cumsum(weights.astype(object), axis=1)
        assert (weights[np.arange(40), drawn] > 0).all()
        for row_ends, token, u in zip(ends, drawn.tolist(), uniform.tolist(), strict=True):
            target = row_ends[-1] * u // 2**32  # `fraction` rounds down, by at most one more
            start = row_ends[token - 1] if token else 0
            assert start <= target < row_ends[token] + 1

    def test_a_single_possible_token_is_always_drawn(self) -> None:
        weights = np.zeros((3000, 1500), np.uint32)
        tokens = np.random.default_rng(0).integers(0, 1500, 3000)
        weights[np.arange(3000), tokens] = 1
        uniform = np.resize(np.array([0, 2**31, 2**32 - 1], np.uint32), 3000)
        np.testing.assert_array_equal(jitted_draw(weights, uniform, np.zeros(3000, np.int32)), tokens)

    def test_nothing_to_draw_gives_the_fallback(self) -> None:
        drawn = jitted_draw(
            np.zeros((2, 700), np.uint32), np.array([0, 2**32 - 1], np.uint32), np.array([5, 699], np.int32)
        )
        assert drawn.tolist() == [5, 699]

    def test_fraction_is_below_the_mass(self) -> None:
        rng = np.random.default_rng(3)
        high = np.concatenate([[0, 0, 2**32 - 1], rng.integers(0, 2**32, 500)]).astype(np.uint32)
        low = np.concatenate([[1, 2**14 - 1, 2**14 - 1], rng.integers(0, 2**14, 500)]).astype(np.uint32)
        uniform = np.concatenate([[2**32 - 1] * 3, rng.integers(0, 2**32, 500)]).astype(np.uint32)
        part = fraction(Mass(jnp.asarray(high), jnp.asarray(low)), jnp.asarray(uniform), 14)
        for h, lo, u, ph, pl in zip(*(a.tolist() for a in (high, low, uniform, *part)), strict=True):
            mass, found = h * 2**14 + lo, ph * 2**14 + pl
            assert mass * u // 2**32 - 1 <= found <= mass * u // 2**32 < mass
            assert pl < 2**14


class TestOutput:
    def test_greedy_takes_the_lowest_of_the_best(self) -> None:
        logits = awkward_logits(60, 700, seed=2)
        logits[7] = -np.inf
        output = run(logits, make_inputs(60, 700, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0))
        np.testing.assert_array_equal(output.token_ids, np.argmax(logits, axis=1))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_ratings_are_those_of_the_raw_logits(self, temperature: float) -> None:
        rng = np.random.default_rng(4)
        raw = np.round(rng.normal(size=(60, 700)) * 3, 1).astype(np.float32)
        edited = rng.normal(size=(60, 700)).astype(np.float32)
        inputs = make_inputs(60, 700, temperature=temperature, positions=np.arange(60))
        output = run(raw, inputs, edited)
        np.testing.assert_array_equal(output.token_ids, run(edited, inputs).token_ids)
        exact = raw.astype(np.float64)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
        chosen = np.take_along_axis(exact, output.token_ids[:, None], axis=1)
        np.testing.assert_allclose(output.rating.logprobs, chosen[:, 0], atol=1e-5)
        np.testing.assert_array_equal(output.rating.ranks, 1 + (exact > chosen).sum(axis=1))
        best = alternatives(jnp.asarray(raw), MAX_LOGPROBS)
        np.testing.assert_allclose(best.logprobs, -np.sort(-exact, axis=1)[:, :MAX_LOGPROBS], atol=1e-5)
        np.testing.assert_array_equal(best.token_ids, np.argsort(-exact, axis=1, kind="stable")[:, :MAX_LOGPROBS])

    def test_alternatives_are_no_more_than_the_vocabulary(self) -> None:
        best = alternatives(jnp.array([[0.5, 2.0, 1.0]]), MAX_LOGPROBS)
        assert best.token_ids.tolist() == [[1, 2, 0]]
        assert alternatives(jnp.zeros((2, 3)), 0).logprobs.shape == (2, 0)

    @pytest.mark.parametrize(
        "bad", [np.zeros((2, 9), np.float16), np.zeros((2, 8), np.float32), np.zeros(9, np.float32)]
    )
    def test_wrong_logits_are_refused(self, bad: np.ndarray) -> None:
        good = jnp.zeros((2, 9), jnp.float32)
        with pytest.raises(ValueError, match=r"edited_logits is .*float32"):
            sample(good, jnp.asarray(bad), make_inputs(2, 9), draws=Draws.CUT)


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.95, "min_p": 0.3},
]


class TestDistribution:
    DRAWS = 4096

    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
    def test_matches_the_reference(self, case: dict[str, Any], ties: bool) -> None:
        logits = np.random.default_rng(11).normal(size=40) * 1.5
        logits = (np.round(logits * 2) / 2 if ties else logits).astype(np.float32)
        logits[3] = -np.inf
        asked = {"temperature": 1.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0} | case
        expected = reference_probabilities(logits, **asked) * self.DRAWS
        inputs = make_inputs(self.DRAWS, 40, **asked, positions=np.arange(self.DRAWS), seeds=3)
        output = run(np.tile(logits, (self.DRAWS, 1)), inputs)
        seen = np.bincount(output.token_ids, minlength=40)
        assert not seen[expected == 0].any()
        likely = expected >= 5
        assert (seen[likely] > 0).all()
        observed, wanted = seen[likely], expected[likely]
        if not likely.all():  # the rest as one cell
            observed, wanted = np.append(observed, seen[~likely].sum()), np.append(wanted, expected[~likely].sum())
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        if len(wanted) > 1:
            assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-3

    def test_seeds_are_as_random_as_positions(self) -> None:
        inputs = make_inputs(self.DRAWS, 40, seeds=np.arange(self.DRAWS), positions=100)
        seen = np.bincount(run(np.zeros((self.DRAWS, 40), np.float32), inputs).token_ids, minlength=40)
        assert scipy.stats.chisquare(seen).pvalue > 1e-3

    @pytest.mark.parametrize(
        "narrowest", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-45}, {"min_p": 1.0}, {"temperature": 1e-5}], ids=str
    )
    def test_the_narrowest_choice_is_the_best_token(self, narrowest: dict[str, float]) -> None:
        logits = np.random.default_rng(0).permuted(np.tile(np.linspace(-3, 9, 700, dtype=np.float32), (60, 1)), axis=1)
        output = run(logits, make_inputs(60, 700, **narrowest, positions=np.arange(60)))
        np.testing.assert_array_equal(output.token_ids, np.argmax(logits, axis=1))

    def test_extreme_temperatures_never_choose_a_banned_token(self) -> None:
        logits = np.full((60, 700), -np.inf, np.float32)
        logits[:, [0, 699]] = [-3e38, 3e38]
        for temperature in (1e-30, 1e-5, 1.0, 3e38, np.inf):
            ids = run(logits, make_inputs(60, 700, temperature=temperature, positions=np.arange(60))).token_ids
            assert set(ids.tolist()) <= {0, 699}

    def test_top_k_off_values(self) -> None:
        logits = awkward_logits(60, 700, seed=8)
        ids = [run(logits, make_inputs(60, 700, top_k=k)).token_ids.tolist() for k in (700, 0, -1, 10**9)]
        assert ids[1:] == ids[:1] * 3


def mixed_batch(rows: int, vocab: int) -> tuple[np.ndarray, SamplingInputs]:
    rng = np.random.default_rng(rows)
    inputs = make_inputs(
        rows,
        vocab,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], rows),
        top_k=rng.choice([1, 10, 200, vocab], rows),
        top_p=rng.choice([0.5, 0.95, 1.0], rows),
        min_p=rng.choice([0.0, 0.01], rows),
        seeds=rng.integers(0, 2**32, rows),
        positions=rng.integers(0, 4000, rows),
    )
    return rng.normal(size=(rows, vocab)).astype(np.float32) * 2, inputs


def pick(inputs: SamplingInputs, rows: np.ndarray) -> SamplingInputs:
    return SamplingInputs(*(column[rows] for column in inputs))


@pytest.fixture(scope="module")
def whole() -> tuple[np.ndarray, SamplingInputs, SampleOutput]:
    logits, inputs = mixed_batch(TestIndependence.ROWS, TestIndependence.VOCAB)
    return logits, inputs, run(logits, inputs)


class TestIndependence:
    ROWS, VOCAB = 48, 2003

    @pytest.mark.parametrize("size", [1, 16])
    def test_of_batch_size_and_index(self, whole: tuple[np.ndarray, SamplingInputs, SampleOutput], size: int) -> None:
        logits, inputs, output = whole
        order = np.random.default_rng(size).permutation(self.ROWS)
        for rows in order.reshape(-1, size):
            part = run(logits[rows], pick(inputs, rows))
            np.testing.assert_array_equal(part.token_ids, output.token_ids[rows])
            np.testing.assert_array_equal(part.rating.ranks, output.rating.ranks[rows])

    def test_of_neighbours_and_padding(self, whole: tuple[np.ndarray, SamplingInputs, SampleOutput]) -> None:
        logits, inputs, output = whole
        keep = np.arange(self.ROWS) % 3 != 0
        for filler, temperature in ((0.0, 0.0), (np.nan, 1.0), (-np.inf, 1.0), (np.inf, 1.0), (3e38, 0.7)):
            others = np.where(keep[:, None], logits, np.float32(filler))
            changed = inputs._replace(temperature=np.where(keep, inputs.temperature, np.float32(temperature)))
            found = run(others, changed)
            np.testing.assert_array_equal(found.token_ids[keep], output.token_ids[keep])
            np.testing.assert_array_equal(found.rating.logprobs[keep], output.rating.logprobs[keep])
            assert ((found.token_ids >= 0) & (found.token_ids < self.VOCAB)).all()

    def test_of_what_others_ask_for(self, whole: tuple[np.ndarray, SamplingInputs, SampleOutput]) -> None:
        logits, inputs, output = whole
        is_greedy = inputs.temperature == 0
        is_plain = is_greedy | ((inputs.top_k == self.VOCAB) & (inputs.top_p == 1))
        for draws, keep in ((Draws.GREEDY, is_greedy), (Draws.PLAIN, is_plain)):
            assert keep.any()
            assert not keep.all()
            found = run(logits[keep], pick(inputs, keep), draws=draws)
            np.testing.assert_array_equal(found.token_ids, output.token_ids[keep])

    def test_one_nan_spoils_its_own_row_only(self, whole: tuple[np.ndarray, SamplingInputs, SampleOutput]) -> None:
        logits, inputs, output = whole
        spoiled = logits.copy()
        spoiled[5, 17] = np.nan
        found = run(spoiled, inputs)
        others = np.arange(self.ROWS) != 5
        np.testing.assert_array_equal(found.token_ids[others], output.token_ids[others])
        assert 0 <= found.token_ids[5] < self.VOCAB

    def test_randomness_is_seed_and_position(self) -> None:
        flat = np.zeros((16, self.VOCAB), np.float32)
        inputs = make_inputs(16, self.VOCAB, seeds=[1, 1, 1, 2] * 4, positions=[0, 1, 0, 0] + [7] * 12)
        ids = run(flat, inputs).token_ids.tolist()
        assert ids == run(flat, inputs).token_ids.tolist()
        assert ids[0] == ids[2]
        assert len(set(ids[:4])) == 3
        high_word = inputs._replace(seeds=inputs.seeds + np.array([1, 0], np.uint32))
        assert run(flat, high_word).token_ids[0] != ids[0]


@pytest.mark.parametrize(
    ("asked", "draws"),
    [
        ([{"temperature": 0.0, "top_k": 5, "top_p": 0.5}], Draws.GREEDY),
        ([{}, {"min_p": 0.1}, {"temperature": 0.0}], Draws.PLAIN),
        ([{}, {"top_k": 9}], Draws.CUT),
        ([{"top_p": 0.999}, {"temperature": 0.0}], Draws.CUT),
        ([{"top_k": 100}, {"top_k": -1}], Draws.PLAIN),  # 100 is the vocabulary
    ],
)
def test_what_a_step_asks_for(asked: list[dict[str, Any]], draws: Draws) -> None:
    words = b"".join(sampling_words(SamplingParams(**params), 2**63 + 1, 100) for params in asked)
    assert draws_of(np.frombuffer(words, np.int32).reshape(len(asked), -1), 100) is draws


class TestCompiled:
    def test_values_do_not_retrace(self) -> None:
        logits = awkward_logits(60, 700, seed=0)
        run(logits, make_inputs(60, 700))
        before = jitted_sample._cache_size()
        for case in [{"temperature": 0.0}, *CASES]:
            run(logits, make_inputs(60, 700, **case))
        assert jitted_sample._cache_size() == before

    def test_nothing_sorts_the_vocabulary(self) -> None:
        logits = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
        inputs = make_inputs(8, 4096)
        lowered = jitted_sample.lower(logits, logits, inputs, draws=Draws.CUT)
        for text in (lowered.as_text(), lowered.compile().as_text() or ""):
            assert "while" in text  # the thresholds are there
            assert not re.search(r"stablehlo\.(case|if)|\bconditional\(", text)  # where the host would wait
            assert not re.search(r'stablehlo\.sort|chlo\.top_k|\bsort\(|"TopK"', text)
        assert "chlo.top_k" in jax.jit(lambda x: alternatives(x, 5)).lower(logits).as_text()  # it would be found
