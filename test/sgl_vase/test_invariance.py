"""A request's kept set is its own: the same bits alone or in a batch, on any rank, in any slots, after a restart."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from sgl_vase_kernels import ops

from sgl_vase import Round, policy_class, policy_names
from sgl_vase.randomness import request_key

from .conftest import BUFFER, Request, build

MINE = Request(1000, 61, 20, 6, seed=2**63 + 12345, round=3, first=40, carried=11, valid=5)
OTHERS = [
    Request(i, 9 + 5 * i % 97, 5 + i % 4, i % 5, sinks=i % 4, seed=i, round=i % 7, first=i, carried=i % 6, valid=i % 9)
    for i in range(63)
]
SPECS = {
    **{name: (name, {}) for name in policy_names()},
    "r-kv own": ("r-kv", {"variant": "r-kv", "spare_newest": True}),
    **{f"vase {m}": ("vase", {"magnitude": m}) for m in ops.MAGNITUDES[1:]},
    "vase top": ("vase", {"sampling": False, "pool_width": 1}),
}


def select(spec: str, round: Round) -> torch.Tensor:
    name, options = SPECS[spec]
    return policy_class(name)(options).select(replace(round, state=round.state.clone()))


def scores(round: Round) -> dict[str, torch.Tensor]:
    pool, rows, queries = round.pool, round.rows, round.queries
    return {
        **{kind: ops.value_magnitude(pool, rows, kind) for kind in ops.MAGNITUDES},
        "attention": ops.window_attention_scores(pool, rows, queries),
        "peak": ops.window_attention_scores(pool, rows, queries, pool_width=7, pooling="max", group="max", last=4),
        "norms": ops.projected_norms(pool, rows, 20),
        "redundancy": ops.cosine_redundancy(pool, rows),
        "spared": ops.cosine_redundancy(pool, rows, spare_newest=0.3),
        "key norms": ops.key_norms(pool, rows),
        "direction": ops.mean_direction_cosine(pool, rows),
    }


@pytest.mark.parametrize("spec", SPECS)
def test_alone_and_among_63_others(spec):
    alone = select(spec, build([MINE]))
    assert alone.shape == (3, 4, MINE.keep)
    for place in (0, 31, 63):
        batch = build([*OTHERS[:place], MINE, *OTHERS[place:]], placement=place)
        start = batch.rows.keep_indptr[place]
        assert torch.equal(select(spec, batch)[..., start : start + MINE.keep], alone), place


@pytest.mark.parametrize("spec", SPECS)
def test_split_over_ranks(spec):
    batch = [MINE, *OTHERS[:5]]
    whole = select(spec, build(batch))
    heads = [select(spec, build(batch, own_heads=slice(*part))) for part in ((0, 2), (2, 4))]
    assert torch.equal(torch.cat(heads, 1), whole)
    layers = [select(spec, build(batch, own_layers=slice(*part))) for part in ((0, 1), (1, 3))]
    assert torch.equal(torch.cat(layers, 0), whole)
    assert spec == "streaming" or not torch.equal(heads[0], heads[1])
    single = select(spec, build(batch, own_heads=slice(3, 4), own_layers=slice(2, 3)))
    assert torch.equal(single, whole[2:, 3:])


def test_a_candidates_draw_belongs_to_its_place_in_the_whole_row():
    """Behind a protected prefix of 15, candidate i draws what candidate 15 + i of the unprotected row draws."""
    whole = Request(1, 80, 30, sinks=0, seed=5, round=2)
    kept = policy_class("random")({"sinks": False}).select(build([whole], layers=1, heads=1)).flatten()
    behind = kept[kept >= 15] - 15
    private = replace(whole, candidates=65, keep=len(behind), first=15)
    again = policy_class("random")({"sinks": False}).select(build([private], layers=1, heads=1)).flatten()
    assert 15 < len(behind) < 30 and torch.equal(again, behind)


def test_streaming_is_the_same_for_every_head():
    kept = select("streaming", build([MINE]))
    assert torch.equal(kept, kept[:1, :1].expand_as(kept))


@pytest.mark.parametrize(
    "where",
    [
        {"placement": 9},
        {"layout": "HND"},
        {"layout": "HND", "page_size": 16, "placement": 3},
        {"layout": "NHD", "page_size": 8, "placement": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", SPECS)
def test_elsewhere_in_the_pool(spec, where):
    batch = [MINE, *OTHERS[:5]]
    assert torch.equal(select(spec, build(batch, **where)), select(spec, build(batch)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "size", [{}, {"dim": 80, "group": 3}, {"dim": 128, "group": 1, "dtype": torch.bfloat16}], ids=str
)
def test_scores_have_the_same_bits(size, threads, set_threads):
    """Stronger than kept sets: every score, alone, in a batch, for one head of one layer, on any number of threads."""
    set_threads(1)
    want = scores(build([MINE], **size))
    set_threads(threads)
    batch = build([*OTHERS[:20], MINE], placement=2, **size)
    for name, got in scores(batch).items():
        assert torch.equal(got[..., -MINE.candidates :], want[name]), name
    alone = build([MINE], own_heads=slice(1, 2), own_layers=slice(1, 2), **size)
    for name, got in scores(alone).items():
        assert torch.equal(got, want[name][1:2, 1:2]), name


def test_long_rows_have_the_same_bits(set_threads):
    """Rows long enough to be computed in blocks."""
    long = replace(MINE, candidates=3000)
    for threads in (1, 2):
        set_threads(threads)
        whole = scores(build([long], layers=2, heads=2))
        part = scores(build([OTHERS[3], long], layers=2, heads=2, own_heads=slice(1, 2), own_layers=slice(0, 1)))
        for name, got in part.items():
            assert torch.equal(got[..., -3000:], whole[name][:1, 1:]), (name, threads)


def fingerprint() -> str:
    batch = [MINE, *OTHERS[:8]]
    digest = hashlib.sha256()
    for spec in SPECS:
        digest.update(select(spec, build(batch)).numpy().tobytes())
    return digest.hexdigest()


def test_after_a_restart():
    code = "from test.sgl_vase.test_invariance import fingerprint; print(fingerprint())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == fingerprint()


DRAWING = ["vase-attnv", "vase-dkv", "curdkv", "random"]


@pytest.mark.parametrize("spec", DRAWING)
def test_seeds_decide(spec):
    """Greedy requests share a request seed, whatever their ids: they draw alike. Other seeds draw otherwise; a seed
    given again reproduces."""
    greedy = replace(MINE, seed=request_key(7, 0))
    kept = select(spec, build([greedy, greedy]))
    assert torch.equal(kept[..., : MINE.keep], kept[..., MINE.keep :])
    sampled = replace(MINE, seed=request_key(7, 1))
    other = select(spec, build([sampled]))
    assert not torch.equal(other, kept[..., : MINE.keep])
    assert torch.equal(select(spec, build([sampled])), other)
    assert not torch.equal(select(spec, build([replace(MINE, seed=request_key(8, 0))])), kept[..., : MINE.keep])


@pytest.mark.parametrize("spec", sorted({*SPECS} - {*DRAWING, "vase", "vase absmax", "vase l2", "vase variance"}))
def test_the_rest_draws_nothing(spec):
    assert torch.equal(select(spec, build([replace(MINE, seed=1)])), select(spec, build([replace(MINE, seed=2)])))


def test_the_batch_is_a_batch():
    """What the tests above stand on: contents follow the request, the rest of the pool is NaN."""
    a, b = build([MINE], placement=1), build([OTHERS[0], MINE], placement=2)
    for layer in range(3):
        mine = b.rows.slots[b.rows.indptr[1] :]
        assert torch.equal(a.pool.k[layer][a.rows.slots], b.pool.k[layer][mine])
        assert a.pool.v[layer].isnan().any(-1).sum() == 4 * (a.pool.slots - MINE.candidates - BUFFER)
