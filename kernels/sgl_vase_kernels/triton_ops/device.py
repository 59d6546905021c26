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
def vector_offset(side, slot, head):
    """Elements from a layer's base to the vector of ``slot`` (int64) and ``head``."""
    return (
        (slot // side.page) * side.page_stride
        + (slot % side.page) * side.token_stride
        + head.to(tl.int64) * side.head_stride
    )


@triton.jit
def layer_base(side, layer):
    """Pointer to the layer's buffer."""
    return tl.multiple_of(tl.load(side.table + layer).to(tl.pointer_type(side.dtype)), side.align)


@triton.jit
def load_vectors(side, base, offset, valid):
    """``[BLOCK, dim_pad]`` vectors, 0 where not ``valid`` and past ``dim``; one-byte floats as float16."""
    d = tl.arange(0, side.dim_pad)
    mask = valid[:, None]
    if side.dim < side.dim_pad:
        mask = mask & (d < side.dim)[None, :]
    return widen(tl.load(base + offset[:, None] + d[None, :], mask=mask, other=0), side.format)


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
    # cos(2 pi u) = sin(y) with |y| <= pi / 2: the odd Taylor polynomial of degree 11 is off by 6e-8 at most.
    y = 6.283185307179586 * (tl.abs(uniform(word1) - 0.5) - 0.25)
    z = y * y
    tail = 1 / 120 + z * (-1 / 5040 + z * (1 / 362880 - z * (1 / 39916800)))
    return tl.sqrt(-2.0 * tl.log(uniform(word0))) * y * (1.0 + z * (-1 / 6 + z * tail))


@triton.jit
def float_rank(x):
    """Order-preserving int64 in [0, 2**32) of float32: NaN lowest, -0.0 equal to 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    rank = tl.where(bits >= 0, bits.to(tl.int64) + 0x80000000, (~bits).to(tl.int64) & 0x7FFFFFFF)
    return tl.where(x == x, rank, 0)
