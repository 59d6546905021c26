"""Triton kernels against the torch implementation, which the NumPy oracle checks: ragged rows, all layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sgl_vase_kernels import KVPool, QueryWindow, Rows, torch_ops, triton_ops

LAYERS, HEADS, GROUPS, BUFFER, RING = 2, 2, 2, 8, 16
POISON = 1e4


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        yield


def make_pool(dtype: torch.dtype, layout: str, page: int, dim: int) -> KVPool:
    pages = 640 // page
    shape = (pages, page, HEADS, dim) if layout == "NHD" else (pages, HEADS, page, dim)
    scale = torch.tensor([0.5, 2.0]) if dtype.itemsize == 1 else None

    def buffers() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape).to(dtype) for _ in range(LAYERS))

    return KVPool(buffers(), buffers(), layout, k_scale=scale, v_scale=scale, layer_offset=3, head_offset=5)  # type: ignore[arg-type]


def make_rows(pool: KVPool) -> Rows:
    """Four ragged rows; the last keeps all its candidates."""
    lengths = (200, 33, 9 + BUFFER, 12 + BUFFER)
    slots = torch.randperm(pool.slots)[: sum(lengths)]
    return Rows(
        slots=slots,
        lengths=lengths,
        buffer=BUFFER,
        first=(0, 3, 700, 0),
        keep=(90, 16, 5, 12),
        reserve=(20, 4, 0, 12),
        sinks=(4, 1, 0, 4),
        seed=(77, 2**64 - 5, 1, 2**63),
        round=(0, 2, 5, 1),
        carried=(0, 16, 5, 12),
    )


def make_queries(dtype: torch.dtype, dim: int) -> QueryWindow:
    ring = torch.randn(LAYERS, 6, RING, HEADS * GROUPS, dim).to(dtype)
    return QueryWindow(ring, slot=(1, 4, 2, 5), end=(300, 55, 17, 900), valid=(RING, 5, 1, RING), scale=dim**-0.5)


CASES = [
    (torch.float32, "NHD", 1, 64),
    (torch.float32, "HND", 16, 80),
    (torch.float16, "NHD", 16, 128),
    (torch.bfloat16, "HND", 1, 96),
    (torch.float8_e4m3fn, "NHD", 1, 64),
    (torch.float8_e5m2, "HND", 16, 64),
]
IDS = [f"{dtype}-{layout}-page{page}-dim{dim}" for dtype, layout, page, dim in CASES]


@pytest.mark.parametrize(("dtype", "layout", "page", "dim"), CASES, ids=IDS)
def test_scores(dtype: torch.dtype, layout: str, page: int, dim: int) -> None:
    pool = make_pool(dtype, layout, page, dim)
    rows = make_rows(pool)
    queries = make_queries(dtype if dtype.itemsize > 1 else torch.bfloat16, dim)

    def check(name: str, *args: object, **kwargs: object) -> None:
        expected = getattr(torch_ops, name)(pool, rows, *args, **kwargs)
        found = getattr(triton_ops, name)(pool, rows, *args, **kwargs)
        torch.testing.assert_close(
            found, expected, rtol=2e-4, atol=2e-6, msg=lambda text: f"{name} {args} {kwargs}: {text}"
        )

    for kind in ("range", "absmax", "l2", "variance"):
        check("value_magnitude", kind)
    check("projected_norms", 20, fixed_round=False)
    check("projected_norms", 20, fixed_round=True)
    check("window_attention_scores", queries, pool_width=5, pooling="avg", group="mean", last=None)
    check("window_attention_scores", queries, pool_width=7, pooling="max", group="max", last=8)
    check("window_attention_scores", queries, pool_width=1, pooling="none", group="mean", last=None)
    check("key_norms")
    check("mean_direction_cosine")
    check("cosine_redundancy", spare_newest=None)
    if dtype == torch.float32:  # a rounded cosine may fall on the other side of the threshold
        check("cosine_redundancy", spare_newest=0.1)


def test_non_finite_values() -> None:
    pool = make_pool(torch.float32, "NHD", 1, 64)
    rows = make_rows(pool)
    queries = make_queries(torch.float32, 64)
    for layer in range(LAYERS):
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            pool.k[layer][rows.slots[5 + i], 0, 0, 3] = value
            pool.v[layer][rows.slots[9 + i], 0, 1, 2] = value
    for name, args, kwargs in (
        ("value_magnitude", ("range",), {}),
        ("window_attention_scores", (queries,), {"pool_width": 5, "pooling": "avg", "group": "mean", "last": None}),
        ("mean_direction_cosine", (), {}),
        ("cosine_redundancy", (), {"spare_newest": None}),
    ):
        expected = getattr(torch_ops, name)(pool, rows, *args, **kwargs)
        found = getattr(triton_ops, name)(pool, rows, *args, **kwargs)
        torch.testing.assert_close(
            found, expected, rtol=2e-4, atol=2e-6, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("race", [False, True], ids=["top", "race"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("reserve", [None, True, False], ids=["", "sinks-lead", "plain-reserve"])
def test_select(race: bool, sinks: bool, reserve: bool | None) -> None:
    pool = make_pool(torch.float32, "NHD", 1, 64)
    rows = make_rows(pool)
    shape = (LAYERS, HEADS, rows.candidate_indptr[-1])
    for score in (torch.rand(shape), torch.ones(shape), torch.randint(0, 3, shape).float(), broken(torch.rand(shape))):
        kwargs = {
            "race": race,
            "sinks": sinks,
            "reserve_score": None if reserve is None else torch.randint(0, 6, shape).float(),
            "sinks_lead": bool(reserve),
        }
        expected = torch_ops.select(pool, rows, score, **kwargs)
        assert torch.equal(triton_ops.select(pool, rows, score, **kwargs), expected)


def broken(score: torch.Tensor) -> torch.Tensor:
    score[..., ::7] = float("nan")
    score[..., 3::11] = float("inf")
    score[..., 1::2] = 0.0
    return score


@pytest.mark.parametrize("keep_order", [True, False], ids=["ordered", "order-free"])
@pytest.mark.parametrize(("dtype", "layout", "page", "dim"), CASES, ids=IDS)
def test_compact(dtype: torch.dtype, layout: str, page: int, dim: int, keep_order: bool) -> None:
    """The kept part of every row is what torch leaves there, and no slot outside the rows is touched."""
    pools = []
    for _ in range(2):
        torch.manual_seed(5)
        pools.append(make_pool(dtype, layout, page, dim))
    rows = make_rows(pools[0])
    score = torch.rand(LAYERS, HEADS, rows.candidate_indptr[-1])
    kept = torch_ops.select(pools[0], rows, score, race=True, sinks=False, reserve_score=None, sinks_lead=False)
    untouched = torch.ones(pools[0].slots, dtype=torch.bool)
    settled = []
    for r in range(len(rows)):
        row = rows.slots[rows.indptr[r] : rows.indptr[r + 1]]
        untouched[row] = False
        settled.append(row[: rows.keep[r] + rows.buffer])
    before = [flat(buffer, layout).clone() for buffer in (*pools[1].k, *pools[1].v)]
    torch_ops.compact(pools[0], rows, kept, keep_order=keep_order)
    triton_ops.compact(pools[1], rows, kept, keep_order=keep_order)
    for expected, found, old in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), before, strict=True):
        after = flat(found, layout)
        assert torch.equal(after[torch.cat(settled)], flat(expected, layout)[torch.cat(settled)])
        assert torch.equal(after[untouched], old[untouched])


def flat(buffer: torch.Tensor, layout: str) -> torch.Tensor:
    """``[slots, heads, bytes]`` of a layer's buffer."""
    buffer = buffer.view(torch.uint8)
    return (buffer if layout == "NHD" else buffer.transpose(1, 2)).reshape(-1, HEADS, buffer.shape[-1])
