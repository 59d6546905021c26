"""Random ragged batches in pools that are NaN wherever no row lives."""

from __future__ import annotations

import copy

import torch
from sgl_vase_kernels import KVPool, QueryWindow, Rows

BUFFER, WINDOW, LAYERS = 8, 12, 2


def batch(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (64, 64),
    layout: str = "NHD",
    page_size: int = 1,
    heads: int = 2,
    candidates: tuple[int, ...] = (75, 140),
    keep: tuple[int, ...] = (40, 133),
    device: str = "cpu",
) -> tuple[KVPool, Rows]:
    g = torch.Generator().manual_seed(seed)
    lengths = tuple(n + BUFFER for n in candidates)
    total = -(-(sum(lengths) + 30) // page_size) * page_size
    slots = torch.randperm(total, generator=g)[: sum(lengths)]

    def buffers(dim: int) -> tuple[torch.Tensor, ...]:
        out = []
        for _ in range(LAYERS):
            x = torch.full((total, heads, dim), torch.nan)
            x[slots] = torch.randn(len(slots), heads, dim, generator=g)
            pages = x.view(-1, page_size, heads, dim)
            out.append((pages if layout == "NHD" else pages.transpose(1, 2)).contiguous().to(dtype).to(device))
        return tuple(out)

    scales = [torch.rand(LAYERS, generator=g).to(device) + 0.5 if dtype.itemsize == 1 else None for _ in range(2)]
    pool = KVPool(buffers(dims[0]), buffers(dims[1]), layout, *scales, layer_offset=3, head_offset=5)
    size = len(lengths)
    return pool, Rows(
        slots.to(device),
        lengths,
        BUFFER,
        first=tuple(range(size)),
        keep=keep,
        reserve=tuple(k // 4 for k in keep),
        sinks=tuple(min(4 * (r % 2 == 0), n) for r, n in enumerate(candidates)),
        seed=tuple(2**63 + 977 * (seed + r) for r in range(size)),
        round=tuple(3 * r for r in range(size)),
        carried=(0,) * size,
    )


def window(seed: int, pool: KVPool, rows: Rows, group: int, dtype: torch.dtype) -> QueryWindow:
    g = torch.Generator().manual_seed(seed)
    size, dim = len(rows), pool.k[0].shape[3]
    ring = torch.full((pool.layers, size + 1, WINDOW, pool.heads * group, dim), torch.nan)
    ring[:, 1:] = 2 * torch.randn(pool.layers, size, WINDOW, pool.heads * group, dim, generator=g)
    valid = tuple(max(1, WINDOW - 5 * r) for r in range(size))
    return QueryWindow(
        ring.to(dtype).to(pool.device), tuple(range(size, 0, -1)), tuple(71 + r for r in range(size)), valid, dim**-0.5
    )


def raw(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer's bits, so that NaN equals itself."""
    return buffer.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[buffer.dtype.itemsize])


def tokens(pool: KVPool, which: str) -> torch.Tensor:
    """float32 ``[layers, slots, heads, dim]`` of the keys or the values."""
    stacked = torch.stack([b.float() for b in getattr(pool, which)])
    return (stacked if pool.layout == "NHD" else stacked.transpose(2, 3)).flatten(1, 2)


def clone(pool: KVPool) -> KVPool:
    return copy.deepcopy(pool)
