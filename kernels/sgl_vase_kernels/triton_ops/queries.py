"""The ring of recent queries: one scatter a layer, inside a CUDA graph if there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_vase_kernels.triton_ops.host import launch


@triton.jit
def store_queries_kernel(
    ring,
    slots,
    positions,
    q,
    RING_SLOT: tl.constexpr,
    RING_COLUMN: tl.constexpr,
    RING_HEAD: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``BLOCK`` numbers of one token's queries."""
    token = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < HEADS * DIM
    head = element // DIM
    d = element % DIM
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.load(positions + token).to(tl.int64) % WINDOW
    x = tl.load(q + token.to(tl.int64) * Q_TOKEN + head * Q_HEAD + d, mask=inside)
    tl.store(ring + slot * RING_SLOT + column * RING_COLUMN + head * RING_HEAD + d, x, mask=inside)


def store_queries(ring: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, q: torch.Tensor) -> None:
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or ring.stride(3) != 1:
        raise ValueError(f"q and ring must have a dense last dimension, got strides {q.stride()} and {ring.stride()}")
    block = 1024
    launch(
        store_queries_kernel,
        (tokens, triton.cdiv(heads * dim, block), 1),
        *(ring, slots, positions, q),
        RING_SLOT=ring.stride(0),
        RING_COLUMN=ring.stride(1),
        RING_HEAD=ring.stride(2),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        WINDOW=ring.shape[1],
        HEADS=heads,
        DIM=dim,
        BLOCK=block,
        num_warps=4,
    )
