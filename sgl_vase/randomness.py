"""From seeds to request keys. A draw is a function of (key, layer, head, round, index): ``sgl_vase_kernels.rng``."""

from __future__ import annotations

_MASK = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def request_key(server_seed: int, request_seed: int) -> int:
    """64-bit key of one request's draws."""
    return _mix((_mix(server_seed & _MASK) + 0x9E3779B97F4A7C15 + (request_seed & _MASK)) & _MASK)
