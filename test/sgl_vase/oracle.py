"""Every policy written the plain way: NumPy, float64, one layer and one KV head at a time.

Shares nothing with the package. A policy here is a function ``(row, layer, head, **options) -> Ranking``;
``top`` cuts a ranking and ``check`` compares a kept set with it, allowing for float32 rounding at the cut only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
REL = 1e-5
"""Relative rounding error granted to a score that the package sums and exponentiates in float32."""
ROUND = 2.0**-22
"""Relative rounding error granted to a handful of float32 operations."""


@dataclass(eq=False)
class Row:
    """The candidates of one request. ``k``: ``[layers, heads, n, dk]``, ``v``: ``[layers, heads, n, dv]``,
    ``q``: ``[layers, q_heads, valid, dk]`` oldest first, all float64 copies of what the cache holds;
    ``totals``: ``[layers, heads, carried]``; the rest as in the package's ``Rows``."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    scale: float
    first: int
    keep: int
    reserve: int
    sinks: int
    seed: int
    round: int
    totals: np.ndarray
    layer_offset: int = 0
    head_offset: int = 0

    @property
    def n(self) -> int:
        return self.k.shape[2]


@dataclass
class Ranking:
    """Higher ``tier`` first, then higher ``score``, then lower index. ``slack``: absolute rounding error of each
    score in float32. ``undecided``: rounding may change the reserve itself, so no expectation follows."""

    tier: np.ndarray
    score: np.ndarray
    slack: np.ndarray
    undecided: bool = False


def rank(score: np.ndarray, slack: np.ndarray, forced: int = 0) -> Ranking:
    """The first ``forced`` candidates lead; NaN comes last within each class."""
    score = np.array(score, np.float64)
    score[:forced] = np.inf
    tier = np.ones(len(score), int)
    tier[:forced] = 3
    tier[np.isnan(score)] -= 1
    slack = np.where(np.isfinite(score), slack, 0.0)
    return Ranking(tier, np.where(np.isnan(score), 0.0, score), slack)


def top(ranking: Ranking, count: int) -> np.ndarray:
    """Ascending indices of the best ``count``."""
    order = sorted(range(len(ranking.tier)), key=lambda i: (-ranking.tier[i], -ranking.score[i], i))
    return np.array(sorted(order[:count]), np.int64)


def check(kept: np.ndarray, ranking: Ranking, count: int) -> int:
    """How many survivors differ from ``top``'s; ``AssertionError`` unless scores within their slack explain it."""
    n = len(ranking.tier)
    assert kept.shape == (count,), f"{kept.shape} survivors instead of {count}"
    assert (np.diff(kept) > 0).all(), f"not strictly ascending: {kept}"
    assert count == 0 or (kept[0] >= 0 and kept[-1] < n), f"outside [0, {n}): {kept}"
    expected = top(ranking, count)
    extra, missing = sorted(set(kept) - set(expected)), sorted(set(expected) - set(kept))
    if extra:
        dropped = np.setdiff1d(np.arange(n), kept)
        worst = min((ranking.tier[i], ranking.score[i] + ranking.slack[i], -i) for i in kept)
        best = max((ranking.tier[i], ranking.score[i] - ranking.slack[i], -i) for i in dropped)

        def show(indices: list[int]) -> str:
            return ", ".join(f"{i}: ({ranking.tier[i]}, {ranking.score[i]:.9g})" for i in indices[:8])

        assert worst >= best, f"{len(extra)} of {count} of {n} differ; kept {show(extra)}; instead of {show(missing)}"
    return len(extra)


# --- random numbers -------------------------------------------------------------------------------------------------


def philox(counter: tuple, key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit outputs; any counter word may be an array."""
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def halves(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, seed >> 32


def unit(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) + 0.5) * 2.0**-32


def race(weights: np.ndarray, slack: np.ndarray, row: Row, layer: int, head: int) -> Ranking:
    """Sampling without replacement by weight as a top-k of ``log w - log E``; weights that are not positive come
    after the others, uniform among themselves. ``slack``: relative error of each weight."""
    stream = (row.layer_offset + layer) << 16 | (row.head_offset + head)
    x0 = philox((row.first + np.arange(row.n), stream, row.round, 0), halves(row.seed))[0]
    u = np.minimum(unit(x0), 1 - 2.0**-24)
    e = -np.log1p(-u)
    positive = weights > 0
    score = np.where(positive, np.log(np.where(positive, weights, 1.0)), 0.0) - np.log(e)
    # u is a float32 in the package: off by up to 2^-24, which the logarithm magnifies where u is near 1
    error = ROUND * (1 + np.abs(score)) + 2.0**-24 * u / ((1 - u) * e)
    return Ranking(np.where(positive, 1, 0), score, error + np.where(positive, slack, 0.0))


@cache
def projection(dim: int, seed: int, layer: int, round: int, columns: int) -> np.ndarray:
    """DKV's ``G``: ``[dim, columns]`` of variance 1/columns."""
    x0, x1, _, _ = philox((np.arange(dim * columns), layer << 16, round, 1), halves(seed))
    normal = np.sqrt(-2 * np.log(unit(x0))) * np.cos(2 * np.pi * unit(x1))
    return normal.reshape(dim, columns) / math.sqrt(columns)


# --- scores ---------------------------------------------------------------------------------------------------------


@cache
def attention(row: Row, layer: int, q_head: int, last: int | None = None) -> np.ndarray:
    """Softmax weights of the candidates ``[n]``, summed over the newest ``last`` queries."""
    keys = row.k[layer, q_head // (row.q.shape[1] // row.k.shape[1])]
    queries = row.q[layer, q_head]
    total = np.zeros(row.n)
    for query in queries if last is None else queries[max(0, len(queries) - last) :]:
        logits = row.scale * (keys * query).sum(axis=1)
        logits[np.isnan(logits)] = -np.inf
        logits[logits == np.inf] = FLOAT32_MAX
        if logits.max() == -np.inf:
            continue
        weights = np.exp(logits - logits.max())
        total += weights / weights.sum()
    return total


def group(row: Row, head: int) -> range:
    size = row.q.shape[1] // row.k.shape[1]
    return range(head * size, (head + 1) * size)


def pool(x: np.ndarray, width: int, how: Callable[[np.ndarray], float]) -> np.ndarray:
    half = width // 2
    return np.array([how(x[max(0, i - half) : i + half + 1]) for i in range(len(x))])


def importance(row: Row, layer: int, head: int, *, width=5, last: int | None = None, peak=False) -> np.ndarray:
    """``[n]``: mean over queries, pooled along time, mean over the group; ``peak``: pooled and grouped by maximum."""
    count = row.q.shape[2] if last is None else min(last, row.q.shape[2])
    how = np.max if peak else lambda part: np.sum(part) / width
    pooled = [pool(attention(row, layer, h, last) / max(1, count), width, how) for h in group(row, head)]
    return np.max(pooled, axis=0) if peak else np.mean(pooled, axis=0)


def magnitude(v: np.ndarray, kind: str) -> tuple[np.ndarray, float]:
    """Size of each value ``[n]`` and its relative error in float32."""
    if kind == "range":
        return v.max(axis=1) - v.min(axis=1), ROUND
    if kind == "absmax":
        return np.abs(v).max(axis=1), 0.0
    if kind == "l2":
        return np.sqrt((v * v).sum(axis=1)), REL
    assert kind == "variance"
    return ((v - v.mean(axis=1, keepdims=True)) ** 2).mean(axis=1), REL


def unit_keys(k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Directions ``[n, d]`` (0 for a zero key and for a key that is not finite), and which keys are finite."""
    finite = np.isfinite(k).all(axis=1)
    k = np.where(finite[:, None], k, 0.0)
    norm = np.sqrt((k * k).sum(axis=1, keepdims=True))
    return k / np.where(norm > 0, norm, 1.0), finite


# --- policies -------------------------------------------------------------------------------------------------------


def attnv(row: Row, layer: int, head: int, *, sampling=True, size="range", sinks=True, width=5) -> Ranking:
    r, rel = magnitude(row.v[layer, head], size)
    by_value = rank(r, rel * np.abs(r), row.sinks if sinks else 0)
    reserved = top(by_value, row.reserve)
    s = importance(row, layer, head, width=width)
    s[reserved] = 0
    rest = race(s, np.full(row.n, REL), row, layer, head) if sampling else rank(s, REL * s)
    rest.tier[reserved] = 4
    rest.undecided = close_cut(by_value, row.reserve)
    return rest


def close_cut(ranking: Ranking, count: int) -> bool:
    """Whether rounding might exchange the last one in and the first one out; equal scores stay equal."""
    order = sorted(range(len(ranking.tier)), key=lambda i: (-ranking.tier[i], -ranking.score[i], i))
    if not 0 < count < len(order):
        return False
    a, b = order[count - 1], order[count]
    worse, better = ranking.score[a] - ranking.slack[a], ranking.score[b] + ranking.slack[b]
    return bool(ranking.tier[a] == ranking.tier[b] and ranking.score[a] > ranking.score[b] and worse <= better)


def dkv(row: Row, layer: int, head: int, *, fresh=True, columns=20) -> Ranking:
    score = np.ones(row.n)
    for x in (row.k[layer, head], row.v[layer, head]):
        g = projection(x.shape[1], row.seed, row.layer_offset + layer, row.round if fresh else 0, columns)
        score = score * np.array([sum((x_i * g_j).sum() ** 2 for g_j in g.T) for x_i in x])
    return rank(score, REL * np.abs(score), row.sinks)


def curdkv(row: Row, layer: int, head: int, *, columns=20) -> Ranking:
    return dkv(row, layer, head, fresh=False, columns=columns)


def snapkv(row: Row, layer: int, head: int) -> Ranking:
    s = importance(row, layer, head)
    return rank(s, REL * s)


def redundancy(k: np.ndarray, spare_newest: bool) -> np.ndarray:
    """``[n]``: softmax of the mean cosine with the other keys; NaN for a key that is not finite."""
    units, finite = unit_keys(k)
    n = len(k)
    cosine = units @ units.T
    np.fill_diagonal(cosine, 0)
    if spare_newest:
        for i, similar in enumerate(cosine > 0.5):
            if similar.any():
                cosine[i, np.flatnonzero(similar)[-1]] = 0
    mean = cosine.sum(0) / n
    if not finite.any():
        return np.full(n, np.nan)
    weights = np.where(finite, np.exp(mean - mean[finite].max()), 0.0)
    return np.where(finite, weights / weights.sum(), np.nan)


def rkv(row: Row, layer: int, head: int, *, lam=0.5, spare_newest=False, own=False) -> Ranking:
    i = importance(row, layer, head, width=7, last=8, peak=True) if own else importance(row, layer, head)
    red = redundancy(row.k[layer, head], spare_newest)
    return rank(lam * i - (1 - lam) * red, REL * (lam * i + (1 - lam) * red))


def random(row: Row, layer: int, head: int, *, sinks=True) -> Ranking:
    ranking = race(np.ones(row.n), np.zeros(row.n), row, layer, head)
    if sinks:
        ranking.tier[: row.sinks] = 3
        ranking.score[: row.sinks] = np.inf
        ranking.slack[: row.sinks] = 0
    return ranking


def streaming(row: Row, layer: int, head: int) -> Ranking:
    return rank(np.arange(row.n), np.zeros(row.n), row.sinks)


def keydiff(row: Row, layer: int, head: int) -> Ranking:
    units, finite = unit_keys(row.k[layer, head])
    mean = units.mean(axis=0)
    norm = math.sqrt(sum(mean**2))
    score = np.array([-(u @ mean) / norm if norm > 0 else 0.0 for u in units])
    return rank(np.where(finite, score, np.nan), np.full(row.n, REL) * (score != 0))


def knorm(row: Row, layer: int, head: int) -> Ranking:
    norm, rel = magnitude(row.k[layer, head], "l2")
    return rank(-norm, rel * norm)


def value_range(row: Row, layer: int, head: int, *, sinks=True) -> Ranking:
    r, rel = magnitude(row.v[layer, head], "range")
    return rank(r, rel * r, row.sinks if sinks else 0)


def evict_large_range(row: Row, layer: int, head: int, *, sinks=False) -> Ranking:
    r, rel = magnitude(row.v[layer, head], "range")
    return rank(-r, rel * r, row.sinks if sinks else 0)


def h2o(row: Row, layer: int, head: int) -> Ranking:
    total = np.mean([attention(row, layer, h) for h in group(row, head)], axis=0)
    carried = row.totals[layer, head]
    total[: len(carried)] += carried
    return rank(total, REL * total)


# --- compaction -----------------------------------------------------------------------------------------------------


def compact(cache: np.ndarray, slots: np.ndarray, kept: np.ndarray, buffer: int) -> np.ndarray:
    """``cache [slots, ...]`` of one layer and head after the row at ``slots`` keeps ``kept`` and its last ``buffer``,
    in order, at the row's front. The entries behind them hold nothing any more: unchanged here."""
    after = cache.copy()
    moved = [*kept, *range(len(slots) - buffer, len(slots))]
    for place, index in enumerate(moved):
        after[slots[place]] = cache[slots[index]]
    return after
