"""What does not fit is refused on the host, by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sgl_vase_kernels import KVPool, Rows, ops, triton_ops
from sgl_vase_kernels.paging import page_table_slots
from sgl_vase_kernels.triton_ops import host

from test.kernels.batches import batch, window


def changed(rows: Rows, **fields: object) -> Rows:
    return dataclasses.replace(rows, **fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"keep": (40,)}, "keep has 1 entries"),
        ({"keep": (40, 141)}, "keep 141 outside"),
        ({"reserve": (41, 0)}, "reserve 41 outside"),
        ({"sinks": (76, 0)}, "sinks 76 outside"),
        ({"lengths": (83, 147)}, "slots must be int64"),
        ({"buffer": -1}, "buffer must be"),
    ],
)
def test_rows(fields, message):
    _, rows = batch(0)
    with pytest.raises(ValueError, match=message):
        changed(rows, **fields)


def test_slots_of_another_type():
    _, rows = batch(0)
    with pytest.raises(ValueError, match="slots must be int64"):
        changed(rows, slots=rows.slots.int())


def test_pools():
    a, b = torch.zeros(8, 1, 2, 64), torch.zeros(8, 1, 2, 80)
    for k, v, message in (
        ((a, b), (a, a), r"k\[1\] differs"),
        ((a,), (a, a), "one buffer a layer"),
        ((a,), (a.half(),), "k and v differ"),
        ((a.transpose(2, 3),), (a,), "dense last dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            KVPool(k, v)
    with pytest.raises(ValueError, match="layout"):
        KVPool((a,), (a,), "NDH")


def test_operations():
    pool, rows = batch(0)
    scores = torch.zeros(pool.layers, pool.heads, sum(rows.candidates))
    kept = torch.zeros(pool.layers, pool.heads, sum(rows.keep), dtype=torch.int64)
    queries = window(0, pool, rows, 2, torch.float32)
    elsewhere = changed(rows, slots=rows.slots.to("meta"))
    for call, message in (
        (lambda: ops.value_magnitude(pool, rows, "median"), "kind must be"),
        (lambda: ops.value_magnitude(pool, elsewhere), "rows.slots is on meta"),
        (lambda: ops.select(pool, rows, scores[..., 1:]), "score must be float32"),
        (lambda: ops.select(pool, rows, scores.double()), "score must be float32"),
        (lambda: ops.select(pool, rows, scores, reserve_score=scores[:1]), "reserve_score must be"),
        (lambda: ops.compact(pool, rows, kept[..., 1:], keep_order=True), "kept must be int64"),
        (lambda: ops.compact(pool, rows, kept.int(), keep_order=True), "kept must be int64"),
        (lambda: ops.compact(pool, rows, kept[:, :1], keep_order=True), "kept must be int64"),
        (lambda: ops.projected_norms(pool, rows, 0), "rank must be"),
        (lambda: ops.window_attention_scores(pool, rows, queries, pool_width=4), "pool_width"),
        (
            lambda: ops.window_attention_scores(pool, rows, dataclasses.replace(queries, ring=queries.ring[1:])),
            "queries.ring must be",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_triton_does_not_take(monkeypatch):
    pool, rows = batch(0)
    with pytest.raises(ValueError, match="Triton needs CUDA"):
        triton_ops.value_magnitude(pool, rows, "range")
    monkeypatch.setattr(host, "interpreting", lambda: True)
    for shape, dtype, message in (((8, 2, 320), torch.float32, "at most 256"), ((8, 2, 64), torch.float64, "float64")):
        x = [torch.zeros(shape, dtype=dtype)]
        with pytest.raises(ValueError, match=message):
            host.side(KVPool.from_slots(x, x), "k")
    n = host.MAX_CANDIDATES + 1
    row = Rows(torch.zeros(n, dtype=torch.int64), (n,), 0, (0,), (1,), (0,), (0,), (0,), (0,), (0,))
    with pytest.raises(ValueError, match="1048577 candidates"):
        host.row_metadata(pool, row)
    with pytest.raises(ValueError, match="at most 65535 rows"):
        host.launch(None, (1, 65_536, 1))


def test_an_unknown_backend(monkeypatch):
    pool, rows = batch(0)
    monkeypatch.setenv("VASE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="VASE_KERNELS must be triton or torch"):
        ops.value_magnitude(pool, rows)


def test_page_tables():
    indices = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    slots, lengths = page_table_slots([0, 2, 3], indices, [3, 1], 4)
    assert lengths == (7, 1) and slots.tolist() == [28, 29, 30, 31, 8, 9, 10, 20] and slots.dtype == torch.int64
    for arguments, message in (
        (([0, 2, 2], indices, [3, 1], 4), "kv_indptr"),
        (([1, 2, 3], indices, [3, 1], 4), "kv_indptr"),
        (([0, 2, 5], indices, [3, 1], 4), "kv_indices holds 4"),
        (([0, 2, 3], indices.float(), [3, 1], 4), "kv_indices must be int32"),
        (([0, 2, 3], indices, [5, 1], 4), "kv_last_page_len"),
        (([0, 2, 3], indices, [3], 4), "kv_last_page_len"),
        (([0, 2, 3], indices, [3, 1], 0), "page_size"),
    ):
        with pytest.raises(ValueError, match=message):
            page_table_slots(*arguments)
