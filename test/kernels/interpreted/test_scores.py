"""Every scoring kernel against the torch implementation, over fresh random ragged batches."""

from __future__ import annotations

import random

import pytest
import torch
from sgl_vase_kernels import torch_ops, triton_ops

from test.kernels.batches import batch, window

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POOLS = {
    "fp32-nhd1-d64": {"dtype": FP32},
    "bf16-hnd4-d80": {"dtype": BF16, "dims": (80, 80), "layout": "HND", "page_size": 4},
    "fp16-nhd4-d96": {"dtype": FP16, "dims": (96, 96), "page_size": 4},
    "bf16-nhd1-d128x64": {"dtype": BF16, "dims": (128, 64), "heads": 1},
    "e4m3-hnd16-d128": {"dtype": E4M3, "dims": (128, 128), "layout": "HND", "page_size": 16},
    "e5m2-nhd1-d256": {"dtype": E5M2, "dims": (256, 256), "heads": 1, "candidates": (33, 70), "keep": (32, 1)},
}


@pytest.fixture(params=POOLS)
def drawn(request):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    pool, rows = batch(seed, **POOLS[request.param])
    return seed, pool, rows


def close(actual, expected, rtol=2e-5):
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * expected.abs().mean().item())


@pytest.mark.parametrize("kind", ["range", "absmax", "l2", "variance"])
def test_value_magnitude(drawn, kind):
    _, pool, rows = drawn
    close(triton_ops.value_magnitude(pool, rows, kind), torch_ops.value_magnitude(pool, rows, kind))


def test_key_reductions(drawn):
    _, pool, rows = drawn
    close(triton_ops.key_norms(pool, rows), torch_ops.key_norms(pool, rows))
    close(triton_ops.mean_direction_cosine(pool, rows), torch_ops.mean_direction_cosine(pool, rows))


@pytest.mark.parametrize("rank, fixed_round", [(20, False), (7, True)])
def test_projected_norms(drawn, rank, fixed_round):
    _, pool, rows = drawn
    expected = torch_ops.projected_norms(pool, rows, rank, fixed_round=fixed_round)
    close(triton_ops.projected_norms(pool, rows, rank, fixed_round=fixed_round), expected)


@pytest.mark.parametrize("threshold", [None, 0.15])
def test_cosine_redundancy(drawn, threshold):
    _, pool, rows = drawn
    expected = torch_ops.cosine_redundancy(pool, rows, spare_newest=threshold)
    close(triton_ops.cosine_redundancy(pool, rows, spare_newest=threshold), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"pool_width": 5, "pooling": "avg", "group": "mean", "last": None},
        {"pool_width": 7, "pooling": "max", "group": "max", "last": 8},
        {"pool_width": 3, "pooling": "avg", "group": "max", "last": None},
        {"pool_width": 9, "pooling": "max", "group": "mean", "last": 3},
        {"pool_width": 5, "pooling": "none", "group": "mean", "last": None},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_window_attention(drawn, options):
    seed, pool, rows = drawn
    queries = window(seed, pool, rows, 3, FP32 if pool.dtype is FP32 else BF16)
    close(
        triton_ops.window_attention_scores(pool, rows, queries, **options),
        torch_ops.window_attention_scores(pool, rows, queries, **options),
    )


def test_vectors_that_are_not_finite():
    pool, rows = batch(5, dtype=BF16)
    at = rows.slots[:6]
    for side in (pool.k, pool.v):
        for layer in side:
            layer[at[0], 0, :, 3] = torch.nan
            layer[at[1], 0, :, 4] = torch.inf
            layer[at[2], 0, :, 4:6] = torch.tensor([torch.inf, -torch.inf])
    for op, args in (("value_magnitude", ("range",)), ("value_magnitude", ("absmax",)), ("key_norms", ())):
        actual, expected = (getattr(m, op)(pool, rows, *args) for m in (triton_ops, torch_ops))
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=0)
    norms = [m.projected_norms(pool, rows, 20, fixed_round=False) for m in (triton_ops, torch_ops)]
    torch.testing.assert_close(*norms, equal_nan=True, rtol=2e-5, atol=0)
    assert norms[0][0, 0, 0].isnan() and norms[0][0, 0, 1] == torch.inf and norms[0][0, 0, 3].isfinite()
    redundancy = [m.cosine_redundancy(pool, rows, spare_newest=0.2) for m in (triton_ops, torch_ops)]
    torch.testing.assert_close(*redundancy, equal_nan=True, rtol=2e-5, atol=0)


def test_store_queries():
    g = torch.Generator().manual_seed(0)
    ring, q = torch.full((4, 6, 3, 80), torch.nan), torch.randn(5, 3, 160, generator=g)[..., :80]
    slots, positions = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([7, 100, 8, 6, 5])
    expected = ring.clone()
    expected[slots, positions % 6] = q
    triton_ops.store_queries(ring, slots, positions, q)
    torch.testing.assert_close(ring, expected, equal_nan=True, rtol=0, atol=0)
