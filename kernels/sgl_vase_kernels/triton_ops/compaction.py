"""Compaction in place: survivors to the front of their row, the buffer right behind them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels.layout import KVPool, Rows, upload
from sgl_vase_kernels.triton_ops.device import (
    CANDIDATES,
    KEEP,
    KEEP_START,
    SLOT_START,
    layer_base,
    row_field,
    vector_offset,
)
from sgl_vase_kernels.triton_ops.host import assert_on_device, debugging, launch, row_metadata, side


@triton.jit
def move(x_side, base, slots, source, target, moving, head):
    """Copy whole vectors between entries of one row; all are read before the first is written."""
    d = tl.arange(0, x_side.dim_pad)[None, :]
    mask = moving[:, None]
    if x_side.dim < x_side.dim_pad:
        mask = mask & (d < x_side.dim)
    from_slot = tl.load(slots + source, mask=moving, other=0)
    to_slot = tl.load(slots + target, mask=moving, other=0)
    x = tl.load(base + vector_offset(x_side, from_slot, head)[:, None] + d, mask=mask)
    tl.debug_barrier()
    tl.store(base + vector_offset(x_side, to_slot, head)[:, None] + d, x, mask=mask)


@triton.jit
def before_cut(kept, keep):
    """How many of the ascending ``kept`` are below ``keep``, by bisection."""
    low = 0
    high = keep
    while low < high:
        middle = (low + high) // 2
        inside = tl.load(kept + middle) < keep
        low = tl.where(inside, middle + 1, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit
def compact_side(x_side, slots, meta, kept, total_kept, buffer, heads, KEEP_ORDER: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0) // 2
    request = tl.program_id(1)
    layer = tl.program_id(2)
    keep = row_field(meta, request, KEEP)
    candidates = row_field(meta, request, CANDIDATES)
    kept += (layer * heads + head).to(tl.int64) * total_kept + row_field(meta, request, KEEP_START)
    slots += row_field(meta, request, SLOT_START)
    base = layer_base(x_side, layer)
    lane = tl.arange(0, BLOCK)
    if KEEP_ORDER:
        # Sources ascend and none lies before its target: what a block overwrites, no later block reads.
        for start in range(0, keep, BLOCK):
            target = start + lane
            source = tl.load(kept + target, mask=target < keep, other=0).to(tl.int32)
            move(x_side, base, slots, source, target, (target < keep) & (source != target), head)
    else:
        staying = before_cut(kept, keep)
        for start in range(0, keep - staying, BLOCK):
            # Hole number j lies behind as many survivors as have at most j holes before them.
            hole = start + lane
            moving = hole < keep - staying
            low = lane * 0
            high = low + staying
            while tl.max(high - low, 0) > 0:
                middle = (low + high) // 2
                open_ = low < high
                entry = tl.load(kept + middle, mask=open_, other=0).to(tl.int32)
                inside = entry - middle <= hole
                low = tl.where(open_ & inside, middle + 1, low)
                high = tl.where(open_ & ~inside, middle, high)
            source = tl.load(kept + staying + hole, mask=moving, other=0).to(tl.int32)
            move(x_side, base, slots, source, hole + low, moving, head)
    if candidates > keep:
        # The buffer lands on entries that the moves above have read.
        tl.debug_barrier()
        for start in range(0, buffer, BLOCK):
            index = start + lane
            move(x_side, base, slots, candidates + index, keep + index, index < buffer, head)


@triton.jit(do_not_specialize=["heads", "total_kept", "buffer"])
def compact_kernel(
    slots,
    meta,
    kept,
    total_kept,
    buffer,
    heads,
    k_side,
    v_side,
    KEEP_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All moves of one row, layer and head, of the keys (even programs) or the values (odd)."""
    if tl.program_id(0) % 2 == 0:
        compact_side(k_side, slots, meta, kept, total_kept, buffer, heads, KEEP_ORDER, BLOCK)
    else:
        compact_side(v_side, slots, meta, kept, total_kept, buffer, heads, KEEP_ORDER, BLOCK)


def compact(pool: KVPool, rows: Rows, kept: torch.Tensor, *, keep_order: bool) -> None:
    if debugging():
        counts = upload(rows.keep, pool.device)
        limit = upload(rows.candidates, pool.device).repeat_interleave(counts, output_size=kept.shape[2])
        row = torch.arange(len(rows), device=pool.device).repeat_interleave(counts, output_size=kept.shape[2])
        assert_on_device((kept >= 0) & (kept < limit), "kept: outside the row's candidates")
        assert_on_device((kept.diff() > 0) | (row.diff() > 0), "kept: not ascending in each row")
    k_side, v_side = side(pool, "k"), side(pool, "v")
    args = (
        rows.slots,
        row_metadata(pool, rows),
        kept.contiguous(),
        kept.shape[2],
        rows.buffer,
        pool.heads,
        k_side,
        v_side,
    )
    launch(
        compact_kernel,
        (2 * pool.heads, len(rows), pool.layers),
        *args,
        KEEP_ORDER=keep_order,
        BLOCK=64,
        num_warps=4,
    )
