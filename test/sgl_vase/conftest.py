"""Batches whose contents depend on each request alone, wherever and beside whom it is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from sgl_vase_kernels import KVPool, QueryWindow, Rows

from sgl_vase import Round

BUFFER = WINDOW = 8


@dataclass(frozen=True)
class Request:
    """``content`` seeds keys, values and queries; the rest as in ``Rows`` and ``QueryWindow``."""

    content: int
    candidates: int
    keep: int
    reserve: int = 0
    sinks: int = 4
    seed: int = 0
    round: int = 0
    first: int = 0
    carried: int = 0
    valid: int = WINDOW


def build(
    requests: Sequence[Request],
    *,
    layers: int = 3,
    heads: int = 4,
    group: int = 2,
    dim: int = 16,
    layout: str = "NHD",
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    placement: int = 0,
    own_heads: slice = slice(None),
    own_layers: slice = slice(None),
) -> Round:
    """A round over ``requests`` in slots drawn by ``placement``; everything outside them is NaN.

    ``own_heads`` and ``own_layers`` cut out what one rank of a split model holds.
    """
    lengths = [r.candidates + BUFFER for r in requests]
    total = -(-(sum(lengths) + 8) // page_size) * page_size
    generator = torch.Generator().manual_seed(placement)
    slots = torch.randperm(total, generator=generator)[: sum(lengths)]
    ring_slots = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)].tolist()
    k = torch.full((layers, total, heads, dim), torch.nan)
    v = torch.full((layers, total, heads, dim), torch.nan)
    ring = torch.full((layers, len(requests) + 2, WINDOW, heads * group, dim), torch.nan)
    state = torch.full((layers, heads, total), torch.nan)
    for request, where, ring_slot in zip(requests, slots.split(lengths), ring_slots, strict=True):
        content = torch.Generator().manual_seed(request.content)
        k[:, where], v[:, where] = torch.randn(2, layers, len(where), heads, dim, generator=content)
        ring[:, ring_slot] = torch.randn(ring[:, ring_slot].shape, generator=content)
        state[:, :, where] = torch.rand(layers, heads, len(where), generator=content)

    def paged(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pages = x[own_layers, :, own_heads].to(dtype).unflatten(1, (-1, page_size))
        return tuple((pages if layout == "NHD" else pages.transpose(2, 3)).contiguous())

    own_queries = slice((own_heads.start or 0) * group, None if own_heads.stop is None else own_heads.stop * group)
    return Round(
        KVPool(paged(k), paged(v), layout, layer_offset=own_layers.start or 0, head_offset=own_heads.start or 0),
        Rows(
            slots,
            tuple(lengths),
            BUFFER,
            **{
                name: tuple(getattr(r, name) for r in requests)
                for name in ("first", "keep", "reserve", "sinks", "seed", "round", "carried")
            },
        ),
        QueryWindow(
            ring[own_layers, :, :, own_queries].to(dtype).contiguous(),
            tuple(ring_slots),
            tuple(WINDOW + r.content for r in requests),
            tuple(r.valid for r in requests),
            dim**-0.5,
        ),
        state[own_layers, own_heads].contiguous(),
    )


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, undone afterwards."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)
