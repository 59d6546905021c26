"""DKV's score: squared norms of keys and values under a random projection drawn inside the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels import rng
from sgl_vase_kernels.layout import KVPool, Rows
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    META_WIDTH,
    ROUND,
    SCORE_START,
    SEED,
    SLOT_START,
    layer_base,
    load_vectors,
    normal,
    philox,
    row_field,
    vector_offset,
)
from sgl_vase_kernels.triton_ops.host import capability, interpreting, launch, new_scores, row_metadata, side, tiles

PROJECTION = tl.constexpr(rng.PROJECTION)


@triton.jit
def draw_projection(seed, layer, round, RANK: tl.constexpr, DIM_PAD: tl.constexpr, RANK_PAD: tl.constexpr):
    """``G``: float32 ``[DIM_PAD, RANK_PAD]`` of N(0, 1 / RANK), zero past ``RANK``."""
    column = tl.arange(0, RANK_PAD)[None, :]
    index = tl.arange(0, DIM_PAD)[:, None] * RANK + column
    x0, x1, _, _ = philox(seed, index, layer << 16, round, PROJECTION)
    return tl.where(column < RANK, normal(x0, x1) / (RANK**0.5), 0.0)


@triton.jit
def squared_norms(x, g, PARTS: tl.constexpr, PART: tl.constexpr, OPERAND: tl.constexpr):
    """``||G^T x||^2`` of each vector, with ``G`` as a sum of ``PARTS`` matrices of dtype ``PART``."""
    part = g.to(PART)
    projected = tl.dot(x.to(OPERAND), part.to(OPERAND), input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        g -= part.to(tl.float32)
        part = g.to(PART)
        projected = tl.dot(x.to(OPERAND), part.to(OPERAND), projected, input_precision="ieee")
    return tl.sum(projected * projected, 1)


@triton.jit
def mend(norm, side, base, offset, valid):
    """inf for vectors with one inf and no NaN: padding and the parts of ``G`` made inf * 0 and inf - inf of it."""
    x = load_vectors(side, base, offset, valid).to(tl.float32)
    infinite = tl.sum((tl.abs(x) == float("inf")).to(tl.int32), 1)
    broken = tl.max((x != x).to(tl.int32), 1)
    return tl.where((infinite == 1) & (broken == 0), float("inf"), norm)


@triton.jit(do_not_specialize=["heads", "total", "layer_offset"])
def projected_norms_kernel(
    out,
    slots,
    meta,
    heads,
    total,
    layer_offset,
    k_side,
    v_side,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    FIXED_ROUND: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEEP_IN_LOOP: tl.constexpr,
):
    """Scores of ``BLOCK * BLOCKS`` candidates of one row, layer and head; ``G`` is drawn once for all of them."""
    head = tl.program_id(0) % heads
    first = tl.program_id(0) // heads * (BLOCK * BLOCKS)
    row = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, row, CANDIDATES)
    if first < candidates:
        seed = tl.load(meta + row * META_WIDTH + SEED)
        round = row_field(meta, row, ROUND)
        if FIXED_ROUND:
            round = round * 0
        g = draw_projection(seed, layer_offset + layer, round, RANK, k_side.dim_pad, RANK_PAD)
        row_slots = slots + row_field(meta, row, SLOT_START)
        place = (layer * heads + head).to(tl.int64) * total + row_field(meta, row, SCORE_START)
        k_base = layer_base(k_side, layer)
        v_base = layer_base(v_side, layer)
        for start in range(first, tl.minimum(first + BLOCK * BLOCKS, candidates), BLOCK):
            if KEEP_IN_LOOP:
                # Always true, unknown to the compiler: it would hold all parts of G as operands, and spill.
                g = tl.where(start >= 0, g, 0.0)
            index = start + tl.arange(0, BLOCK)
            valid = index < candidates
            slot = tl.load(row_slots + index, mask=valid, other=0)
            k_offset = vector_offset(k_side, slot, head)
            v_offset = vector_offset(v_side, slot, head)
            k = load_vectors(k_side, k_base, k_offset, valid)
            v = load_vectors(v_side, v_base, v_offset, valid)
            k_norm = squared_norms(k, g, PARTS, PART, OPERAND)
            if v_side.dim_pad == k_side.dim_pad:
                v_norm = squared_norms(v, g, PARTS, PART, OPERAND)
            else:
                # One stream of draws: G[d, column] does not depend on how many dims there are.
                g_v = draw_projection(seed, layer_offset + layer, round, RANK, v_side.dim_pad, RANK_PAD)
                v_norm = squared_norms(v, g_v, PARTS, PART, OPERAND)
            result = k_norm * v_norm
            if tl.max((result != result).to(tl.int32), 0) > 0:
                k_norm = mend(k_norm, k_side, k_base, k_offset, valid)
                result = k_norm * mend(v_norm, v_side, v_base, v_offset, valid)
            if k_side.scale is not None:
                factor = tl.load(k_side.scale + layer)
                result *= factor * factor
            if v_side.scale is not None:
                factor = tl.load(v_side.scale + layer)
                result *= factor * factor
            tl.store(out + place + index, result, mask=valid)


def projected_norms(pool: KVPool, rows: Rows, rank: int, *, fixed_round: bool) -> torch.Tensor:
    out = new_scores(pool, rows)
    k_side, v_side = side(pool, "k"), side(pool, "v")
    # Three bfloat16 hold a float32 of G exactly, two float16 all but what is below 2**-25; products are exact.
    part, parts = {torch.float32: (tl.float32, 1), torch.bfloat16: (tl.bfloat16, 3)}.get(pool.dtype, (tl.float16, 2))
    # What the offline build showed free of spills.
    wide = max(k_side.dim_pad.value, v_side.dim_pad.value) > 128
    generation = capability(pool.device)[0]
    block, warps, stages = {8: (128, 8, 3), 9: (64, 4, 2)}.get(generation, (64, 8, 2))
    if wide:
        block, warps, stages = 64, 8, 1 if generation >= 10 else 2
    blocks = 16
    launch(
        projected_norms_kernel,
        (pool.heads * tiles(rows, block * blocks), len(rows), pool.layers),
        *(out, rows.slots, row_metadata(pool, rows), pool.heads, out.shape[2], pool.layer_offset, k_side, v_side),
        RANK=rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)),
        FIXED_ROUND=fixed_round,
        PARTS=parts,
        PART=part,
        # The interpreter multiplies bfloat16 as integers.
        OPERAND=tl.float32 if interpreting() else part,
        BLOCK=block,
        BLOCKS=blocks,
        KEEP_IN_LOOP=generation == 8,
        num_warps=warps,
        num_stages=stages,
    )
    return out
