"""Kernels on a GPU, against torch on the same GPU, under FlashInfer and in a CUDA graph. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from sgl_vase_kernels import KVPool, Rows, torch_ops, triton_ops
from sgl_vase_kernels.paging import page_table_slots

from test.kernels.batches import batch, clone, raw, tokens, window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {
    "bf16-nhd1-d128": {"dtype": torch.bfloat16, "dims": (128, 128)},
    "fp16-hnd16-d80": {"dtype": torch.float16, "dims": (80, 80), "layout": "HND", "page_size": 16},
    "fp32-nhd1-d64": {"dtype": torch.float32},
    "e4m3-nhd16-d128": {"dtype": torch.float8_e4m3fn, "dims": (128, 128), "page_size": 16},
    "e5m2-hnd1-d256": {"dtype": torch.float8_e5m2, "dims": (256, 256), "layout": "HND"},
}


@pytest.fixture(params=SHAPES)
def drawn(request):
    return batch(7, candidates=(4096, 700, 5000), keep=(3968, 100, 4096), device="cuda", **SHAPES[request.param])


def close(actual, expected, rtol=1e-4):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * expected.abs().mean().item())


def test_scores(drawn):
    pool, rows = drawn
    for kind in ("range", "absmax", "l2", "variance"):
        close(triton_ops.value_magnitude(pool, rows, kind), torch_ops.value_magnitude(pool, rows, kind))
    norms = [m.projected_norms(pool, rows, 20, fixed_round=False) for m in (triton_ops, torch_ops)]
    close(*norms)
    close(*(m.cosine_redundancy(pool, rows, spare_newest=None) for m in (triton_ops, torch_ops)))
    close(*(m.mean_direction_cosine(pool, rows) for m in (triton_ops, torch_ops)))
    queries = window(3, pool, rows, 4, torch.float32 if pool.dtype is torch.float32 else torch.bfloat16)
    for pooling, group, last in (("avg", "mean", None), ("max", "max", 8)):
        options = {"pool_width": 5, "pooling": pooling, "group": group, "last": last}
        close(*(m.window_attention_scores(pool, rows, queries, **options) for m in (triton_ops, torch_ops)))


@pytest.mark.parametrize("race", [False, True])
def test_select_and_compact(drawn, race):
    pool, rows = drawn
    g = torch.Generator(device="cuda").manual_seed(0)
    score = torch.rand(pool.layers, pool.heads, sum(rows.candidates), generator=g, device="cuda").mul(2000).round()
    options = {"race": race, "sinks": False, "reserve_score": score.flip(-1), "sinks_lead": True}
    kept, expected = (m.select(pool, rows, score, **options) for m in (triton_ops, torch_ops))
    assert (kept != expected).any(-1).sum() <= (1 if race else 0)
    for keep_order in (False, True):
        one, two = clone(pool), clone(pool)
        triton_ops.compact(one, rows, expected, keep_order=keep_order)
        torch_ops.compact(two, rows, expected, keep_order=keep_order)
        for r, k in enumerate(rows.keep):
            stay = rows.slots[rows.indptr[r] :][: k + rows.buffer]
            assert all(torch.equal(raw(tokens(one, w)[:, stay]), raw(tokens(two, w)[:, stay])) for w in "kv")


def test_a_round_does_not_wait(drawn):
    """No synchronisation of host and device, from scores to compaction."""
    pool, rows = drawn
    queries = window(3, pool, rows, 4, torch.float32 if pool.dtype is torch.float32 else torch.bfloat16)

    def round_() -> None:
        reserve = triton_ops.value_magnitude(pool, rows, "range")
        options = {"pool_width": 5, "pooling": "avg", "group": "mean", "last": None}
        score = triton_ops.window_attention_scores(pool, rows, queries, **options)
        kept = triton_ops.select(pool, rows, score, race=True, sinks=False, reserve_score=reserve, sinks_lead=True)
        triton_ops.compact(pool, rows, kept, keep_order=False)

    round_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_store_queries_in_a_graph():
    ring = torch.zeros(4, 64, 8, 128, device="cuda")
    q = torch.randn(3, 8, 128, device="cuda")
    slots, positions = torch.tensor([2, 0, 3], device="cuda"), torch.tensor([5, 70, 64], device="cuda")
    triton_ops.store_queries(ring, slots, positions, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_ops.store_queries(ring, slots, positions, q)
    q.normal_()
    positions += 1
    graph.replay()
    assert torch.equal(ring[slots, positions % 64], q)


def test_flashinfer_decode_over_a_compacted_cache():
    flashinfer = pytest.importorskip("flashinfer")
    page_size, heads, group, dim, buffer = 16, 4, 2, 128, 16
    indptr, indices, last = [0, 9, 15], torch.randperm(20)[:15].int(), [7, 16]
    k, v = (torch.randn(20, page_size, heads, dim, device="cuda").half() for _ in range(2))
    pool = KVPool((k,), (v,))
    slots, lengths = page_table_slots(indptr, indices.cuda(), last, page_size)
    keep = tuple(n - 3 * buffer for n in lengths)
    rows = Rows(slots, lengths, buffer, (0, 0), keep, (0, 0), (0, 0), (1, 2), (0, 0), (0, 0))
    kept = triton_ops.select(pool, rows, triton_ops.value_magnitude(pool, rows, "range"), race=False, sinks=False,
                             reserve_score=None, sinks_lead=True)  # fmt: skip
    q = torch.randn(2, heads * group, dim, device="cuda").half()
    wanted = []
    for r, n in enumerate(rows.candidates):
        own, chosen = (
            slots[rows.indptr[r] : rows.indptr[r + 1]],
            kept[0, :, rows.keep_indptr[r] : rows.keep_indptr[r + 1]],
        )
        index = torch.cat([own[chosen], own[n:].expand(heads, -1)], 1)[..., None].expand(-1, -1, dim)
        keys, values = (tokens(pool, w)[0].transpose(0, 1).gather(1, index).float() for w in "kv")
        grouped = q[r].view(heads, group, dim).float()
        wanted.append(((grouped @ keys.transpose(1, 2) / dim**0.5).softmax(-1) @ values).flatten(0, 1))
    triton_ops.compact(pool, rows, kept, keep_order=False)
    left = [k_ + buffer for k_ in keep]
    pages = [-(-n // page_size) for n in left]
    table = torch.cat([indices[a : a + p] for a, p in zip(indptr[:-1], pages, strict=True)]).cuda()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    starts = torch.tensor([0, pages[0], sum(pages)], dtype=torch.int32, device="cuda")
    ends = torch.tensor(
        [n - (p - 1) * page_size for n, p in zip(left, pages, strict=True)], dtype=torch.int32, device="cuda"
    )
    wrapper.plan(starts, table, ends, heads * group, heads, dim, page_size, q_data_type=q.dtype, kv_data_type=k.dtype)
    torch.testing.assert_close(wrapper.run(q, (k, v)).float(), torch.stack(wanted), rtol=5e-3, atol=5e-3)
