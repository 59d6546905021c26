"""The law of the draws, against exact probabilities.

Draws are functions of fixed seeds, so no test is flaky; ``LEVEL`` is the chance that a right law would have been
rejected when the test was written. The tests of the tests show that wrong laws are rejected by far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from scipy import stats
from sgl_vase_kernels import KVPool, QueryWindow, Rows, ops

from sgl_vase import Round, policy_class

LEVEL = 1e-4
LAYERS, HEADS, ROWS = 64, 64, 50
DRAWS = LAYERS * HEADS * ROWS
"""One draw a layer, head and row: 204,800."""


def pool(layers: int = LAYERS, heads: int = HEADS, slots: int = 1, dim: int = 1, fill: float = 0.0) -> KVPool:
    buffers = tuple(torch.full((slots, 1, heads, dim), fill) for _ in range(layers))
    return KVPool(buffers, buffers)


def rows(n: int, keep: int, count: int = ROWS, *, reserve: int = 0, round: int = 0, same: bool = False) -> Rows:
    """``count`` requests of ``n`` candidates, each with a seed of its own, no buffer; ``same``: in the same slots."""
    slots = torch.arange(n).repeat(count) if same else torch.arange(n * count)
    fixed = {name: (value,) * count for name, value in (("first", 0), ("keep", keep), ("sinks", 0), ("carried", 0))}
    return Rows(
        slots, (n,) * count, 0, reserve=(reserve,) * count, seed=tuple(range(count)), round=(round,) * count, **fixed
    )


def successive(weights: Iterable[float], size: int) -> dict[frozenset[int], float]:
    """Plackett-Luce: exact probability of each set that ``size`` draws without replacement can give."""
    weights = list(weights)
    law: dict[frozenset[int], float] = {}
    for order in itertools.permutations([i for i, w in enumerate(weights) if w > 0], size):
        left, chance = sum(weights), 1.0
        for i in order:
            chance *= weights[i] / left
            left -= weights[i]
        law[frozenset(order)] = law.get(frozenset(order), 0.0) + chance
    assert math.isclose(sum(law.values()), 1)
    return law


def p_value(kept: torch.Tensor, law: dict[frozenset[int], float], n: int) -> float:
    """Chi-square of the kept sets ``[draws, keep]`` against a law of sets; an impossible set gives 0."""
    bits = np.bincount((1 << kept).sum(-1).flatten().numpy(), minlength=2**n)
    index = [sum(1 << i for i in members) for members in law]
    if bits.sum() != bits[index].sum():
        return 0.0
    return stats.chisquare(bits[index], bits.sum() * np.array(list(law.values()))).pvalue


def draw(weights: torch.Tensor, keep: int, **kwargs: int) -> torch.Tensor:
    """Survivors ``[DRAWS, keep]`` of races with the same weights."""
    n = len(weights)
    score = weights.repeat(ROWS).expand(LAYERS, HEADS, -1).contiguous()
    kept = ops.select(pool(), rows(n, keep, **kwargs), score, race=True)
    return kept.view(LAYERS, HEADS, ROWS, keep)


WEIGHTS = torch.tensor([0.4, 0.05, 0.2, 0.02, 0.23, 0.1])


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_race_is_plackett_luce(keep):
    kept = draw(WEIGHTS, keep)
    law = successive(WEIGHTS.double().tolist(), keep)
    assert p_value(kept, law, 6) > LEVEL
    for i in range(6):  # the same, seen as inclusion probabilities
        chance = sum(p for members, p in law.items() if i in members)
        hits = (kept == i).sum().item()
        assert stats.binomtest(hits, DRAWS, chance).pvalue > LEVEL / 6


@pytest.mark.parametrize(
    "wrong", [lambda w: w**1.03, lambda w: w + 0.002, lambda w: w.roll(1), lambda w: w.masked_fill(w == 0.02, 0)]
)
def test_a_slightly_wrong_weight_is_seen(wrong: Callable[[torch.Tensor], torch.Tensor]):
    assert p_value(draw(wrong(WEIGHTS), 3), successive(WEIGHTS.double().tolist(), 3), 6) < LEVEL


def test_independent_draws_instead_of_successive_ones_are_seen():
    """Inclusion proportional to weight is another law: the chi-square tells them apart."""
    law = successive(WEIGHTS.double().tolist(), 3)
    poisson = {s: math.prod(WEIGHTS[i].item() for i in s) for s in law}
    total = sum(poisson.values())
    assert p_value(draw(WEIGHTS, 3), {s: p / total for s, p in poisson.items()}, 6) < LEVEL


def test_weights_spread_over_many_magnitudes():
    weights = torch.tensor([1e-30, 1e-38, 3e-30, 1e-44, 2e-30, 1e-30])
    exact = weights.double()
    exact[[1, 3]] = 0  # drawn once in 1e8
    assert p_value(draw(weights, 2), successive(exact.tolist(), 2), 6) > LEVEL


def test_too_few_positive_weights_are_filled_up_uniformly():
    """Two positive of seven, four kept: both stay, the other two are uniform, NaN, zero and negative alike."""
    kept = draw(torch.tensor([0.0, 3.0, torch.nan, -1.0, 0.1, 0.0, -torch.inf]), 4)
    rest = [0, 2, 3, 5, 6]
    law = {frozenset({1, 4, *pair}): 0.1 for pair in itertools.combinations(rest, 2)}
    assert p_value(kept, law, 7) > LEVEL


@pytest.mark.parametrize("number", [0, 1, 70_000])
def test_random_is_uniform(number):
    policy = policy_class("random")({"sinks": False})
    kept = policy.select(Round(pool(), rows(6, 3, round=number)))
    law = {frozenset(s): 1 / 20 for s in itertools.combinations(range(6), 3)}
    assert p_value(kept.view(-1, ROWS, 3), law, 6) > LEVEL


def test_attnv_draws_by_its_attention_beside_the_reserve():
    """The whole policy: one candidate reserved by its value, three of five drawn by their attention."""
    n, dim = 6, 4
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, n, 1, 1, dim, generator=generator)
    v[3] *= 10
    q = torch.randn(1, dim, generator=generator)
    shared = KVPool(
        tuple(k.expand(-1, -1, HEADS, -1).contiguous() for _ in range(LAYERS)),
        tuple(v.expand(-1, -1, HEADS, -1).contiguous() for _ in range(LAYERS)),
    )
    ring = q.expand(LAYERS, 1, 1, HEADS, dim).contiguous()
    window = QueryWindow(ring, (0,) * ROWS, (1,) * ROWS, (1,) * ROWS, 1.0)
    policy = policy_class("vase-attnv")({"pool_width": 3})
    kept = policy.select(Round(shared, rows(n, 4, reserve=1, same=True), window)).view(-1, ROWS, 4)

    attention = torch.softmax(k.view(n, dim).double() @ q[0].double(), 0).numpy()
    weights = np.convolve(attention, np.ones(3) / 3, "same")
    weights[3] = 0
    law = {members | {3}: p for members, p in successive(weights.tolist(), 3).items()}
    assert p_value(kept, law, n) > LEVEL
    no_pooling = attention.copy()
    no_pooling[3] = 0
    wrong = {members | {3}: p for members, p in successive(no_pooling.tolist(), 3).items()}
    assert p_value(kept, wrong, n) < LEVEL


def contingency(a: torch.Tensor, b: torch.Tensor, n: int) -> float:
    """Chi-square test of independence of two draws of one of ``n``."""
    table = np.bincount((a * n + b).flatten().numpy(), minlength=n * n).reshape(n, n)
    return stats.chi2_contingency(table, correction=False).pvalue


def test_heads_layers_requests_and_rounds_draw_independently():
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1])
    first, second = (draw(weights, 1, round=r).squeeze(-1) for r in (0, 1))
    pairs = {
        "heads": (first[:, 1:], first[:, :-1]),
        "layers": (first[1:], first[:-1]),
        "requests": (first[:, :, 1:], first[:, :, :-1]),
        "rounds": (first, second),
        "layer and head": (first[1:, :-1], first[:-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        assert contingency(a, b, 4) > LEVEL / len(pairs), name
    assert contingency(first, first, 4) == 0.0


def test_candidates_draw_independently():
    """Whether 0 and 1 stay, given that the other four compete as well: correlation as Plackett-Luce has it."""
    kept = draw(torch.ones(6), 3)
    inside = torch.stack([(kept == i).any(-1).flatten() for i in range(6)]).double()
    correlation = torch.corrcoef(inside)
    off = correlation[~torch.eye(6, dtype=torch.bool)]
    # exact value -1/5; the sampling error of a correlation is below 1/sqrt(draws)
    assert (off + 0.2).abs().max() < stats.norm.isf(LEVEL / 60) / math.sqrt(DRAWS)


def projections(vector: torch.Tensor, number: int = 0, rank: int = 20, fixed: bool = False) -> torch.Tensor:
    """``||G^T x||^2`` of each layer and request, from the public score of equal keys and values."""
    layers = 500
    buffers = tuple(vector.view(1, 1, 1, -1) for _ in range(layers))
    score = ops.projected_norms(KVPool(buffers, buffers), rows(1, 1, same=True, round=number), rank, fixed_round=fixed)
    return score.sqrt().double().view(layers, ROWS)


@pytest.mark.parametrize("rank", [1, 20])
def test_projected_norms_are_chi_square(rank):
    """``rank ||G^T x||^2 / ||x||^2`` has the chi-square law with ``rank`` degrees of freedom, 25,000 draws."""
    vector = torch.randn(24, generator=torch.Generator().manual_seed(3))
    ratio = projections(vector, rank=rank) / vector.double().square().sum()
    assert stats.kstest((rank * ratio).flatten().numpy(), stats.chi2(rank).cdf).pvalue > LEVEL
    error = math.sqrt(2 / rank / ratio.numel())
    assert abs(ratio.mean().item() - 1) < stats.norm.isf(LEVEL / 2) * error
    # what METHOD calls the relative sd of each factor: sqrt(2 / rank), 0.32 for rank 20
    assert ratio.std().item() == pytest.approx(math.sqrt(2 / rank), rel=0.05)


def test_projections_differ_by_layer_request_and_round_unless_fixed():
    vector = torch.ones(8)
    a, b = projections(vector), projections(vector, number=1)
    limit = stats.norm.isf(LEVEL / 2) / math.sqrt(a.numel())
    for x, y in ((a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1])):
        assert abs(np.corrcoef(x.flatten(), y.flatten())[0, 1]) < 1.1 * limit
    assert torch.equal(projections(vector, number=1, fixed=True), a)


def test_the_projection_is_shared_by_heads_and_has_independent_entries():
    """Two KV heads with the same vectors score alike; unit vectors see the entries of ``G``, uncorrelated."""
    eye = torch.eye(8)
    buffers = tuple(eye.view(8, 1, 1, 8).expand(-1, -1, 2, -1).contiguous() for _ in range(500))
    score = ops.projected_norms(KVPool(buffers, buffers), rows(8, 1, same=True), 1).view(500, 2, ROWS, 8)
    assert torch.equal(score[:, 0], score[:, 1])
    entries = score[:, 0].sqrt().reshape(-1, 8).double()  # squared normals
    correlation = torch.corrcoef(entries.T)[~torch.eye(8, dtype=torch.bool)]
    assert correlation.abs().max() < stats.norm.isf(LEVEL / 112) / math.sqrt(len(entries)) * 1.2
