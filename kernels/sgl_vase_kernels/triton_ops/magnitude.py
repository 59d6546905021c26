"""Reductions of one vector a candidate: value magnitudes and key norms."""

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
from sgl_vase_kernels.triton_ops.host import launch, new_scores, row_metadata, side, tiles


@triton.jit(do_not_specialize=["heads", "total"])
def magnitude_kernel(out, slots, meta, heads, total, x_side, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``out[layer, head, candidate]`` for ``BLOCK`` candidates of one row, layer and head."""
    head = tl.program_id(0) % heads
    start = tl.program_id(0) // heads * BLOCK
    row = tl.program_id(1)
    layer = tl.program_id(2)
    candidates = row_field(meta, row, CANDIDATES)
    if start < candidates:
        index = start + tl.arange(0, BLOCK)
        valid = index < candidates
        slot = tl.load(slots + row_field(meta, row, SLOT_START) + index, mask=valid, other=0)
        x = load_vectors(x_side, layer_base(x_side, layer), vector_offset(x_side, slot, head), valid).to(tl.float32)
        if x_side.scale is not None:
            x *= tl.load(x_side.scale + layer)
        real = (tl.arange(0, x_side.dim_pad) < x_side.dim)[None, :]
        if KIND == "range":
            result = tl.max(tl.where(real, x, float("-inf")), 1) - tl.min(tl.where(real, x, float("inf")), 1)
        elif KIND == "absmax":
            result = tl.max(tl.abs(x), 1)
        elif KIND == "l2":
            result = tl.sqrt(tl.sum(x * x, 1))
        else:
            mean = tl.sum(x, 1) / x_side.dim
            centred = tl.where(real, x - mean[:, None], 0.0)
            result = tl.sum(centred * centred, 1) / x_side.dim
        # max and min skip NaN.
        result = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), result)
        place = (layer * heads + head).to(tl.int64) * total + row_field(meta, row, SCORE_START)
        tl.store(out + place + index, result, mask=valid)


def _magnitude(pool: KVPool, rows: Rows, which: str, kind: str) -> torch.Tensor:
    out = new_scores(pool, rows)
    block = 64
    grid = (pool.heads * tiles(rows, block), len(rows), pool.layers)
    args = (out, rows.slots, row_metadata(pool, rows), pool.heads, out.shape[2], side(pool, which))
    warps = 8 if pool.dtype.itemsize == 4 else 4
    launch(magnitude_kernel, grid, *args, KIND=kind, BLOCK=block, num_warps=warps)
    return out


def value_magnitude(pool: KVPool, rows: Rows, kind: str) -> torch.Tensor:
    return _magnitude(pool, rows, "v", kind)


def key_norms(pool: KVPool, rows: Rows) -> torch.Tensor:
    return _magnitude(pool, rows, "k", "l2")
