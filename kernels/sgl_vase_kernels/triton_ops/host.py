"""Host side of a launch: address tables, packed metadata, and what a kernel is specialised on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from sgl_vase_kernels.layout import KVPool, Rows, upload

MAX_DIM = 256
MAX_CANDIDATES = 2**20
GRID_LIMIT = 65_535

_FORMATS = {
    torch.float32: (tl.float32, "float"),
    torch.float16: (tl.float16, "float"),
    torch.bfloat16: (tl.bfloat16, "float"),
    torch.float8_e5m2: (tl.uint8, "e5m2"),
    torch.float8_e4m3fn: (tl.uint8, "e4m3"),
}


def _launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


class Target:
    """Who launches, and for which compute capability; the offline build replaces both."""

    launch: Callable[..., None] = staticmethod(_launch)
    capability: tuple[int, int] | None = None


def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
    """Launch ``kernel`` unless there is nothing to do."""
    if max(grid[1:]) > GRID_LIMIT:
        raise ValueError(f"a round takes at most {GRID_LIMIT} rows and layers, got {grid[1]} and {grid[2]}")
    if min(grid) > 0:
        Target.launch(kernel, grid, *args, **options)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which takes CPU tensors."""
    return bool(knobs.runtime.interpret)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability aimed at; (0, 0) in the interpreter."""
    if Target.capability is not None:
        return Target.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache(maxsize=64)
def address_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Data pointers of one buffer a layer, int64 ``[layers]``."""
    return upload(addresses, device)


class Side(NamedTuple):
    """The keys or the values of a pool, as a kernel argument."""

    table: torch.Tensor
    """Data pointers, int64 ``[layers]``."""
    scale: torch.Tensor | None
    dtype: tl.constexpr
    format: tl.constexpr
    align: tl.constexpr
    """Bytes that every vector's address is a multiple of."""
    page: tl.constexpr
    """Tokens a page; the strides below count elements."""
    page_stride: tl.constexpr
    token_stride: tl.constexpr
    head_stride: tl.constexpr
    dim: tl.constexpr
    dim_pad: tl.constexpr


def side(pool: KVPool, which: str) -> Side:
    """``which`` = ``k`` or ``v`` of the pool. Raises ``ValueError`` on what the kernels do not support."""
    buffers: tuple[torch.Tensor, ...] = getattr(pool, which)
    first = buffers[0]
    if first.dtype not in _FORMATS:
        raise ValueError(f"{which} has dtype {first.dtype}; supported: {', '.join(map(str, _FORMATS))}")
    if not 1 <= (dim := first.shape[3]) <= MAX_DIM:
        raise ValueError(f"{which} has head dim {dim}, at most {MAX_DIM} is supported")
    if pool.device.type != "cuda" and not interpreting() and Target.capability is None:
        raise ValueError(f"the pool is on {pool.device}: Triton needs CUDA, or TRITON_INTERPRET=1 from the start")
    strides = [first.stride(i) for i in ((0, 1, 2) if pool.layout == "NHD" else (0, 2, 1))]
    dtype, number_format = _FORMATS[first.dtype]
    if number_format == "e4m3" and capability(pool.device) < (8, 9):
        number_format = "e4m3-bits"
    addresses = tuple(b.data_ptr() for b in buffers)
    steps = (*addresses, *(s * first.element_size() for s in strides))
    align = 16 if all(step % 16 == 0 for step in steps) else first.element_size()
    constants = (dtype, number_format, align, pool.page_size, *strides, dim, max(16, triton.next_power_of_2(dim)))
    return Side(
        address_table(addresses, pool.device), getattr(pool, f"{which}_scale"), *(tl.constexpr(c) for c in constants)
    )


def row_metadata(pool: KVPool, rows: Rows) -> torch.Tensor:
    """The rows' host fields as int64 ``[rows, META_WIDTH]``, copied once for all operations of a round."""
    packed: torch.Tensor | None = rows.__dict__.get("_metadata")
    if packed is None:
        if max(rows.candidates, default=0) > MAX_CANDIDATES:
            raise ValueError(f"rows.lengths: {max(rows.candidates)} candidates in a row, at most {MAX_CANDIDATES}")
        seeds = [s - 2**64 if s >= 2**63 else s for s in rows.seed]
        columns = (rows.indptr, rows.candidates, rows.candidate_indptr, rows.keep, rows.keep_indptr)
        columns += (rows.reserve, rows.sinks, seeds, rows.round, rows.first)
        if debugging():
            assert_on_device((rows.slots >= 0) & (rows.slots < pool.slots), f"rows.slots: outside [0, {pool.slots})")
            assert_on_device(rows.slots.sort().values.diff() > 0, "rows.slots: rows overlap")
        packed = upload(list(zip(*columns, strict=False)), rows.slots.device)
        rows.__dict__["_metadata"] = packed
    return packed


def debugging() -> bool:
    """``VASE_DEBUG=1``: check on the device what the host cannot know."""
    return os.environ.get("VASE_DEBUG") == "1"


def assert_on_device(conditions: torch.Tensor, message: str) -> None:
    """Fail the stream, not the host, unless all ``conditions`` hold; CPU tensors raise ``RuntimeError`` here."""
    torch._assert_async(conditions.all(), message)


def new_scores(pool: KVPool, rows: Rows) -> torch.Tensor:
    """Uninitialised float32 ``[layers, kv_heads, candidates]``."""
    return torch.empty(pool.layers, pool.heads, rows.candidate_indptr[-1], dtype=torch.float32, device=pool.device)


def tiles(rows: Rows, block: int) -> int:
    """Blocks that cover the longest row's candidates."""
    return triton.cdiv(max(rows.candidates, default=0), block)


def dot_operand(pool: KVPool, other: torch.dtype | None = None) -> tl.dtype:
    """Type in which vectors of the pool, and of ``other``, enter a product exactly; sums are float32 always."""
    own = torch.float16 if pool.dtype.itemsize == 1 else pool.dtype
    if other is not None and pool.dtype.itemsize == 1 and other.itemsize == 2:
        own = other
    if interpreting() or (other is not None and other != own):
        # The interpreter multiplies bfloat16 as integers.
        return tl.float32
    return _FORMATS[own][0]
