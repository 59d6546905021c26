"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), the generator of Triton's ``tl.philox``.

A draw is a function of its key (the request) and its counter (where it is used); there is no state.
"""

from __future__ import annotations

import math

import torch

RACE = 0
"""Counter word 3 of the sampling race."""
PROJECTION = 1
"""Counter word 3 of DKV's projection matrix."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four uint32 words, held in int64, for each broadcast element of four counter and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the low 64 bits: int64 wraps
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def split_key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Key words of 64-bit request keys given as int64."""
    return seeds & _MASK, (seeds >> 32) & _MASK


def uniform(words: torch.Tensor) -> torch.Tensor:
    """float32 in ``(0, 1 - 2**-24]`` from uint32 words, exact near zero."""
    return ((words.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=1 - 2.0**-24)


def exponential(words: torch.Tensor) -> torch.Tensor:
    """Exp(1) draws, float32, from uint32 words."""
    return -torch.log1p(-uniform(words))


def normal(words0: torch.Tensor, words1: torch.Tensor) -> torch.Tensor:
    """N(0, 1) draws, float32, from two uint32 words each (Box-Muller)."""
    return torch.sqrt(-2 * torch.log(uniform(words0))) * torch.cos(2 * math.pi * uniform(words1))


def as_signed(values: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor:
    """64-bit unsigned Python ints as an int64 tensor of the same bits."""
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values], dtype=torch.int64, device=device)
