"""The dispatch point: every operation of an eviction round, once for torch and once for Triton.

Scores are float32 ``[layers, kv_heads, sum(candidates)]``, row ``r`` at ``rows.candidate_indptr[r]``, whatever
the cache's dtype. Every function raises ``ValueError`` naming the argument whose shape, dtype, device or value does
not fit; all that is checked on the host, nothing is read back from a GPU.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Literal

import torch

from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows

Magnitude = Literal["range", "absmax", "l2", "variance"]
MAGNITUDES: tuple[Magnitude, ...] = ("range", "absmax", "l2", "variance")
Pooling = Literal["avg", "max", "none"]
Group = Literal["mean", "max"]


def backend(device: torch.device) -> str:
    """What runs on ``device``: ``triton`` on CUDA, else ``torch``; ``VASE_KERNELS`` overrides."""
    chosen = os.environ.get("VASE_KERNELS") or ("triton" if device.type == "cuda" else "torch")
    if chosen not in ("triton", "torch"):
        raise ValueError(f"VASE_KERNELS must be triton or torch, got {chosen!r}")
    return chosen


def _impl(device: torch.device) -> ModuleType:
    if backend(device) == "triton":
        from sgl_vase_kernels import triton_ops

        return triton_ops
    from sgl_vase_kernels import torch_ops

    return torch_ops


def _check_rows(pool: KVPool, rows: Rows) -> None:
    if not len(rows):
        raise ValueError("rows holds no request")
    if rows.slots.device != pool.device:
        raise ValueError(f"rows.slots is on {rows.slots.device}, the pool on {pool.device}")


def _check_scores(name: str, score: torch.Tensor, pool: KVPool, rows: Rows) -> None:
    shape = (pool.layers, pool.heads, rows.candidate_indptr[-1])
    if score.shape != shape or score.dtype != torch.float32 or score.device != pool.device:
        raise ValueError(
            f"{name} must be float32 {shape} on {pool.device}, got {score.dtype} {tuple(score.shape)} on {score.device}"
        )


def value_magnitude(pool: KVPool, rows: Rows, kind: Magnitude = "range") -> torch.Tensor:
    """Magnitude of each candidate's value vector: max - min, max |v|, L2 norm or population variance."""
    if kind not in MAGNITUDES:
        raise ValueError(f"kind must be one of {', '.join(MAGNITUDES)}, got {kind!r}")
    _check_rows(pool, rows)
    return _impl(pool.device).value_magnitude(pool, rows, kind)


def window_attention_scores(
    pool: KVPool,
    rows: Rows,
    queries: QueryWindow,
    *,
    pool_width: int = 5,
    pooling: Pooling = "avg",
    group: Group = "mean",
    last: int | None = None,
) -> torch.Tensor:
    """Attention that the window's queries pay to each candidate (SnapKV, arXiv 2404.14469).

    ``softmax_i(scale q.k_i)`` over the candidates alone, mean over the valid queries (the newest ``last`` of them),
    pooling of odd ``pool_width`` along the candidates with zero padding, ``group`` over the query heads of a KV head.
    NaN logits count as -inf, +inf as the largest float; a query whose logits are all -inf has weight 0 everywhere.
    """
    if pool_width < 1 or pool_width % 2 == 0:
        raise ValueError(f"pool_width must be odd and positive, got {pool_width}")
    if pooling not in ("avg", "max", "none") or group not in ("mean", "max"):
        raise ValueError(f"pooling must be avg, max or none and group mean or max, got {pooling!r}, {group!r}")
    if last is not None and last < 1:
        raise ValueError(f"last must be positive, got {last}")
    _check_rows(pool, rows)
    ring = queries.ring
    if ring.device != pool.device:
        raise ValueError(f"queries.ring is on {ring.device}, the pool on {pool.device}")
    if ring.dim() != 5 or ring.shape[0] != pool.layers or ring.shape[4] != pool.k[0].shape[3]:
        raise ValueError(
            f"queries.ring must be [layers={pool.layers}, slots, window, q_heads, dim={pool.k[0].shape[3]}], "
            f"got {tuple(ring.shape)}"
        )
    if ring.shape[3] % pool.heads:
        raise ValueError(f"queries.ring has {ring.shape[3]} query heads, no multiple of {pool.heads} KV heads")
    if not len(queries.slot) == len(queries.end) == len(queries.valid) == len(rows):
        raise ValueError(f"queries describes {len(queries.slot)} requests, rows {len(rows)}")
    if any(not 0 <= slot < ring.shape[1] for slot in queries.slot):
        raise ValueError(f"queries.slot must be in [0, {ring.shape[1]}), got {queries.slot}")
    if any(not 0 <= v <= ring.shape[2] for v in queries.valid):
        raise ValueError(f"queries.valid must be in [0, window={ring.shape[2]}], got {queries.valid}")
    return _impl(pool.device).window_attention_scores(
        pool, rows, queries, pool_width=pool_width, pooling=pooling, group=group, last=last
    )


def projected_norms(pool: KVPool, rows: Rows, rank: int, *, fixed_round: bool = False) -> torch.Tensor:
    """``||G^T k||^2 ||G^T v||^2`` with ``G ~ N(0, 1/rank)`` of shape ``[dim, rank]`` (VaSE-DKV, arXiv 2606.03928).

    ``G`` is drawn for each request, layer and round, or with ``fixed_round`` for each request and layer (CurDKV).
    """
    if rank < 1:
        raise ValueError(f"rank must be positive, got {rank}")
    _check_rows(pool, rows)
    return _impl(pool.device).projected_norms(pool, rows, rank, fixed_round=fixed_round)


def cosine_redundancy(pool: KVPool, rows: Rows, *, spare_newest: float | None = None) -> torch.Tensor:
    """Softmax over a row's candidates of the mean cosine of key i with all of them, itself counted as 0 (R-KV).

    With ``spare_newest``, a key does not count with those whose newest neighbour above that cosine it is, so that the
    newest of several copies stays. A key that is not finite scores NaN and is the zero vector for the others.
    """
    _check_rows(pool, rows)
    return _impl(pool.device).cosine_redundancy(pool, rows, spare_newest=spare_newest)


def key_norms(pool: KVPool, rows: Rows) -> torch.Tensor:
    """L2 norm of each candidate's key."""
    _check_rows(pool, rows)
    return _impl(pool.device).key_norms(pool, rows)


def mean_direction_cosine(pool: KVPool, rows: Rows) -> torch.Tensor:
    """Cosine of each candidate's key with the mean of the normalised keys (KeyDiff)."""
    _check_rows(pool, rows)
    return _impl(pool.device).mean_direction_cosine(pool, rows)


def select(
    pool: KVPool,
    rows: Rows,
    score: torch.Tensor,
    *,
    race: bool = False,
    sinks: bool = False,
    reserve_score: torch.Tensor | None = None,
    sinks_lead: bool = True,
) -> torch.Tensor:
    """Exactly ``keep`` candidates of each row: int64 ``[layers, kv_heads, sum(keep)]``, ascending in each row.

    Order: forced before free, then higher score, then lower index; NaN last. ``sinks`` forces the first
    ``rows.sinks`` candidates, as if they scored +inf. ``reserve_score`` forces the ``rows.reserve`` highest of it;
    with ``sinks_lead`` the sinks come first among those.
    ``race`` takes ``score`` as weights of a draw without replacement (largest ``log s - log E``,
    ``E ~ Exp(1)``); candidates of no positive weight come last, uniformly.
    """
    _check_rows(pool, rows)
    _check_scores("score", score, pool, rows)
    if reserve_score is not None:
        _check_scores("reserve_score", reserve_score, pool, rows)
    return _impl(pool.device).select(
        pool, rows, score, race=race, sinks=sinks, reserve_score=reserve_score, sinks_lead=sinks_lead
    )


def compact(pool: KVPool, rows: Rows, kept: torch.Tensor, *, keep_order: bool) -> None:
    """Move the survivors to the first ``keep`` entries of each row and the buffer right behind, in place.

    ``kept`` is what ``select`` returns. With ``keep_order`` survivors stay in time order; without, only those
    behind the cut move, into the holes before it. Entries past ``keep + buffer`` keep stale contents.
    """
    _check_rows(pool, rows)
    shape = (pool.layers, pool.heads, rows.keep_indptr[-1])
    if kept.shape != shape or kept.dtype != torch.int64 or kept.device != pool.device:
        raise ValueError(
            f"kept must be int64 {shape} on {pool.device}, got {kept.dtype} {tuple(kept.shape)} on {kept.device}"
        )
    _impl(pool.device).compact(pool, rows, kept, keep_order=keep_order)


def store_queries(ring: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, q: torch.Tensor) -> None:
    """``ring[slots[t], positions[t] % window] = q[t]`` for one layer's ring ``[slots, window, q_heads, dim]``.

    Plain device work on given buffers: a CUDA graph captures it.
    """
    if q.shape != (slots.shape[0], *ring.shape[2:]):
        raise ValueError(f"q must be {(slots.shape[0], *ring.shape[2:])}, got {tuple(q.shape)}")
    _impl(ring.device).store_queries(ring, slots, positions, q)


def copy_slots(pool: KVPool, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole tokens, all layers and heads: slot ``source[i]`` to slot ``target[i]`` (int64, disjoint).

    Plain torch on every device: it runs once in a request's life.
    """
    if source.shape != target.shape or source.dtype != torch.int64 or target.dtype != torch.int64:
        raise ValueError(
            f"source and target must be int64 of one shape, got {source.dtype} {tuple(source.shape)} and "
            f"{target.dtype} {tuple(target.shape)}"
        )
    page = pool.page_size
    for buffer in (*pool.k, *pool.v):
        raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
        if pool.layout == "NHD":
            raw[target // page, target % page] = raw[source // page, source % page]
        else:
            raw[target // page, :, target % page] = raw[source // page, :, source % page]
