"""Exact top-k in one program a (layer, head, row): adaptive radix search for the k-th key, then a stable gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels import rng
from sgl_vase_kernels.layout import KVPool, Rows
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    FIRST,
    KEEP,
    KEEP_START,
    META_WIDTH,
    RESERVE,
    ROUND,
    SCORE_START,
    SEED,
    SINKS,
    float_rank,
    log_exponential,
    philox,
    row_field,
)
from sgl_vase_kernels.triton_ops.host import capability, launch, row_metadata

RACE = tl.constexpr(rng.RACE)
LEVEL = tl.constexpr(1 << 32)
"""Keys are ``level * LEVEL + float_rank``: int64 that sort by class, then score."""
BINS = tl.constexpr(256)
SINGLE_BLOCK = 4096
"""Rows up to this length hold their keys in registers."""
CHUNK = 4096


@triton.jit
def reserve_keys(start, row, SINKS_LEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of the reserving order, -1 past the row's end."""
    _, reserve_score, candidates, sinks, _, _, _, _, _, _ = row
    index = start + tl.arange(0, BLOCK)
    key = float_rank(tl.load(reserve_score + index, mask=index < candidates, other=0.0))
    if SINKS_LEAD:
        key = tl.where(index < sinks, LEVEL, key)
    return tl.where(index < candidates, key, -1)


@triton.jit
def selection_keys(
    start, row, RACE_ON: tl.constexpr, SINKS_ON: tl.constexpr, RESERVE_ON: tl.constexpr, SINKS_LEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of the final order, -1 past the row's end."""
    score, _, candidates, sinks, seed, place, round, first, bound, last = row
    index = start + tl.arange(0, BLOCK)
    x = tl.load(score + index, mask=index < candidates, other=0.0)
    level = tl.full([BLOCK], 1, tl.int64)
    if RACE_ON:
        word, _, _, _ = philox(seed, first + index, place, round, RACE)
        positive = x > 0
        x = tl.where(positive, tl.log(tl.where(positive, x, 1.0)), 0.0) - log_exponential(word)
        level = positive.to(tl.int64)
    rank = float_rank(x)
    if SINKS_ON:
        level = tl.where(index < sinks, 2, level)
        rank = tl.where(index < sinks, LEVEL - 1, rank)
    if RESERVE_ON:
        reserving = reserve_keys(start, row, SINKS_LEAD, BLOCK)
        level = tl.where((reserving > bound) | ((reserving == bound) & (index <= last)), 2, level)
    return tl.where(index < candidates, level * LEVEL + rank, -1)


@triton.jit
def keys_of(
    start, row, held, FINAL: tl.constexpr, RACE_ON: tl.constexpr, SINKS_ON: tl.constexpr, RESERVE_ON: tl.constexpr,
    SINKS_LEAD: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of a block: those ``held`` if the row is a single block, else computed once more."""
    if SINGLE:
        return held
    elif FINAL:
        return selection_keys(start, row, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, BLOCK)
    else:
        return reserve_keys(start, row, SINKS_LEAD, BLOCK)


@triton.jit
def search(
    k, row, held, FINAL: tl.constexpr, RACE_ON: tl.constexpr, SINKS_ON: tl.constexpr, RESERVE_ON: tl.constexpr,
    SINKS_LEAD: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``(bound, last)``: the ``k >= 1`` first entries are those of key > bound, or = bound and index <= last."""
    candidates = row[2]
    above_two = 0
    above_one = 0
    for start in range(0, candidates, BLOCK):
        key = keys_of(start, row, held, FINAL, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)
        above_two += tl.sum((key >= 2 * LEVEL).to(tl.int32), 0)
        above_one += tl.sum((key >= LEVEL).to(tl.int32), 0)
    floor = tl.where(k <= above_two, 2 * LEVEL, tl.where(k <= above_one, LEVEL, 0))
    k -= tl.where(k <= above_two, 0, tl.where(k <= above_one, above_two, above_one))

    low = floor + (LEVEL - 1)
    high = floor
    for start in range(0, candidates, BLOCK):
        key = keys_of(start, row, held, FINAL, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)
        inside = (key >= floor) & (key < floor + LEVEL)
        low = tl.minimum(low, tl.min(tl.where(inside, key, floor + (LEVEL - 1)), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, key, floor), 0))

    bins = tl.arange(0, BINS)
    while low < high:
        shift = tl.full([], 0, tl.int64)
        while ((high - low) >> shift) >= BINS:
            shift += 1
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, candidates, BLOCK):
            key = keys_of(start, row, held, FINAL, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)
            inside = (key >= low) & (key <= high)
            digit = tl.where(inside, (key - low) >> shift, 0).to(tl.int32)
            counts += tl.histogram(digit, BINS, mask=inside)
        digit_of_k = tl.sum((tl.cumsum(counts, 0, reverse=True) >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(bins > digit_of_k, counts, 0), 0)
        low += digit_of_k.to(tl.int64) << shift
        high = tl.minimum(high, low + (tl.full([], 1, tl.int64) << shift) - 1)

    equal_before = 0
    last = -1
    for start in range(0, candidates, BLOCK):
        key = keys_of(start, row, held, FINAL, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)
        equal = (key == low).to(tl.int32)
        taken = (equal > 0) & (equal_before + tl.cumsum(equal, 0) <= k)
        last = tl.maximum(last, tl.max(tl.where(taken, start + tl.arange(0, BLOCK), -1), 0))
        equal_before += tl.sum(equal, 0)
    return low, last


@triton.jit(do_not_specialize=["heads", "total", "total_kept", "layer_offset", "head_offset"])
def select_kernel(
    kept,
    score,
    reserve_score,
    meta,
    heads,
    total,
    total_kept,
    layer_offset,
    head_offset,
    RACE_ON: tl.constexpr,
    SINKS_ON: tl.constexpr,
    RESERVE_ON: tl.constexpr,
    SINKS_LEAD: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ascending indices of the kept candidates of one row, layer and head."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, request, CANDIDATES)
    keep = row_field(meta, request, KEEP)
    if keep > 0:
        sinks = row_field(meta, request, SINKS)
        reserve = row_field(meta, request, RESERVE)
        seed = tl.load(meta + request * META_WIDTH + SEED)
        round = row_field(meta, request, ROUND)
        first = row_field(meta, request, FIRST)
        place = ((layer_offset + layer) << 16) | (head_offset + head)
        line = (layer * heads + head).to(tl.int64)
        score += line * total + row_field(meta, request, SCORE_START)
        reserve_score += line * total + row_field(meta, request, SCORE_START)
        kept += line * total_kept + row_field(meta, request, KEEP_START)

        bound = tl.full([], 4, tl.int64) * LEVEL
        last = tl.full([], -1, tl.int32)
        row = (score, reserve_score, candidates, sinks, seed, place, round, first, bound, last)
        keys = tl.full([], 0, tl.int64)
        if RESERVE_ON:
            if SINGLE:
                keys = reserve_keys(0, row, SINKS_LEAD, BLOCK)
            if reserve > 0:
                bound, last = search(
                    reserve, row, keys, False, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK
                )
        row = (score, reserve_score, candidates, sinks, seed, place, round, first, bound, last)
        if SINGLE:
            keys = selection_keys(0, row, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, BLOCK)
        bound, last = search(keep, row, keys, True, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)

        written = 0
        for start in range(0, candidates, BLOCK):
            index = start + tl.arange(0, BLOCK)
            key = keys_of(start, row, keys, True, RACE_ON, SINKS_ON, RESERVE_ON, SINKS_LEAD, SINGLE, BLOCK)
            taken = (key > bound) | ((key == bound) & (index <= last))
            count = taken.to(tl.int32)
            tl.store(kept + written + tl.cumsum(count, 0) - 1, index.to(tl.int64), mask=taken)
            written += tl.sum(count, 0)


def select(
    pool: KVPool,
    rows: Rows,
    score: torch.Tensor,
    *,
    race: bool,
    sinks: bool,
    reserve_score: torch.Tensor | None,
    sinks_lead: bool,
) -> torch.Tensor:
    kept = torch.empty(pool.layers, pool.heads, rows.keep_indptr[-1], dtype=torch.int64, device=pool.device)
    longest = max(rows.candidates, default=0)
    block = max(128, triton.next_power_of_2(longest)) if longest <= SINGLE_BLOCK else CHUNK
    launch(
        select_kernel,
        (pool.heads, len(rows), pool.layers),
        *(kept, score.contiguous(), score if reserve_score is None else reserve_score.contiguous()),
        *(row_metadata(pool, rows), pool.heads, score.shape[2], kept.shape[2], pool.layer_offset, pool.head_offset),
        RACE_ON=race,
        SINKS_ON=sinks,
        RESERVE_ON=reserve_score is not None,
        SINKS_LEAD=sinks_lead,
        SINGLE=longest <= SINGLE_BLOCK,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 16 if capability(pool.device)[0] >= 10 else 8,
    )
    return kept
