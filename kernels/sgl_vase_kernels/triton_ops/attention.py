"""Window attention in two flash-style passes: each query's softmax normaliser, then the pooled score of each key."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows, upload
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    FLOAT_MAX,
    SCORE_START,
    SLOT_START,
    layer_base,
    load_vectors,
    row_field,
    vector_offset,
)
from sgl_vase_kernels.triton_ops.host import (
    capability,
    dot_operand,
    launch,
    new_scores,
    row_metadata,
    side,
    tiles,
)


class Ring(NamedTuple):
    """The queries of a round, as a kernel argument."""

    data: torch.Tensor
    meta: torch.Tensor
    """int64 ``[rows, 3]``: ring slot, logical end, number of queries used."""
    layer_stride: tl.constexpr
    slot_stride: tl.constexpr
    column_stride: tl.constexpr
    head_stride: tl.constexpr
    columns: tl.constexpr
    window: tl.constexpr
    """Most queries that a row uses."""
    groups: tl.constexpr
    """Query heads a KV head."""
    operand: tl.constexpr
    """Type in which queries and keys enter their product."""


@triton.jit
def load_queries(ring, k_side, request, layer, head, group, w):
    """``[BLOCK, dim_pad]`` queries ``w`` (0: oldest used) of query heads ``groups * head + group``, 0 past the last."""
    slot = tl.load(ring.meta + request * 3)
    end = tl.load(ring.meta + request * 3 + 1)
    count = tl.load(ring.meta + request * 3 + 2)
    d = tl.arange(0, k_side.dim_pad)
    there = (w < count) & (w < ring.window) & (group < ring.groups)
    column = (end - count + w) % ring.columns
    base = ring.data + layer.to(tl.int64) * ring.layer_stride + slot * ring.slot_stride
    offset = column * ring.column_stride + (head * ring.groups + group) * ring.head_stride
    q = tl.load(base + offset[:, None] + d[None, :], mask=there[:, None] & (d < k_side.dim)[None, :], other=0.0)
    return q.to(ring.operand)


@triton.jit
def tame(logit, TAME: tl.constexpr):
    """NaN counts as -inf and inf as the largest float, where asked."""
    if TAME:
        logit = tl.where(logit == logit, tl.minimum(logit, FLOAT_MAX), float("-inf"))
    return logit


@triton.jit
def normalise(
    q, k_side, base, slots, candidates, head, factor, TAME: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Largest logit (base 2) of each query and the sum of ``2 ** (logit - largest)``."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, candidates, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        valid = index < candidates
        slot = tl.load(slots + index, mask=valid, other=0)
        k = load_vectors(k_side, base, vector_offset(k_side, slot, head), valid).to(q.dtype)
        outside = tl.where(valid, 0.0, float("-inf"))
        logit = tame(tl.dot(q, tl.trans(k), input_precision="ieee") * factor, TAME) + outside[None, :]
        updated = tl.maximum(largest, tl.max(logit, 1))
        pivot = tl.where(updated == float("-inf"), 0.0, updated)
        total = total * tl.exp2(largest - pivot) + tl.sum(tl.exp2(logit - pivot[:, None]), 1)
        largest = updated
    return largest, total


@triton.jit(do_not_specialize=["heads", "requests", "factor"])
def window_normaliser_kernel(
    stats, slots, meta, heads, requests, factor, ring, k_side, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``stats[layer, request, query head, w] = (largest logit, 1 / (sum * queries))`` for ``BLOCK_M`` queries."""
    head = tl.program_id(0) % heads
    m = tl.program_id(0) // heads * BLOCK_M + tl.arange(0, BLOCK_M)
    request = tl.program_id(1)
    layer = tl.program_id(2)
    if k_side.scale is not None:
        factor *= tl.load(k_side.scale + layer)
    q = load_queries(ring, k_side, request, layer, head, m // ring.window, m % ring.window)
    candidates = row_field(meta, request, CANDIDATES)
    row_slots = slots + row_field(meta, request, SLOT_START)
    base = layer_base(k_side, layer)
    largest, total = normalise(q, k_side, base, row_slots, candidates, head, factor, False, BLOCK_M, BLOCK_N)
    if tl.max(((total != total) | (largest == float("inf"))).to(tl.int32), 0) > 0:
        largest, total = normalise(q, k_side, base, row_slots, candidates, head, factor, True, BLOCK_M, BLOCK_N)
    count = tl.load(ring.meta + request * 3 + 2).to(tl.float32)
    nothing = (total == 0.0) | (m % ring.window >= count)
    inside = m < ring.groups * ring.window
    place = ((layer * requests + request) * heads + head).to(tl.int64) * (ring.groups * ring.window) + m
    tl.store(stats + 2 * place, tl.where(nothing, 0.0, largest), mask=inside)
    tl.store(stats + 2 * place + 1, tl.where(nothing, 0.0, 1.0 / (total * count)), mask=inside)


@triton.jit
def pool_along(x, WIDTH: tl.constexpr, POOLING: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mean or maximum of ``WIDTH`` neighbours inside the block; ``x >= 0`` is 0 outside the row."""
    if WIDTH > 1:
        lane = tl.arange(0, BLOCK_N)
        pooled = tl.zeros([BLOCK_N], tl.float32)
        for shift in tl.static_range(WIDTH):
            neighbour = tl.gather(x, tl.minimum(tl.maximum(lane + (shift - WIDTH // 2), 0), BLOCK_N - 1), 0)
            if POOLING == "max":
                pooled = tl.maximum(pooled, neighbour)
            else:
                pooled += neighbour
        if POOLING == "max":
            x = pooled
        else:
            x = pooled / WIDTH
    return x


@triton.jit
def pooled_score(
    k, valid, stats, ring, k_side, request, layer, head, factor, TAME: tl.constexpr, WIDTH: tl.constexpr,
    POOLING: tl.constexpr, GROUP_MAX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Attention to each key of the block: mean over the window, pooled, then over the query heads."""
    score = tl.zeros([BLOCK_N], tl.float32)
    for group in range(0, ring.groups):
        received = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, ring.window, BLOCK_W):
            w = start + tl.arange(0, BLOCK_W)
            q = load_queries(ring, k_side, request, layer, head, group, w)
            stat = stats + 2 * (group * ring.window + w)
            largest = tl.load(stat, mask=w < ring.window, other=0.0)
            weight = tl.load(stat + 1, mask=w < ring.window, other=0.0)
            logit = tame(tl.dot(k, tl.trans(q), input_precision="ieee") * factor, TAME)
            received += tl.sum(tl.exp2(logit - largest[None, :]) * weight[None, :], 1)
        received = tl.where(valid, received, 0.0)
        if GROUP_MAX:
            score = tl.maximum(score, pool_along(received, WIDTH, POOLING, BLOCK_N))
        elif POOLING == "max":
            score += pool_along(received, WIDTH, POOLING, BLOCK_N) / ring.groups
        else:
            score += received / ring.groups
    if POOLING == "avg" and not GROUP_MAX:
        # Means commute: one pooling of the group's mean instead of one a head.
        score = pool_along(score, WIDTH, POOLING, BLOCK_N)
    return score


@triton.jit(do_not_specialize=["heads", "requests", "total", "factor"])
def window_scores_kernel(
    out,
    stats,
    slots,
    meta,
    heads,
    requests,
    total,
    factor,
    ring,
    k_side,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    GROUP_MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STEP: tl.constexpr,
):
    """Scores of ``STEP`` candidates; the block's margins serve the pooling of its inside."""
    head = tl.program_id(0) % heads
    first = tl.program_id(0) // heads * STEP
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    if first < candidates:
        if k_side.scale is not None:
            factor *= tl.load(k_side.scale + layer)
        lane = tl.arange(0, BLOCK_N)
        index = first - WIDTH // 2 + lane
        valid = (index >= 0) & (index < candidates)
        slot = tl.load(slots + row_field(meta, request, SLOT_START) + index, mask=valid, other=0)
        offset = vector_offset(k_side, slot, head)
        k = load_vectors(k_side, layer_base(k_side, layer), offset, valid).to(ring.operand)
        stats += ((layer * requests + request) * heads + head).to(tl.int64) * (2 * ring.groups * ring.window)
        score = pooled_score(
            k, valid, stats, ring, k_side, request, layer, head, factor, False, WIDTH, POOLING, GROUP_MAX, BLOCK_N,
            BLOCK_W,
        )  # fmt: skip
        finite = tl.abs(score) < float("inf")
        if tl.min(finite.to(tl.int32), 0) == 0:
            score = pooled_score(
                k, valid, stats, ring, k_side, request, layer, head, factor, True, WIDTH, POOLING, GROUP_MAX,
                BLOCK_N, BLOCK_W,
            )  # fmt: skip
        inside = (lane >= WIDTH // 2) & (lane < WIDTH // 2 + STEP) & (index < candidates)
        place = (layer * heads + head).to(tl.int64) * total + row_field(meta, request, SCORE_START)
        tl.store(out + place + index, score, mask=inside)


def window_attention_scores(
    pool: KVPool,
    rows: Rows,
    queries: QueryWindow,
    *,
    pool_width: int,
    pooling: str,
    group: str,
    last: int | None,
) -> torch.Tensor:
    out = new_scores(pool, rows)
    data = queries.ring
    if data.stride(4) != 1:
        raise ValueError(f"queries.ring must have a dense last dimension, got strides {data.stride()}")
    columns, q_heads = data.shape[2:4]
    window = columns if last is None else min(last, columns)
    meta = upload(
        [(s, e, min(window, v)) for s, e, v in zip(queries.slot, queries.end, queries.valid, strict=True)], pool.device
    )
    groups = q_heads // pool.heads
    constants = (*data.stride()[:4], columns, window, groups, dot_operand(pool, data.dtype))
    ring = Ring(data, meta, *(tl.constexpr(c) for c in constants))
    stats = torch.empty(pool.layers, len(rows), q_heads, window, 2, dtype=torch.float32, device=pool.device)
    shared = (rows.slots, row_metadata(pool, rows), pool.heads, len(rows))
    factor = queries.scale * math.log2(math.e)
    k_side = side(pool, "k")

    # What the offline build showed free of spills: decoding one-byte floats and wide vectors take registers.
    wide = k_side.dim_pad.value > 128
    narrow = capability(pool.device)[0] == 8 and (wide or pool.dtype.itemsize == 1)
    block_m = min(128, max(16, triton.next_power_of_2(groups * window)))
    launch(
        window_normaliser_kernel,
        (pool.heads * triton.cdiv(groups * window, block_m), len(rows), pool.layers),
        *(stats, *shared, factor, ring, k_side),
        BLOCK_M=block_m,
        BLOCK_N=32 if narrow else 64,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=2 if narrow and wide else 3,
    )
    width = 1 if pooling == "none" else pool_width
    block_n = max(64 if wide else 128, triton.next_power_of_2(2 * width))
    step = block_n - width + 1
    launch(
        window_scores_kernel,
        (pool.heads * tiles(rows, step), len(rows), pool.layers),
        *(out, stats, *shared, out.shape[2], factor, ring, k_side),
        WIDTH=width,
        POOLING=pooling,
        GROUP_MAX=group == "max",
        BLOCK_N=block_n,
        BLOCK_W=min(64, max(16, triton.next_power_of_2(window))),
        STEP=step,
        num_warps=4,
        num_stages=2,
    )
    return out
