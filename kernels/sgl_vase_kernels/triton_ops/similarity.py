"""Cosines of keys with their mean direction (KeyDiff) and with all others (R-KV), without an n x n matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels.layout import KVPool, Rows
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    SCORE_START,
    SLOT_START,
    layer_base,
    load_vectors,
    row_field,
    vector_offset,
)
from sgl_vase_kernels.triton_ops.host import (
    Side,
    capability,
    dot_operand,
    launch,
    new_scores,
    row_metadata,
    side,
    tiles,
)

TINY = tl.constexpr(1e-12)
"""Norms below this count as this, as in ``torch.nn.functional.normalize``."""


@triton.jit
def load_keys(k_side, base, slots, index, candidates, head, factor, OPERAND: tl.constexpr):
    """``[BLOCK, dim_pad]`` keys, ``1 / max(||factor * k||, TINY) * factor``, and which are finite.

    Keys that are not, and what lies past the row's end, are zero.
    """
    valid = index < candidates
    slot = tl.load(slots + index, mask=valid, other=0)
    k = load_vectors(k_side, base, vector_offset(k_side, slot, head), valid)
    x = k.to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) > 0
    x = tl.where(finite[:, None], x, 0.0)
    inverse = factor / tl.maximum(tl.sqrt(tl.sum(x * x, 1)) * factor, TINY)
    return x.to(OPERAND), inverse, finite


@triton.jit
def key_factor(k_side, layer):
    factor = 1.0
    if k_side.scale is not None:
        factor = tl.load(k_side.scale + layer)
    return factor


@triton.jit(do_not_specialize=["heads", "requests"])
def direction_sum_kernel(sums, slots, meta, heads, requests, k_side, BLOCK: tl.constexpr):
    """``sums[layer, head, request]``: sum of the row's normalised keys, in one fixed order."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    row_slots = slots + row_field(meta, request, SLOT_START)
    base = layer_base(k_side, layer)
    factor = key_factor(k_side, layer)
    total = tl.zeros([BLOCK, k_side.dim_pad], tl.float32)
    for start in range(0, candidates, BLOCK):
        index = start + tl.arange(0, BLOCK)
        k, inverse, _ = load_keys(k_side, base, row_slots, index, candidates, head, factor, tl.float32)
        total += k * inverse[:, None]
    place = ((layer * heads + head) * requests + request).to(tl.int64) * k_side.dim_pad
    tl.store(sums + place + tl.arange(0, k_side.dim_pad), tl.sum(total, 0))


@triton.jit(do_not_specialize=["heads", "total", "threshold"])
def newest_similar_kernel(
    newest,
    cosine_of,
    slots,
    meta,
    heads,
    total,
    threshold,
    k_side,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each key the newest other key above ``threshold``, -1 if there is none, and their cosine."""
    head = tl.program_id(0) % heads
    start = tl.program_id(0) // heads * BLOCK
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    if start < candidates:
        index = start + tl.arange(0, BLOCK)
        row_slots = slots + row_field(meta, request, SLOT_START)
        base = layer_base(k_side, layer)
        factor = key_factor(k_side, layer)
        k, inverse, _ = load_keys(k_side, base, row_slots, index, candidates, head, factor, OPERAND)
        found = tl.full([BLOCK], -1, tl.int32)
        cosine_found = tl.zeros([BLOCK], tl.float32)
        start = (candidates - 1) // BLOCK * BLOCK
        while (start >= 0) & (tl.min(tl.where(index < candidates, found, 0), 0) < 0):
            other = start + tl.arange(0, BLOCK)
            k_other, inverse_other, _ = load_keys(k_side, base, row_slots, other, candidates, head, factor, OPERAND)
            cosine = tl.dot(k, tl.trans(k_other), input_precision="ieee")
            cosine *= inverse[:, None] * inverse_other[None, :]
            similar = (cosine > threshold) & (index[:, None] != other[None, :]) & (other < candidates)[None, :]
            here = tl.max(tl.where(similar, other[None, :], -1), 1)
            chosen = tl.sum(tl.where(here[:, None] == other[None, :], cosine, 0.0), 1)
            cosine_found = tl.where((found < 0) & (here >= 0), chosen, cosine_found)
            found = tl.where(found < 0, here, found)
            start -= BLOCK
        place = (layer * heads + head).to(tl.int64) * total + row_field(meta, request, SCORE_START) + index
        tl.store(newest + place, found, mask=index < candidates)
        tl.store(cosine_of + place, cosine_found, mask=index < candidates)


@triton.jit(do_not_specialize=["heads", "requests", "total"])
def direction_scores_kernel(
    out,
    sums,
    newest,
    cosine_of,
    slots,
    meta,
    heads,
    requests,
    total,
    k_side,
    REDUNDANCY: tl.constexpr,
    SPARE_NEWEST: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean cosine with all candidates, itself counted as 0; or the cosine with the mean direction.

    ``SPARE_NEWEST``: a key does not count with those whose newest similar key it is.
    """
    head = tl.program_id(0) % heads
    start = tl.program_id(0) // heads * BLOCK
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    if start < candidates:
        index = start + tl.arange(0, BLOCK)
        row_slots = slots + row_field(meta, request, SLOT_START)
        base = layer_base(k_side, layer)
        factor = key_factor(k_side, layer)
        k, inverse, finite = load_keys(k_side, base, row_slots, index, candidates, head, factor, OPERAND)
        place = ((layer * heads + head) * requests + request).to(tl.int64) * k_side.dim_pad
        scores = (layer * heads + head).to(tl.int64) * total + row_field(meta, request, SCORE_START)
        mean = tl.load(sums + place + tl.arange(0, k_side.dim_pad)) / candidates
        direction = k.to(tl.float32) * inverse[:, None]
        if REDUNDANCY:
            score = tl.sum(direction * mean[None, :], 1) - tl.sum(direction * direction, 1) / candidates
            if SPARE_NEWEST:
                spared = tl.zeros([BLOCK], tl.float32)
                for other_start in range(0, candidates, BLOCK):
                    other = other_start + tl.arange(0, BLOCK)
                    chosen = tl.load(newest + scores + other, mask=other < candidates, other=-1)
                    cosine = tl.load(cosine_of + scores + other, mask=other < candidates, other=0.0)
                    spared += tl.sum(tl.where(chosen[None, :] == index[:, None], cosine[None, :], 0.0), 1)
                score -= spared / candidates
        else:
            mean /= tl.maximum(tl.sqrt(tl.sum(mean * mean, 0)), TINY)
            score = tl.sum(direction * mean[None, :], 1)
        tl.store(out + scores + index, tl.where(finite, score, float("nan")), mask=index < candidates)


@triton.jit(do_not_specialize=["heads", "total"])
def softmax_kernel(out, meta, heads, total, BLOCK: tl.constexpr):
    """Softmax of a row's mean cosines, in place; they lie in [-1, 1] and NaN stands aside."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    out += (layer * heads + head).to(tl.int64) * total + row_field(meta, request, SCORE_START)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, candidates, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(out + index, mask=index < candidates, other=float("nan"))
        weight += tl.where(x == x, tl.exp(x), 0.0)
    weight_sum = tl.sum(weight, 0)
    for start in range(0, candidates, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(out + index, mask=index < candidates, other=0.0)
        tl.store(out + index, tl.exp(x) / weight_sum, mask=index < candidates)


def _direction_scores(pool: KVPool, rows: Rows, *, redundancy: bool, threshold: float | None) -> torch.Tensor:
    out = new_scores(pool, rows)
    k_side: Side = side(pool, "k")
    width = k_side.dim_pad.value
    sums = torch.empty(pool.layers, pool.heads, len(rows), width, dtype=torch.float32, device=pool.device)
    block = 64 if width <= 128 else 32
    row = (rows.slots, row_metadata(pool, rows), pool.heads)
    grid = (pool.heads, len(rows), pool.layers)
    blocks = (pool.heads * tiles(rows, block), len(rows), pool.layers)
    form = {"OPERAND": dot_operand(pool), "BLOCK": block, "num_warps": 8 if capability(pool.device)[0] >= 10 else 4}
    launch(direction_sum_kernel, grid, sums, *row, len(rows), k_side, BLOCK=block, num_warps=4, num_stages=3)
    newest = cosine_of = None
    if threshold is not None:
        newest, cosine_of = torch.empty_like(out, dtype=torch.int32), torch.empty_like(out)
        launch(newest_similar_kernel, blocks, newest, cosine_of, *row, out.shape[2], threshold, k_side, **form)
    launch(
        direction_scores_kernel,
        blocks,
        *(out, sums, newest, cosine_of, *row, len(rows), out.shape[2], k_side),
        REDUNDANCY=redundancy,
        SPARE_NEWEST=threshold is not None,
        **form,
    )
    if redundancy:
        launch(softmax_kernel, grid, out, row_metadata(pool, rows), pool.heads, out.shape[2], BLOCK=1024, num_warps=4)
    return out


def cosine_redundancy(pool: KVPool, rows: Rows, *, spare_newest: float | None) -> torch.Tensor:
    return _direction_scores(pool, rows, redundancy=True, threshold=spare_newest)


def mean_direction_cosine(pool: KVPool, rows: Rows) -> torch.Tensor:
    return _direction_scores(pool, rows, redundancy=False, threshold=None)
