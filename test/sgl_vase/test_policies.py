"""What each policy promises, on batches small enough to see through; kept sets in full are ``test_oracle``'s."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from sgl_vase_kernels import QueryWindow, ops, torch_ops

from sgl_vase import Round, policy_class, policy_names

from .conftest import BUFFER, Request, build

BATCH = [
    Request(1, 40, 20, 6),
    Request(2, 33, 32, 8, sinks=0),
    Request(3, 57, 5, 0),
    Request(4, 12, 12, 12),
    Request(5, 9, 0),
]


def select(name: str, round: Round, **options: object) -> torch.Tensor:
    return policy_class(name)(options).select(round)


def members(kept: torch.Tensor, n: int) -> torch.Tensor:
    """bool ``[layers, heads, n]``."""
    return torch.zeros(*kept.shape[:2], n, dtype=torch.bool).scatter_(2, kept, True)


def spoil(round: Round, value: float) -> Round:
    """The same with ``value`` in some keys, values and queries."""
    for layer in range(round.pool.layers):
        round.pool.k[layer][::3, :, :, 0] = value
        round.pool.v[layer][::2, :, :, 1] = value
    round.queries.ring[:, :, ::4, :, 2] = value
    return round


@pytest.mark.parametrize(
    ("name", "queries", "order", "state"),
    [
        ("vase-attnv", True, True, False),
        ("vase-dkv", False, False, False),
        ("snapkv", True, True, False),
        ("curdkv", False, False, False),
        ("r-kv", True, True, False),
        ("random", False, False, False),
        ("streaming", False, True, False),
        ("keydiff", False, False, False),
        ("knorm", False, False, False),
        ("value-range", False, False, False),
        ("evict-large-range", False, False, False),
        ("h2o", True, True, True),
    ],
)
def test_needs(name, queries, order, state):
    """A policy works with exactly what it asks for, and pays for that alone."""
    policy = policy_class(name)()
    assert (policy.needs_queries, policy.needs_order, policy.needs_state) == (queries, order, state)
    size = policy.state_bytes(layers=36, q_heads=32, dim=128, window=64, itemsize=2)
    assert size == (36 * 64 * 32 * 128 * 2 if queries else 0)
    round = build(BATCH)
    asked = Round(round.pool, round.rows, round.queries if queries else None, round.state if state else None)
    assert policy.select(asked).shape == (3, 4, sum(r.keep for r in BATCH))


@pytest.mark.parametrize("spoiled", [None, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("name", policy_names())
def test_exactly_keep_distinct_candidates_whatever_the_numbers(name, group, spoiled):
    round = build(BATCH, group=group)
    kept = select(name, round if spoiled is None else spoil(round, spoiled))
    assert kept.dtype == torch.int64
    for request, part in zip(BATCH, kept.split([r.keep for r in BATCH], dim=-1), strict=True):
        assert part.shape == (3, 4, request.keep)
        assert (part.diff() > 0).all()
        assert ((part >= 0) & (part < request.candidates)).all()


@pytest.mark.parametrize("name", policy_names())
def test_nothing_is_written_but_the_state(name):
    round = build(BATCH)
    tensors = (*round.pool.k, *round.pool.v, round.queries.ring, round.rows.slots)
    before = [t.clone() for t in tensors]
    select(name, round)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensors, before, strict=True))


SINKING = ["vase-attnv", "vase-dkv", "curdkv", "random", "streaming", "value-range"]


@pytest.mark.parametrize("name", policy_names())
def test_sinks(name):
    """Whose first positions always stay, on 8 requests whose first keys and values are nothing special."""
    requests = [Request(i, 100, 20, 8, seed=i) for i in range(8)]
    kept = select(name, build(requests)).view(3, 4, 8, 20)
    stay = (kept[..., :4] == torch.arange(4)).all()
    assert stay == (policy_class(name).name in SINKING)
    none = select(name, build([replace(r, sinks=0) for r in requests])).view(3, 4, 8, 20)
    assert not (none[..., :4] == torch.arange(4)).all()


# --- attnv ----------------------------------------------------------------------------------------------------------


def values(round: Round) -> torch.Tensor:
    """Candidates' values of a batch of one: ``[layers, heads, n, dim]``."""
    n = round.rows.candidates[0]
    return torch.stack([v[round.rows.slots[:n], 0] for v in round.pool.v]).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("range", lambda v: v.amax(-1) - v.amin(-1)),
        ("absmax", lambda v: v.abs().amax(-1)),
        ("l2", lambda v: v.norm(dim=-1)),
        ("variance", lambda v: v.var(-1, correction=0)),
    ],
)
@pytest.mark.parametrize("sinks", [True, False])
def test_attnv_reserves_the_largest_magnitudes(kind, size, sinks):
    round = build([Request(1, 50, 30, 12)])
    magnitude = size(values(round))
    if sinks:
        magnitude[..., :4] = torch.inf
    top = magnitude.topk(12).indices
    kept = members(select("vase", round, magnitude=kind, sinks=sinks), 50)
    assert kept.gather(2, top).all()
    # the rest is drawn: not the largest of what is left, nor the same in the next round
    later = replace(round, rows=replace(round.rows, round=(1,)))
    assert not torch.equal(members(select("vase", later, magnitude=kind, sinks=sinks), 50), kept)


def test_attnv_without_reserve_and_sampling_is_snapkv():
    round = build([Request(i, 60, 20, 0) for i in range(4)])
    assert torch.equal(select("vase", round, sampling=False), select("snapkv", round))
    assert not torch.equal(select("vase", round, sampling=False, pool_width=1), select("snapkv", round))
    assert not torch.equal(select("vase", round), select("snapkv", round))


def test_attnv_reserving_everything_is_value_range():
    round = build([Request(i, 60, 20, 20) for i in range(4)])
    assert torch.equal(select("vase", round), select("value-range", round))


def test_attnv_draws_what_is_attended():
    """One key that all queries love is kept by every head, and its neighbours as far as the pool reaches."""
    round = build([Request(1, 80, 6, 0)], dim=4)
    round.queries.ring[:] = 1.0
    where = round.rows.slots[50]
    for k in round.pool.k:
        k[round.rows.slots] = 0.0
        k[where] = 40.0
    assert select("vase", round, pool_width=3).eq(50).any(-1).all()
    around = members(select("vase", round, pool_width=5, sampling=False), 80)
    assert around[..., 48:53].all()


def test_the_window_is_what_is_valid_and_newest():
    """Queries that are not in the ring do not count; ``last`` takes the newest, wherever the ring wraps."""
    round = build([Request(3, 40, 10, valid=5)])
    queries = round.queries
    score = ops.window_attention_scores(round.pool, round.rows, queries)
    assert torch.allclose(score.sum(-1), torch.ones(()), atol=0.05)  # pooling loses a little at the ends
    columns = queries.columns(0)
    assert columns == [6, 7, 0, 1, 2]  # positions 6 to 10 of a window of 8
    other = queries.ring.clone()
    other[:, :, [c for c in range(8) if c not in columns]] = 1e4
    assert torch.equal(ops.window_attention_scores(round.pool, round.rows, replace(queries, ring=other)), score)
    newest = ops.window_attention_scores(round.pool, round.rows, queries, last=2)
    assert torch.equal(ops.window_attention_scores(round.pool, round.rows, replace(queries, valid=(2,))), newest)
    nothing = ops.window_attention_scores(round.pool, round.rows, replace(queries, valid=(0,)))
    assert not nothing.any()


# --- the others -----------------------------------------------------------------------------------------------------


def test_curdkv_is_dkv_of_round_0_for_ever():
    first, later = (build([Request(i, 60, 20, round=n) for i in range(4)]) for n in (0, 7))
    assert torch.equal(select("curdkv", first), select("vase-dkv", first))
    assert torch.equal(select("curdkv", later), select("curdkv", first))
    assert not torch.equal(select("vase-dkv", later), select("vase-dkv", first))


def test_dkv_approaches_the_product_of_norms():
    """With many columns ``||G^T k||^2 ||G^T v||^2`` is the product of squared norms (to 2 sqrt(2 / rank))."""
    round = build([Request(1, 40, 20, sinks=0)])
    k = torch.stack([x[round.rows.slots[:40], 0] for x in round.pool.k]).transpose(1, 2)
    exact = k.square().sum(-1) * values(round).square().sum(-1)
    ratio = ops.projected_norms(round.pool, round.rows, 20_000) / exact
    assert (ratio - 1).abs().max() < 0.1
    assert (ops.projected_norms(round.pool, round.rows, 20) / exact - 1).abs().max() > 0.3


def test_streaming_keeps_the_first_and_the_newest():
    round = build([Request(1, 30, 10, sinks=4), Request(2, 20, 3, sinks=4), Request(3, 20, 3, sinks=0)])
    want = torch.tensor([0, 1, 2, 3, 24, 25, 26, 27, 28, 29, 0, 1, 2, 17, 18, 19])
    assert torch.equal(select("streaming", round), want.expand(3, 4, -1))


def test_value_range_and_its_ablation_are_complements():
    round = build([Request(1, 40, 15)])
    rest = build([Request(1, 40, 25)])
    small = members(select("evict-large-range", rest), 40)
    assert torch.equal(members(select("value-range", round, sinks=False), 40), ~small)
    assert members(select("evict-large-range", rest, sinks=True), 40)[..., :4].all()


def test_knorm_keeps_small_keys_and_keydiff_odd_ones():
    round = build([Request(1, 40, 5)])
    slots = round.rows.slots
    for k in round.pool.k:
        k[slots] = 1.0 + 0.01 * k[slots]
        k[slots[[3, 9, 17, 20, 39]]] *= 0.1
        k[slots[[4, 10, 18, 21, 38]], ..., ::2] *= -2.0
    assert torch.equal(select("knorm", round), torch.tensor([3, 9, 17, 20, 39]).expand(3, 4, -1))
    assert torch.equal(select("keydiff", round), torch.tensor([4, 10, 18, 21, 38]).expand(3, 4, -1))


def test_rkv_drops_copies_and_may_spare_the_newest():
    """Ten orthogonal keys, of which 2, 5 and 8 are one key: equal attention, so redundancy decides."""
    round = build([Request(1, 10, 7, 0)])
    slots = round.rows.slots[:10]
    basis = torch.eye(16)[[0, 1, 2, 3, 4, 2, 5, 6, 2, 7]]
    for k in round.pool.k:
        k[slots] = basis.view(10, 1, 1, 16)
    round.queries.ring[:] = 0.0
    assert torch.equal(select("r-kv", round, lam=0.0), torch.tensor([0, 1, 3, 4, 6, 7, 9]).expand(3, 4, -1))
    spared = ops.cosine_redundancy(round.pool, round.rows, spare_newest=0.5)
    # The newest of 2 and 5 is 8, that of 8 is 5: 8 has no copy left, 5 has one, 2 has both.
    want = torch.tensor([{2: 0.2, 5: 0.1}.get(i, 0.0) for i in range(10)]).softmax(0)
    assert torch.allclose(spared, want)
    assert not torch.equal(select("r-kv", round, lam=1.0), select("r-kv", round, lam=0.0))
    assert torch.equal(
        select("r-kv", round, lam=0.0, spare_newest=True), torch.tensor([0, 1, 3, 4, 6, 7, 8]).expand(3, 4, -1)
    )
    own = select("r-kv", build([Request(1, 60, 20)]), variant="r-kv")
    assert not torch.equal(own, select("r-kv", build([Request(1, 60, 20)])))


def test_h2o_adds_up_over_rounds():
    """The state holds each survivor's total where compaction puts it; new tokens start from nothing."""
    round = build([Request(1, 30, 20, carried=0), Request(2, 25, 10, carried=12)])
    pool, rows, state = round.pool, round.rows, round.state
    before = state.clone()
    attention = ops.window_attention_scores(pool, rows, round.queries, pooling="none") * 8
    attention[..., 30:42] += before[:, :, rows.slots[38:50]]
    kept = select("h2o", round)
    for r, (n, keep) in enumerate(((30, 20), (25, 10))):
        total = attention[..., rows.candidate_indptr[r] :][..., :n]
        part = kept[..., rows.keep_indptr[r] :][..., :keep]
        assert torch.equal(part, total.topk(keep).indices.sort().values)
        places = rows.slots[rows.indptr[r] :][:keep]
        assert torch.equal(state[:, :, places], total.gather(2, part))
        before[:, :, places] = state[:, :, places]
    assert torch.equal(state.nan_to_num(7), before.nan_to_num(7))


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vase", {"magnitude": "mean"}, r"option magnitude must be one of range, absmax, l2, variance, got 'mean'"),
        ("vase", {"pool_width": 4}, r"option pool_width must be odd, got 4"),
        ("vase", {"pool_width": 0}, r"option pool_width must be a whole number >= 1, got 0"),
        ("vase", {"pool_width": 5.0}, r"option pool_width must be a whole number >= 1, got 5.0"),
        ("vase", {"sinks": "yes"}, r"option sinks must be true or false, got 'yes'"),
        ("vase", {"n_v": 3}, r"--eviction vase-attnv has no option n_v; known: magnitude, pool_width, sampling, sinks"),
        ("vase-dkv", {"rank": 0}, r"option rank must be a whole number >= 1, got 0"),
        ("curdkv", {"rank": True}, r"option rank must be a whole number >= 1, got True"),
        ("r-kv", {"lam": 1.5}, r"option lam must be a number in \[0, 1\], got 1.5"),
        ("r-kv", {"lam": float("nan")}, r"option lam must be a number in \[0, 1\], got nan"),
        ("r-kv", {"lam": "0.5"}, r"option lam must be a number in \[0, 1\], got '0.5'"),
        ("r-kv", {"variant": "rkv"}, r"option variant must be one of vase, r-kv, got 'rkv'"),
        ("r-kv", {"spare_newest": 0.5}, r"option spare_newest must be true or false, got 0.5"),
        ("random", {"sinks": 1}, r"option sinks must be true or false, got 1"),
        ("evict-large-range", {"sinks": None}, r"option sinks must be true or false, got None"),
        ("h2o", {"window": 8}, r"--eviction h2o has no option window; known: none"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        policy_class(name)(options)


# --- the dispatch point ---------------------------------------------------------------------------------------------


def test_backend(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("VASE_KERNELS", raising=False)
    assert (ops.backend(cpu), ops.backend(cuda)) == ("torch", "triton")
    monkeypatch.setenv("VASE_KERNELS", "torch")
    assert ops.backend(cuda) == "torch"
    monkeypatch.setenv("VASE_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"VASE_KERNELS must be triton or torch, got 'cuda'"):
        ops.backend(cpu)


def test_the_override_is_followed(monkeypatch):
    """With ``triton`` asked for, nothing falls back to torch."""
    calls = []
    stand_in = ModuleType("sgl_vase_kernels.triton_ops")
    stand_in.key_norms = lambda pool, rows: calls.append("triton")
    monkeypatch.setitem(sys.modules, "sgl_vase_kernels.triton_ops", stand_in)
    monkeypatch.setattr("sgl_vase_kernels.triton_ops", stand_in, raising=False)
    monkeypatch.setattr(torch_ops, "key_norms", lambda pool, rows: calls.append("torch"))
    round = build(BATCH)
    for choice in ("torch", "triton"):
        monkeypatch.setenv("VASE_KERNELS", choice)
        ops.key_norms(round.pool, round.rows)
    assert calls == ["torch", "triton"]


def test_arguments_that_do_not_fit_are_named():
    round = build(BATCH)
    pool, rows, queries = round.pool, round.rows, round.queries
    score = torch.zeros(3, 4, rows.candidate_indptr[-1])

    def window(**fields: object) -> QueryWindow:
        return replace(queries, **fields)

    cases = {
        r"kind must be one of range": lambda: ops.value_magnitude(pool, rows, "max"),
        r"pool_width must be odd and positive, got 2": lambda: ops.window_attention_scores(
            pool, rows, queries, pool_width=2
        ),
        r"pooling must be avg, max or none": lambda: ops.window_attention_scores(pool, rows, queries, pooling="sum"),
        r"last must be positive, got 0": lambda: ops.window_attention_scores(pool, rows, queries, last=0),
        r"queries.ring must be \[layers=3": lambda: ops.window_attention_scores(
            pool, rows, window(ring=queries.ring[:2])
        ),
        r"7 query heads, no multiple of 4": lambda: ops.window_attention_scores(
            pool, rows, window(ring=queries.ring[:, :, :, :7])
        ),
        r"queries describes 2 requests, rows 5": lambda: ops.window_attention_scores(pool, rows, window(slot=(0, 1))),
        r"queries.slot must be in \[0, 7\)": lambda: ops.window_attention_scores(
            pool, rows, window(slot=(0, 1, 2, 3, -1))
        ),
        r"queries.valid must be in \[0, window=8\]": lambda: ops.window_attention_scores(
            pool, rows, window(valid=(1, 1, 1, 1, 9))
        ),
        r"rank must be positive, got 0": lambda: ops.projected_norms(pool, rows, 0),
        r"score must be float32 \(3, 4, 151\)": lambda: ops.select(pool, rows, score.double()),
        r"reserve_score must be float32": lambda: ops.select(pool, rows, score, reserve_score=score[:1]),
        r"kept must be int64 \(3, 4, 69\)": lambda: ops.compact(pool, rows, score.long(), keep_order=True),
        r"rows.slots is on meta": lambda: ops.key_norms(pool, replace(rows, slots=rows.slots.to("meta"))),
        r"rows holds no request": lambda: ops.key_norms(pool, build([]).rows),
        r"q must be \(1, 8, 16\)": lambda: ops.store_queries(
            queries.ring[0], torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 8, 16)
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("keep", range(10))
def test_the_order_of_selection(keep):
    """Higher first, then earlier (0.0 equals -0.0), NaN of either sign last."""
    values = torch.tensor([0.0, torch.nan, -torch.inf, torch.inf, -0.0, 1.0, 1.0, -1e-45, -torch.nan])
    best = [3, 5, 6, 0, 4, 7, 2, 1, 8][:keep]
    round = build([Request(1, 9, keep)], layers=1, heads=1)
    kept = ops.select(round.pool, round.rows, values.view(1, 1, 9))
    assert kept.flatten().tolist() == sorted(best)


# --- moving ---------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(round: Round) -> torch.Tensor:
    """Raw bytes of all slots: ``[2, layers, heads, slots, bytes]``."""
    sides = [torch.stack([b.view(torch.uint8) for b in side]) for side in (round.pool.k, round.pool.v)]
    heads_last = torch.stack(sides) if round.pool.layout == "NHD" else torch.stack(sides).transpose(3, 4)
    return heads_last.flatten(2, 3).transpose(2, 3).clone()


@pytest.mark.parametrize("keep_order", [True, False])
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 1), ("NHD", 4), ("HND", 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compact(dtype, layout, page_size, keep_order):
    """Survivors come first, the buffer right behind, bit by bit; nothing else changes."""
    round = build(BATCH, dtype=dtype, layout=layout, page_size=page_size)
    rows = round.rows
    kept = select("random", round, sinks=False)
    before = bits(round)
    ops.compact(round.pool, rows, kept, keep_order=keep_order)
    after = bits(round)
    untouched = torch.ones(round.pool.slots, dtype=torch.bool)
    for r, request in enumerate(BATCH):
        row = rows.slots[rows.indptr[r] : rows.indptr[r + 1]]
        untouched[row[: request.keep + BUFFER]] = False
        old, new = before[:, :, :, row], after[:, :, :, row]
        assert torch.equal(new[:, :, :, request.keep : request.keep + BUFFER], old[:, :, :, request.candidates :])
        chosen = kept[..., rows.keep_indptr[r] : rows.keep_indptr[r + 1]]
        for layer in range(3):
            for head in range(4):
                want = old[:, layer, head, chosen[layer, head]]
                got = new[:, layer, head, : request.keep]
                if keep_order:
                    assert torch.equal(got, want)
                    continue
                stay = chosen[layer, head][chosen[layer, head] < request.keep]
                assert torch.equal(got[:, stay], old[:, layer, head, stay])
                assert sorted(map(bytes, got[0].tolist())) == sorted(map(bytes, want[0].tolist()))
                # a key and its value move together
                pairs = {(bytes(k), bytes(v)) for k, v in zip(*want.tolist(), strict=True)}
                assert {(bytes(k), bytes(v)) for k, v in zip(*got.tolist(), strict=True)} == pairs
    assert torch.equal(after[:, :, :, untouched], before[:, :, :, untouched])


def test_compact_fills_a_hole_and_leaves_the_rest():
    """The smallest case: of three entries, 1 and 2 stay in a row of two."""
    round = build([Request(1, 3, 2, sinks=0)])
    rows = round.rows
    before = round.pool.k[0][rows.slots, 0].clone()
    ops.compact(round.pool, rows, torch.tensor([1, 2]).expand(3, 4, -1).contiguous(), keep_order=False)
    after = round.pool.k[0][rows.slots, 0]
    assert torch.equal(after[:2], before[[2, 1]])
    assert torch.equal(after[2 : 2 + BUFFER], before[3 : 3 + BUFFER])


def test_a_view_of_a_larger_buffer_is_refused():
    round = build([Request(1, 20, 5)])
    strided = replace(round.pool, k=tuple(torch.zeros(*k.shape[:-1], 32)[..., :16] for k in round.pool.k))
    with pytest.raises(ValueError, match="pool: the torch implementation needs contiguous buffers"):
        ops.key_norms(strided, round.rows)


def test_store_queries():
    """Each token's queries land in its request's slot, column position modulo window, in the ring's dtype."""
    ring = torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16)
    q = torch.randn(5, 2, 8)
    slots, positions = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([3, 4, 1, 9, 102])
    ops.store_queries(ring, slots, positions, q)
    want = torch.zeros_like(ring)
    for t in range(5):
        want[slots[t], positions[t] % 4] = q[t].bfloat16()
    assert torch.equal(ring, want) and want.any(-1).any(-1).sum() == 5
