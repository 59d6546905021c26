"""DKV's score: squared norms of keys and values under a random projection drawn inside the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels import rng
from sgl_vase_kernels.layout import KVPool, Rows
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    ROUND,
    SCORE_START,
    SEED,
    SLOT_START,
    META_WIDTH,
    buffer_base,
    load_vectors,
    normal,
    philox,
    row_field,
    slot_offset,
)
from sgl_vase_kernels.triton_ops.host import cache_arguments, interpreting, launch, new_scores, row_metadata, tiles

PROJECTION = tl.constexpr(rng.PROJECTION)


@triton.jit
def draw_projection(seed, layer, round, rank, root, DIM_PAD: tl.constexpr, RANK_PAD: tl.constexpr):
    """``G * sqrt(rank)``'s quotient: float32 ``[DIM_PAD, RANK_PAD]`` of N(0, 1 / rank), zero past ``rank``."""
    column = tl.arange(0, RANK_PAD)[None, :]
    index = tl.arange(0, DIM_PAD)[:, None] * rank + column
    x0, x1, _, _ = philox(seed, index, layer << 16, round, PROJECTION)
    return tl.where(column < rank, normal(x0, x1) / root, 0.0)


@triton.jit
def squared_norms(x, g, PARTS: tl.constexpr, OPERAND: tl.constexpr, PART_DTYPE: tl.constexpr):
    """``||G^T x||^2`` of each vector; ``G`` is split into ``PARTS`` summands that ``PART_DTYPE`` holds exactly."""
    part = g.to(PART_DTYPE)
    acc = tl.dot(x.to(OPERAND), part.to(OPERAND), input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        g -= part.to(tl.float32)
        part = g.to(PART_DTYPE)
        acc = tl.dot(x.to(OPERAND), part.to(OPERAND), acc, input_precision="ieee")
    return tl.sum(acc * acc, 1)


@triton.jit
def mend(norm, x):
    """What a float32 product gives for vectors with inf or NaN, where the summands of ``G`` leave inf - inf."""
    infinite = tl.sum((tl.abs(x.to(tl.float32)) == float("inf")).to(tl.int32), 1)
    broken = tl.sum((x != x).to(tl.int32), 1)
    norm = tl.where(infinite == 1, float("inf"), norm)
    return tl.where((infinite > 1) | (broken > 0), float("nan"), norm)
