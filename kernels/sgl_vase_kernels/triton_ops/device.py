"""Device functions that the kernels share: addressing, number formats, counter-based draws, sort keys."""

import triton
import triton.language as tl

# Columns of the packed metadata, one int64 row a due request; host.row_metadata writes them.
META_WIDTH = tl.constexpr(10)
SLOT_START = tl.constexpr(0)
CANDIDATES = tl.constexpr(1)
SCORE_START = tl.constexpr(2)
KEEP = tl.constexpr(3)
KEEP_START = tl.constexpr(4)
RESERVE = tl.constexpr(5)
SINKS = tl.constexpr(6)
SEED = tl.constexpr(7)
ROUND = tl.constexpr(8)
FIRST = tl.constexpr(9)

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
BELOW_ONE = tl.constexpr(1 - 2**-24)


@triton.jit
def row_field(meta, row, COLUMN: tl.constexpr):
    """One number of a row's metadata, as int32."""
    return tl.load(meta + row * META_WIDTH + COLUMN).to(tl.int32)


@triton.jit
def buffer_base(table, index, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer number ``index`` of the address table; ``ALIGN``: bytes it is known to be a multiple of."""
    return tl.multiple_of(tl.load(table + index).to(tl.pointer_type(DTYPE)), ALIGN)


@triton.jit
def slot_offset(slot, head, stride_page, stride_token, stride_head, PAGE: tl.constexpr):
    """Elements from a layer's base to the vector of ``slot`` (int64) and ``head``."""
    return (slot // PAGE) * stride_page + (slot % PAGE) * stride_token + head * stride_head


@triton.jit
def load_vectors(base, offset, valid, DIM: tl.constexpr, DIM_PAD: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK, DIM_PAD]`` vectors, zero where not ``valid`` and past ``DIM``, one-byte floats as float16."""
    d = tl.arange(0, DIM_PAD)
    mask = valid[:, None]
    if DIM < DIM_PAD:
        mask = mask & (d < DIM)[None, :]
    return widen(tl.load(base + offset[:, None] + d[None, :], mask=mask, other=0), FORMAT)


@triton.jit
def widen(x, FORMAT: tl.constexpr):
    """Bytes of an 8-bit float format as float16, which holds every value of both formats."""
    if FORMAT == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3":
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "e4m3-bits":
        magnitude = x & 0x7F
        half = ((x & 0x80).to(tl.uint16) << 8) | (magnitude.to(tl.uint16) << 7)
        x = tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float16, bitcast=True) * 256.0)
    return x


@triton.jit
def philox(seed, index, place, round, PURPOSE: tl.constexpr):
    """Words of counter ``(index, place, round, PURPOSE)`` under the 64-bit key ``seed``; ``index`` is a block."""
    zero = index * 0
    return tl.philox(seed, index, zero + place, zero + round, zero + PURPOSE)


@triton.jit
def uniform(word):
    """float32 in (0, 1 - 2**-24]: ``(word + 0.5) / 2**32`` rounded once."""
    return tl.minimum(((word.to(tl.int64) << 1) | 1).to(tl.float32) * (2.0**-33), BELOW_ONE)


@triton.jit
def log_exponential(word):
    """log of an Exp(1) draw, float32."""
    u = uniform(word)
    w = 1.0 - u
    # -log1p(-u) without log1p: the rounding error of w cancels in the quotient (Kahan).
    return tl.log(tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0))))


@triton.jit
def normal(word0, word1):
    """N(0, 1) draw (Box-Muller), float32."""
    return tl.sqrt(-2.0 * tl.log(uniform(word0))) * tl.cos(6.283185307179586 * uniform(word1))


@triton.jit
def float_rank(x):
    """Order-preserving int64 in [0, 2**32) of float32: NaN lowest, -0.0 equal to 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    rank = tl.where(bits >= 0, bits.to(tl.int64) + 0x80000000, (~bits).to(tl.int64) & 0x7FFFFFFF)
    return tl.where(x == x, rank, 0)
