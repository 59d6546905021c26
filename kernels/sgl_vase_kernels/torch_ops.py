"""The operations of ``ops`` in plain torch: what runs without a GPU, and the reference of the kernels.

A row's numbers must not depend on the rest of the batch, so each row is computed by itself, all its
layers and heads together; only elementwise work runs over the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from sgl_vase_kernels import rng
from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows

_CHUNK_BYTES = 64 << 20
_INDEX_BITS = 29


def _flat(pool: KVPool, buffer: torch.Tensor) -> torch.Tensor:
    """``[slots * heads, dim]`` view of a layer's buffer; one-byte floats as raw bytes."""
    if not buffer.is_contiguous():
        raise ValueError(f"the torch implementation needs contiguous KV buffers, got strides {buffer.stride()}")
    return buffer.view(-1, buffer.shape[-1])


def _flat_index(pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    """Rows of ``_flat`` that hold ``slots``: int64 ``[heads, *slots.shape]``."""
    heads = torch.arange(pool.heads, device=slots.device).view(-1, *[1] * slots.dim())
    if pool.layout == "NHD":
        return slots * pool.heads + heads
    page = pool.page_size
    return (slots // page * pool.heads + heads) * page + slots % page


def _gather(pool: KVPool, buffers: tuple[torch.Tensor, ...], scale: torch.Tensor | None, index: torch.Tensor, layers: range) -> torch.Tensor:
    """float32 ``[layers, heads, n, dim]`` of one row's candidates."""
    taken = []
    for layer in layers:
        flat = _flat(pool, buffers[layer])
        raw = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
        taken.append(raw.index_select(0, index.reshape(-1)).view(flat.dtype))
    out = torch.stack(taken).float().view(len(layers), *index.shape, -1)
    return out if scale is None else out * scale[layers.start : layers.stop].view(-1, 1, 1, 1)


def _per_row(pool: KVPool, rows: Rows, width: int, score: Callable[[int, torch.Tensor, range], torch.Tensor]) -> torch.Tensor:
    """Concatenate ``score(row, index, layers) -> [layers, heads, n]`` over rows and chunks of layers.

    ``width``: floats a candidate and head that ``score`` holds at once; it bounds the chunks.
    """
    columns = []
    for r, n in enumerate(rows.candidates):
        start = rows.indptr[r]
        index = _flat_index(pool, rows.slots[start : start + n])
        step = max(1, _CHUNK_BYTES // max(1, 4 * pool.heads * n * width))
        chunks = [range(a, min(a + step, pool.layers)) for a in range(0, pool.layers, step)]
        columns.append(torch.cat([score(r, index, chunk) for chunk in chunks]))
    return torch.cat(columns, dim=2)


def value_magnitude(pool: KVPool, rows: Rows, kind: str) -> torch.Tensor:
    def score(_: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        v = _gather(pool, pool.v, pool.v_scale, index, layers)
        if kind == "range":
            return v.amax(-1) - v.amin(-1)
        if kind == "absmax":
            return v.abs().amax(-1)
        if kind == "l2":
            return torch.linalg.vector_norm(v, dim=-1)
        return v.var(-1, correction=0)

    return _per_row(pool, rows, pool.v[0].shape[3], score)


def window_attention_scores(
    pool: KVPool,
    rows: Rows,
    queries: QueryWindow,
    *,
    pool_width: int,
    pooling: str,
    group: str,
    last: int | None,
) -> torch.Tensor:
    heads, dim = pool.heads, pool.k[0].shape[3]
    groups = queries.ring.shape[3] // heads

    def score(r: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        columns = torch.tensor(queries.columns(r, last), device=pool.device)
        window = queries.ring[layers.start : layers.stop, queries.slot[r]].index_select(1, columns).float()
        q = window.view(len(layers), -1, heads, groups, dim).permute(0, 2, 3, 1, 4) * queries.scale
        k = _gather(pool, pool.k, pool.k_scale, index, layers)
        logits = torch.matmul(q.reshape(len(layers), heads, -1, dim), k.transpose(2, 3))
        attention = _window_mean(logits.softmax(-1), groups)
        if not torch.isfinite(attention).all():
            attention = _window_mean(_tame(logits).softmax(-1).nan_to_num(0.0), groups)
        return _group(_pool(attention, pool_width, pooling), group)

    return _per_row(pool, rows, max(dim, groups * queries.ring.shape[2]), score)


def _window_mean(attention: torch.Tensor, groups: int) -> torch.Tensor:
    layers, heads, _, n = attention.shape
    return attention.view(layers, heads, groups, -1, n).mean(3)


def _tame(logits: torch.Tensor) -> torch.Tensor:
    """NaN logits count as -inf, +inf as the largest float."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)


def _pool(attention: torch.Tensor, width: int, pooling: str) -> torch.Tensor:
    if pooling == "none" or width == 1:
        return attention
    pool1d = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    layers, heads, groups, n = attention.shape
    return pool1d(attention.reshape(-1, groups, n), width, stride=1, padding=width // 2).view(layers, heads, groups, n)


def _group(attention: torch.Tensor, group: str) -> torch.Tensor:
    return attention.mean(2) if group == "mean" else attention.amax(2)


def projected_norms(pool: KVPool, rows: Rows, rank: int, *, fixed_round: bool) -> torch.Tensor:
    def score(r: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        out = None
        for buffers, scale in ((pool.k, pool.k_scale), (pool.v, pool.v_scale)):
            x = _gather(pool, buffers, scale, index, layers)
            g = _projection(pool, rows, r, x.shape[-1], rank, layers, 0 if fixed_round else rows.round[r])
            norm = torch.matmul(x, g.unsqueeze(1)).square().sum(-1)
            out = norm if out is None else out * norm
        assert out is not None
        return out

    return _per_row(pool, rows, pool.k[0].shape[3] + rank, score)


def _projection(pool: KVPool, rows: Rows, r: int, dim: int, rank: int, layers: range, round: int) -> torch.Tensor:
    """``G``: float32 ``[layers, dim, rank]``."""
    device = pool.device
    index = torch.arange(dim * rank, device=device)
    layer = torch.arange(layers.start, layers.stop, device=device).view(-1, 1) + pool.layer_offset
    seed = rng.as_signed([rows.seed[r]], device)
    words = rng.philox(
        (index, layer << 16, torch.tensor(round, device=device), torch.tensor(rng.PROJECTION, device=device)),
        rng.split_key(seed),
    )
    return (rng.normal(words[0], words[1]) / rank**0.5).view(len(layers), dim, rank)


def _directions(pool: KVPool, index: torch.Tensor, layers: range) -> torch.Tensor:
    return F.normalize(_gather(pool, pool.k, pool.k_scale, index, layers), dim=-1)


def cosine_redundancy(pool: KVPool, rows: Rows, *, spare_newest: float | None) -> torch.Tensor:
    def score(r: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        k = _directions(pool, index, layers)
        cosine = torch.matmul(k, k.transpose(2, 3))
        cosine.diagonal(dim1=2, dim2=3).zero_()
        if spare_newest is not None:
            n = cosine.shape[-1]
            similar = cosine > spare_newest
            newest = (similar * torch.arange(1, n + 1, device=pool.device)).amax(-1, keepdim=True)
            ignored = torch.zeros_like(similar).scatter_(-1, (newest - 1).clamp(min=0), newest > 0)
            cosine = cosine.masked_fill(ignored, 0.0)
        return cosine.mean(-1)

    return _per_row(pool, rows, max(rows.candidates) + pool.k[0].shape[3], score)


def key_norms(pool: KVPool, rows: Rows) -> torch.Tensor:
    def score(_: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        return torch.linalg.vector_norm(_gather(pool, pool.k, pool.k_scale, index, layers), dim=-1)

    return _per_row(pool, rows, pool.k[0].shape[3], score)


def mean_direction_cosine(pool: KVPool, rows: Rows) -> torch.Tensor:
    def score(_: int, index: torch.Tensor, layers: range) -> torch.Tensor:
        k = _directions(pool, index, layers)
        return torch.matmul(k, F.normalize(k.mean(2, keepdim=True), dim=-1).transpose(2, 3)).squeeze(-1)

    return _per_row(pool, rows, pool.k[0].shape[3], score)


# ----------------------------------------------------------------------- select


def _rank(values: torch.Tensor) -> torch.Tensor:
    """Order-preserving int64 in ``[0, 2**32)``: NaN lowest, -0.0 equal to 0.0."""
    bits = (values + 0.0).view(torch.int32).long()
    return torch.where(bits >= 0, bits + 2**31, ~bits & 0x7FFFFFFF).masked_fill(values.isnan(), 0)


def _keyed(rank: torch.Tensor, level: torch.Tensor | int, index: torch.Tensor) -> torch.Tensor:
    """One int64 that sorts by level (0 to 3), then rank, then lower index."""
    return ((torch.as_tensor(level, device=rank.device) << 32 | rank) << _INDEX_BITS) + (2**_INDEX_BITS - 1 - index)


def _columns(rows: Rows) -> Iterator[tuple[int, slice]]:
    for r in range(len(rows)):
        yield r, slice(rows.candidate_indptr[r], rows.candidate_indptr[r + 1])


def select(
    pool: KVPool,
    rows: Rows,
    score: torch.Tensor,
    *,
    race: bool,
    sinks: bool,
    reserve_score: torch.Tensor | None,
    sinks_lead: bool,
) -> torch.Tensor:
    device = pool.device
    index = torch.cat([torch.arange(n, device=device) for n in rows.candidates])
    level = torch.ones_like(score, dtype=torch.int64)
    if race:
        draws = torch.log(_race_draws(pool, rows, index))
        positive = score > 0
        level = positive.long()
        score = torch.where(positive, torch.log(score), 0.0) - draws
    if sinks:
        for r, columns in _columns(rows):
            level[:, :, columns.start : columns.start + rows.sinks[r]] = 2
    if reserve_score is not None:
        forced = _keyed(_rank(reserve_score), 0, index)
        for r, columns in _columns(rows):
            part = forced[:, :, columns]
            if sinks_lead:
                part[:, :, : rows.sinks[r]] |= 1 << 61
            top = part.topk(rows.reserve[r], dim=-1, sorted=False).indices
            level[:, :, columns].scatter_(2, top, 2)
    key = _keyed(_rank(score), level, index)
    kept = [
        key[:, :, columns].topk(rows.keep[r], dim=-1, sorted=False).indices.sort(dim=-1).values
        for r, columns in _columns(rows)
    ]
    return torch.cat(kept, dim=2)


def _race_draws(pool: KVPool, rows: Rows, index: torch.Tensor) -> torch.Tensor:
    """Exp(1) draws: float32 ``[layers, heads, candidates]``."""
    device = pool.device
    counts = torch.tensor(rows.candidates, device=device)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(counts, output_size=rows.candidate_indptr[-1])

    layer = torch.arange(pool.layers, device=device).view(-1, 1, 1) + pool.layer_offset
    head = torch.arange(pool.heads, device=device).view(1, -1, 1) + pool.head_offset
    seeds = rng.split_key(spread(rng.as_signed(rows.seed, device)))
    words = rng.philox(
        (
            index + spread(torch.tensor(rows.first, device=device)),
            layer << 16 | head,
            spread(torch.tensor(rows.round, device=device)),
            torch.tensor(rng.RACE, device=device),
        ),
        seeds,
    )
    return rng.exponential(words[0])


# ---------------------------------------------------------------------- compact


def compact(pool: KVPool, rows: Rows, kept: torch.Tensor, *, keep_order: bool) -> None:
    sources, targets = zip(*(_moves(pool, rows, r, kept, keep_order) for r in range(len(rows))), strict=True)
    source, target = torch.cat(sources, dim=2), torch.cat(targets, dim=2)
    for buffers in (pool.k, pool.v):
        for layer, buffer in enumerate(buffers):
            flat = _flat(pool, buffer)
            raw = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
            raw.index_copy_(0, target[layer].reshape(-1), raw.index_select(0, source[layer].reshape(-1)))


def _moves(pool: KVPool, rows: Rows, r: int, kept: torch.Tensor, keep_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the flat buffers to read and write: int64 ``[layers, heads, moves]`` each, targets distinct."""
    k, n = rows.keep[r], rows.candidates[r]
    survivors = kept[:, :, rows.keep_indptr[r] : rows.keep_indptr[r + 1]]
    place = torch.arange(k, device=kept.device).expand_as(survivors)
    if not keep_order:
        survivors = _fill_holes(survivors, k)
    tail = torch.arange(rows.buffer, device=kept.device).expand(*kept.shape[:2], -1)
    flat = _flat_index(pool, rows.slots[rows.indptr[r] : rows.indptr[r + 1]]).expand(kept.shape[0], -1, -1)
    source = torch.cat([survivors, tail + n], dim=2)
    target = torch.cat([place, tail + k], dim=2)
    moving = (source != target).any(dim=1).any(dim=0)
    return flat.gather(2, source[:, :, moving]), flat.gather(2, target[:, :, moving])


def _fill_holes(survivors: torch.Tensor, k: int) -> torch.Tensor:
    """Which survivor goes to each of the ``k`` places if those before the cut stay where they are."""
    before = survivors < k
    there = torch.zeros_like(before).scatter_(2, survivors.clamp(max=max(k - 1, 0)), before)
    # The j-th hole takes the j-th survivor behind the cut; both are counted by running sums.
    hole = (~there).long().cumsum(2) - 1
    behind = before.sum(2, keepdim=True)
    place = torch.arange(k, device=survivors.device).expand_as(survivors)
    return torch.where(there, place, survivors.gather(2, (behind + hole).clamp(max=max(k - 1, 0))))
