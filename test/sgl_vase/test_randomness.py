"""Counter-based random numbers: known answers, ranges, and no global generator."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from sgl_vase_kernels import rng

from sgl_vase import policy_class, policy_names
from sgl_vase.randomness import _mix, request_key

from .conftest import Request, build

ONES = 0xFFFFFFFF
PINNED = 0xE220A8397B1DCDAF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The published vectors of philox4x32-10 in Random123's ``kat_vectors``."""
    words = rng.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(w.item() for w in words) == expected


def test_philox_broadcasts():
    c0, c1 = torch.arange(5), torch.arange(3).view(-1, 1) << 16
    zero, seeds = torch.tensor(0), rng.split_key(rng.as_signed([2**64 - 3, 7, 2**63, 0, 1], torch.device("cpu")))
    words = rng.philox((c0, c1, zero, zero), seeds)
    assert words[0].shape == (3, 5)
    one = rng.philox((c0[4], c1[2, 0], zero, zero), (seeds[0][4], seeds[1][4]))
    assert [w[2, 4].item() for w in words] == [w.item() for w in one]


def test_key_words_are_the_halves_of_the_seed():
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    low, high = rng.split_key(rng.as_signed(seeds, torch.device("cpu")))
    assert [(h << 32) | x for x, h in zip(low.tolist(), high.tolist(), strict=True)] == seeds


def test_draws_are_finite_and_in_range_at_the_extremes():
    words = torch.tensor([0, 1, ONES // 2, ONES - 1, ONES])
    u = rng.uniform(words)
    assert u.dtype == torch.float32
    assert u.tolist() == [2.0**-33, 1.5 * 2.0**-32, 0.5, 1 - 2.0**-24, 1 - 2.0**-24]
    e = rng.exponential(words)
    assert (e > 0).all() and e.isfinite().all() and e[-1].item() == pytest.approx(24 * math.log(2))
    normal = rng.normal(words.view(-1, 1), words)
    assert normal.isfinite().all() and normal.max().item() == pytest.approx(math.sqrt(66 * math.log(2)))


def test_mix_is_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as published with its reference code."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(_mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_request_keys():
    """Pinned, since a restart must draw alike; distinct; either seed flips about half of the bits."""
    assert request_key(0, 0) == request_key(0, 2**64) == PINNED
    keys = [request_key(server, request) for server in range(200) for request in range(200)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    for other in (request_key(1, 0), request_key(0, 1), request_key(2**63, 0), request_key(0, 2**63)):
        assert 16 <= (PINNED ^ other).bit_count() <= 48


def global_generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("name", policy_names())
def test_no_global_generator_is_touched(name):
    round = build([Request(1, 30, 10, 4), Request(2, 21, 7, 2)])
    policy = policy_class(name)()
    before = global_generators()
    kept = policy.select(round)
    assert global_generators() == before
    torch.manual_seed(before[0][0] + 1)
    # h2o carries its totals over: a second round would start from others
    assert policy.needs_state or torch.equal(policy.select(round), kept)
