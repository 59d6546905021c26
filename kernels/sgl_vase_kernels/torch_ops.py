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

_CHUNK_BYTES = 4 << 20
"""Temporaries of one step: what a core's cache holds is several times faster than fresh pages."""
_INDEX_BITS = 29
_TOP = 2**32 - 1
"""Above the rank of every float."""


def _raw(buffer: torch.Tensor) -> torch.Tensor:
    """Contiguous buffer, one-byte floats as bytes (they have no indexing kernels)."""
    if not buffer.is_contiguous():
        raise ValueError(f"pool: the torch implementation needs contiguous buffers, got strides {buffer.stride()}")
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def _flat_index(pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    """Where ``slots`` lie in a buffer viewed as ``[-1, dim]``: int64 ``[heads, slots]``."""
    heads = torch.arange(pool.heads, device=slots.device).view(-1, 1)
    if pool.layout == "NHD":
        return slots * pool.heads + heads
    page = pool.page_size
    return (slots // page * pool.heads + heads) * page + slots % page


def _gather(
    pool: KVPool, buffers: tuple[torch.Tensor, ...], scale: torch.Tensor | None, slots: torch.Tensor, layers: range
) -> torch.Tensor:
    """float32 ``[layers, heads, n, dim]`` of ``n`` slots."""
    heads, dim, n = pool.heads, buffers[0].shape[-1], slots.shape[0]
    out = torch.empty(len(layers), heads, n, dim, device=slots.device)
    index = slots if pool.layout == "NHD" else _flat_index(pool, slots).view(-1)
    for i, layer in enumerate(layers):
        raw = _raw(buffers[layer])
        if pool.layout == "NHD":
            taken = raw.view(-1, heads * dim).index_select(0, index).view(n, heads, dim).transpose(0, 1)
        else:
            taken = raw.view(-1, dim).index_select(0, index).view(heads, n, dim)
        out[i] = taken.view(buffers[layer].dtype)
    if scale is not None:
        out *= scale[layers.start : layers.stop].view(-1, 1, 1, 1)
    return out


def _per_row(
    pool: KVPool, rows: Rows, width: Callable[[int], int], score: Callable[[int, torch.Tensor, range], torch.Tensor]
) -> torch.Tensor:
    """Concatenate ``score(row, slots, layers) -> [layers, heads, n]`` over rows and chunks of layers.

    ``width(n)``: floats a candidate and head that ``score`` holds at once; it bounds the chunks.
    """
    out = torch.empty(pool.layers, pool.heads, rows.candidate_indptr[-1], device=pool.device)
    for r, n in enumerate(rows.candidates):
        slots = rows.slots[rows.indptr[r] : rows.indptr[r] + n]
        step = max(1, _CHUNK_BYTES // max(1, 4 * pool.heads * n * width(n)))
        for start in range(0, pool.layers, step):
            layers = range(start, min(start + step, pool.layers))
            out[start : layers.stop, :, rows.candidate_indptr[r] : rows.candidate_indptr[r + 1]] = score(
                r, slots, layers
            )
    return out


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b^T`` of 4-D ``[..., m, d]`` and ``[..., n, d]``; the bits of a product depend on its factors alone.

    MKL runs one thread a product if there are enough products, and splits a lone one, which changes its sums: hence
    the padding. Both factors are rows of ``d`` as its kernels for transposed ones do not depend on alignment.
    """
    x, y, m, n = *a.shape[:3], b.shape[2]
    a, b = a.reshape(x * y, m, -1), b.reshape(x * y, n, -1)
    missing = max(2, torch.get_num_threads()) - x * y
    if missing > 0:
        a, b = (torch.cat([t, t[:1].expand(missing, -1, -1)]) for t in (a, b))
    return torch.bmm(a, b.transpose(1, 2))[: x * y].view(x, y, m, n)


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along ``dim`` by halving, in an order that depends on its length only. Overwrites ``x``."""
    while (n := x.shape[dim]) > 1:
        half = n // 2
        x.narrow(dim, 0, half).add_(x.narrow(dim, n - half, half))
        x = x.narrow(dim, 0, n - half)
    return x.sum(dim)


def value_magnitude(pool: KVPool, rows: Rows, kind: str) -> torch.Tensor:
    def score(_: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        v = _gather(pool, pool.v, pool.v_scale, slots, layers)
        if kind == "range":
            return v.amax(-1) - v.amin(-1)
        if kind == "absmax":
            return v.abs().amax(-1)
        if kind == "l2":
            return torch.linalg.vector_norm(v, dim=-1)
        return v.var(-1, correction=0)

    return _per_row(pool, rows, lambda n: pool.v[0].shape[3], score)


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

    def score(r: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        columns = torch.tensor(queries.columns(r, last), dtype=torch.int64, device=pool.device)
        if not len(columns):
            return torch.zeros(len(layers), heads, len(slots), device=pool.device)
        window = queries.ring[layers.start : layers.stop, queries.slot[r]].index_select(1, columns).float()
        q = window.view(len(layers), -1, heads, groups, dim).permute(0, 2, 3, 1, 4) * queries.scale
        q = q.reshape(len(layers), heads, -1, dim)
        k = _gather(pool, pool.k, pool.k_scale, slots, layers)

        def attention(tame: bool) -> torch.Tensor:
            logits = _dot(q, k)
            if tame:
                logits.nan_to_num_(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
            weights = torch.softmax(logits, -1, out=logits)
            if tame:
                weights.nan_to_num_(0.0)
            return _sum(weights.view(len(layers), heads, groups, len(columns), -1), 3) / len(columns)

        out = attention(False)
        if not torch.isfinite(out).all():
            out = attention(True)
        out = _pool(out, pool_width, pooling)
        return _sum(out, 2) / groups if group == "mean" else out.amax(2)

    return _per_row(pool, rows, lambda n: max(dim, groups * queries.ring.shape[2]), score)


def store_queries(ring: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, q: torch.Tensor) -> None:
    ring[slots, positions % ring.shape[1]] = q.to(ring.dtype)


def _pool(attention: torch.Tensor, width: int, pooling: str) -> torch.Tensor:
    if pooling == "none" or width == 1:
        return attention
    pool1d = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    layers, heads, groups, n = attention.shape
    return pool1d(attention.view(-1, groups, n), width, stride=1, padding=width // 2).view(layers, heads, groups, n)


def projected_norms(pool: KVPool, rows: Rows, rank: int, *, fixed_round: bool) -> torch.Tensor:
    widest = max(pool.k[0].shape[3], pool.v[0].shape[3])

    def score(r: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        g = _projection(pool, (widest, rank), layers, rows.seed[r], 0 if fixed_round else rows.round[r])

        def norms(buffers: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> torch.Tensor:
            x = _gather(pool, buffers, scale, slots, layers)
            columns = g[:, :, : x.shape[-1]].unsqueeze(1).expand(-1, pool.heads, -1, -1)
            return _sum(_dot(columns, x).square_(), 2)

        return norms(pool.k, pool.k_scale) * norms(pool.v, pool.v_scale)

    return _per_row(pool, rows, lambda n: widest + rank, score)


def _projection(pool: KVPool, shape: tuple[int, int], layers: range, seed: int, round: int) -> torch.Tensor:
    """``G^T``: float32 ``[layers, rank, dim]``."""
    dim, rank = shape
    device = pool.device
    index = torch.arange(dim * rank, device=device)
    layer = torch.arange(layers.start, layers.stop, device=device).view(-1, 1) + pool.layer_offset
    words = rng.philox(
        (index, layer << 16, torch.tensor(round, device=device), torch.tensor(rng.PROJECTION, device=device)),
        rng.split_key(rng.as_signed([seed], device)),
    )
    g = rng.normal(words[0], words[1]) / rank**0.5
    return g.view(len(layers), dim, rank).transpose(1, 2).contiguous()


def _directions(pool: KVPool, slots: torch.Tensor, layers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised keys ``[layers, heads, n, dim]``, zero if not finite, and bool ``[layers, heads, n]``: which are."""
    k = _gather(pool, pool.k, pool.k_scale, slots, layers)
    finite = torch.isfinite(k).all(-1)
    return F.normalize(k.masked_fill_(~finite.unsqueeze(-1), 0.0), dim=-1), finite


def cosine_redundancy(pool: KVPool, rows: Rows, *, spare_newest: float | None) -> torch.Tensor:
    def width(n: int) -> int:
        # A function of n alone: blocks must not depend on the batch or on how heads are split.
        return min(n, max(64, _CHUNK_BYTES // 4 // max(1, n)))

    def score(_: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        k, finite = _directions(pool, slots, layers)
        n = len(slots)
        mean = torch.empty_like(k[..., 0])
        blocks = [slice(start, min(start + width(n), n)) for start in range(0, n, width(n))]

        def cosines(mine: slice) -> torch.Tensor:
            """With all other keys, ``[layers, heads, n, width]``."""
            cosine = _dot(k, k[:, :, mine])
            cosine[:, :, mine].diagonal(dim1=2, dim2=3).zero_()
            return cosine

        newest = None
        if spare_newest is not None:
            place = torch.arange(1, n + 1, dtype=torch.int32, device=pool.device)
            newest = torch.cat([((cosines(b) > spare_newest) * place.view(-1, 1)).amax(2) for b in blocks], -1)
        for mine in blocks:
            cosine = cosines(mine)
            if newest is not None:
                cosine.masked_fill_(newest.unsqueeze(-1) == place[mine], 0.0)
            mean[:, :, mine] = _sum(cosine, 2) / n
        return mean.masked_fill_(~finite, -torch.inf).softmax(-1).masked_fill_(~finite, torch.nan)

    return _per_row(pool, rows, lambda n: width(n) + pool.k[0].shape[3], score)


def key_norms(pool: KVPool, rows: Rows) -> torch.Tensor:
    def score(_: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        return torch.linalg.vector_norm(_gather(pool, pool.k, pool.k_scale, slots, layers), dim=-1)

    return _per_row(pool, rows, lambda n: pool.k[0].shape[3], score)


def mean_direction_cosine(pool: KVPool, rows: Rows) -> torch.Tensor:
    def score(_: int, slots: torch.Tensor, layers: range) -> torch.Tensor:
        k, finite = _directions(pool, slots, layers)
        mean = F.normalize(_sum(k.clone(), 2).unsqueeze(2), dim=-1)
        return _dot(mean, k).squeeze(2).masked_fill_(~finite, torch.nan)

    return _per_row(pool, rows, lambda n: 2 * pool.k[0].shape[3], score)


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
    rank = _rank(score)
    if sinks:
        for r, columns in _columns(rows):
            first = slice(columns.start, columns.start + rows.sinks[r])
            level[:, :, first], rank[:, :, first] = 2, _TOP
    if reserve_score is not None:
        forced = _rank(reserve_score)
        if sinks_lead:
            for r, columns in _columns(rows):
                forced[:, :, columns.start : columns.start + rows.sinks[r]] = _TOP
        forced = _keyed(forced, 0, index)
        for r, columns in _columns(rows):
            top = forced[:, :, columns].topk(rows.reserve[r], dim=-1, sorted=False).indices
            level[:, :, columns].scatter_(2, top, 2)
    key = _keyed(rank, level, index)
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
    source, target = torch.cat(sources, dim=1), torch.cat(targets, dim=1)
    moving = source != target
    for layer in range(pool.layers):
        read, write = source[layer, moving[layer]], target[layer, moving[layer]]
        for buffer in (pool.k[layer], pool.v[layer]):
            raw = _raw(buffer).view(-1, buffer.shape[-1])
            raw.index_copy_(0, write, raw.index_select(0, read))


def _moves(pool: KVPool, rows: Rows, r: int, kept: torch.Tensor, keep_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row's new entries are and were, as rows of the buffer: int64 ``[layers, heads * entries]`` each."""
    k, n = rows.keep[r], rows.candidates[r]
    survivors = kept[:, :, rows.keep_indptr[r] : rows.keep_indptr[r + 1]]
    if not keep_order:
        survivors = _fill_holes(survivors, k)
    tail = torch.arange(n, rows.lengths[r], device=kept.device).expand(*kept.shape[:2], -1)
    flat = _flat_index(pool, rows.slots[rows.indptr[r] : rows.indptr[r + 1]]).expand(kept.shape[0], -1, -1)
    source = flat.gather(2, torch.cat([survivors, tail], dim=2))
    return source.flatten(1), flat[:, :, : k + rows.buffer].flatten(1)


def _fill_holes(survivors: torch.Tensor, k: int) -> torch.Tensor:
    """Which survivor goes to each of the ``k`` places if those before the cut stay where they are."""
    there = torch.zeros(*survivors.shape[:2], k + 1, dtype=torch.bool, device=survivors.device)
    there = there.scatter_(2, survivors.clamp(max=k), True)[:, :, :k]
    # The j-th hole takes the j-th survivor behind the cut; both are counted by running sums.
    hole = (~there).long().cumsum(2) - 1
    behind = there.sum(2, keepdim=True)
    place = torch.arange(k, device=survivors.device).expand_as(survivors)
    return torch.where(there, place, survivors.gather(2, (behind + hole).clamp(max=k - 1)))
