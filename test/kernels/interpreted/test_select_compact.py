"""Selection against sorting, compaction against copying, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from sgl_vase_kernels import KVPool, Rows, torch_ops, triton_ops

from test.kernels.batches import batch, clone, raw, tokens

SELECTIONS = [
    {"race": race, "sinks": sinks, "reserve": reserve, "sinks_lead": lead}
    for race in (False, True)
    for sinks, reserve, lead in ((False, False, True), (True, False, True), (False, True, True), (True, True, False))
]


def scores_of(kind: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=g)
    if kind == "ties":
        return (x * 2).round().abs()
    if kind == "broken":
        x[..., ::3], x[..., 1::7], x[..., 2::11] = torch.nan, torch.inf, -torch.inf
    if kind == "signed zeros":
        return torch.where(x > 0, 0.0, -0.0)
    return x


@pytest.mark.parametrize("kind", ["random", "ties", "broken", "signed zeros"])
@pytest.mark.parametrize("options", SELECTIONS, ids=lambda o: "-".join(k for k, v in o.items() if v) or "top")
def test_select(kind, options):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    candidates, keep = (5, 130, 257, 64, 9), (5, 31, 100, 1, 0)
    pool, rows = batch(seed, candidates=candidates, keep=keep)
    g = torch.Generator().manual_seed(seed)
    shape = (pool.layers, pool.heads, sum(candidates))
    score, reserve = scores_of(kind, shape, g), scores_of(kind, shape, g)
    options = dict(options)
    reserve_score = reserve if options.pop("reserve") else None
    expected = torch_ops.select(pool, rows, score, reserve_score=reserve_score, **options)
    actual = triton_ops.select(pool, rows, score, reserve_score=reserve_score, **options)
    assert actual.dtype == torch.int64 and actual.shape == expected.shape
    different = (actual != expected).any(-1).sum().item()
    # Races meet logarithms that may round differently: one exchange at the cut is allowed in a batch.
    assert different <= (1 if options["race"] else 0), (actual, expected)


@pytest.mark.parametrize(("n", "race"), [(9000, False), (9000, True), (150_000, False)])
def test_select_of_long_rows(n, race):
    """Longer than one block: keys are computed again in every pass."""
    keep = 4100
    pool = KVPool.from_slots([torch.zeros(1, 1, 16)], [torch.zeros(1, 1, 16)])
    one = {
        "first": (3,),
        "keep": (keep,),
        "reserve": (900,),
        "sinks": (4,),
        "seed": (1,),
        "round": (2,),
        "carried": (0,),
    }
    rows = Rows(torch.zeros(n, dtype=torch.int64), (n,), 0, **one)
    g = torch.Generator().manual_seed(1)
    score, reserve = (torch.rand(1, 1, n, generator=g).mul(500).round() for _ in range(2))
    options = {"race": race, "sinks": False, "reserve_score": reserve, "sinks_lead": True}
    actual, expected = (m.select(pool, rows, score, **options) for m in (triton_ops, torch_ops))
    shared = len(set(actual.flatten().tolist()) & set(expected.flatten().tolist()))
    assert actual.shape == expected.shape and (actual.diff() > 0).all()
    assert shared >= keep - (1 if race else 0)


POOLS = {
    "fp32-nhd1": {"dtype": torch.float32, "dims": (80, 48)},
    "bf16-hnd4": {"dtype": torch.bfloat16, "dims": (96, 96), "layout": "HND", "page_size": 4},
    "e4m3-nhd16": {"dtype": torch.float8_e4m3fn, "dims": (64, 64), "page_size": 16},
}


def random_kept(rows: Rows, pool: KVPool, g: torch.Generator) -> torch.Tensor:
    parts = []
    for n, k in zip(rows.candidates, rows.keep, strict=True):
        order = torch.rand(pool.layers, pool.heads, n, generator=g).argsort(-1)[..., :k]
        parts.append(order.sort(-1).values)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("keep_order", [False, True])
def test_compact(name, keep_order):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    # Cuts from one entry (the buffer overlaps its own place) to nearly all; a row that keeps all, one that keeps none.
    candidates, keep = (75, 140, 90, 20, 12), (74, 21, 86, 20, 0)
    pool, rows = batch(seed, candidates=candidates, keep=keep, **POOLS[name])
    kept = random_kept(rows, pool, torch.Generator().manual_seed(seed))
    before, expected = clone(pool), clone(pool)
    triton_ops.compact(pool, rows, kept, keep_order=keep_order)
    torch_ops.compact(expected, rows, kept, keep_order=keep_order)
    outside = torch.ones(pool.slots, dtype=torch.bool)
    outside[rows.slots] = False
    for which in "kv":
        now, old, reference = (tokens(p, which) for p in (pool, before, expected))
        assert torch.equal(raw(now[:, outside]), raw(old[:, outside])), "a slot that no row owns was written"
        for r, n in enumerate(rows.candidates):
            own, k = rows.slots[rows.indptr[r] : rows.indptr[r + 1]], rows.keep[r]
            stay = own[: k + rows.buffer]
            assert torch.equal(now[:, stay], reference[:, stay])
            assert torch.equal(now[:, stay[k:]], old[:, own[n:]]), "the buffer lies right behind the survivors"
            for layer in range(pool.layers):
                for head in range(pool.heads):
                    chosen = kept[layer, head, rows.keep_indptr[r] : rows.keep_indptr[r + 1]]
                    a, b = now[layer, own[:k], head], old[layer, own[chosen], head]
                    if not keep_order:
                        a, b = a.sort(0).values, b.sort(0).values
                    assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attention_over_a_compacted_cache(layout):
    """Dense attention over the first entries of each row equals dense attention over the kept set."""
    pool, rows = batch(11, dims=(64, 64), layout=layout, page_size=4, candidates=(60, 41), keep=(30, 17))
    kept = random_kept(rows, pool, torch.Generator().manual_seed(3))
    q = torch.randn(pool.layers, pool.heads, 64)
    wanted = []
    for r, n in enumerate(rows.candidates):
        own = rows.slots[rows.indptr[r] : rows.indptr[r + 1]]
        chosen = kept[..., rows.keep_indptr[r] : rows.keep_indptr[r + 1]]
        index = torch.cat([own[chosen], own[n:].expand(*chosen.shape[:2], -1)], -1)[..., None].expand(-1, -1, -1, 64)
        k, v = (tokens(pool, which).transpose(1, 2).gather(2, index) for which in "kv")
        wanted.append(((q[:, :, None] @ k.transpose(2, 3) / 8).softmax(-1) @ v).squeeze(2))
    triton_ops.compact(pool, rows, kept, keep_order=False)
    for r in range(len(rows)):
        place = rows.slots[rows.indptr[r] : rows.indptr[r] + rows.keep[r] + rows.buffer]
        k, v = (tokens(pool, which)[:, place].transpose(1, 2) for which in "kv")
        torch.testing.assert_close(((q[:, :, None] @ k.transpose(2, 3) / 8).softmax(-1) @ v).squeeze(2), wanted[r])


@pytest.mark.parametrize("fault", ["outside", "overlap", "kept outside", "kept order"])
def test_debug_switch(monkeypatch, fault):
    monkeypatch.setenv("VASE_DEBUG", "1")
    pool, rows = batch(1)
    kept = random_kept(rows, pool, torch.Generator().manual_seed(3))
    if fault == "outside":
        rows.slots[3] = pool.slots
    elif fault == "overlap":
        rows.slots[3] = rows.slots[-1]
    elif fault == "kept outside":
        kept[1, 0, 39] = rows.candidates[0]
    else:
        kept[1, 0, 50] = kept[1, 0, 51]
    name = "kept" if "kept" in fault else "rows.slots"
    with pytest.raises(RuntimeError, match=name):
        triton_ops.compact(pool, rows, kept, keep_order=False)
