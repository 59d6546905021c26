"""Heavy hitters after H2O (arXiv 2306.14048): attention accumulated over a token's life."""

from __future__ import annotations

import itertools

import torch
from sgl_vase_kernels import ops, upload

from sgl_vase.policy import Policy, Round


class H2O(Policy):
    """Sum of the attention received from every round's query window, mean over the head group; the top stay.

    Reads the totals of the candidates that survived an earlier round from ``Round.state`` and writes those of this
    round's survivors to the slots that order-keeping compaction moves them to.
    """

    name = "h2o"
    needs_queries = True
    needs_order = True
    needs_state = True

    def select(self, round: Round) -> torch.Tensor:
        pool, rows, queries, state = round.pool, round.rows, round.queries, round.state
        assert queries is not None and state is not None
        total = ops.window_attention_scores(pool, rows, queries, pooling="none")
        total *= _spread(queries.valid, rows.candidates, pool.device)
        # Entries of the row (``slots``) and of its candidates (``total``) that carry a total.
        old = _leading(rows.indptr, rows.carried, pool.device)
        total[:, :, _leading(rows.candidate_indptr, rows.carried, pool.device)] += state[:, :, rows.slots[old]]
        kept = ops.select(pool, rows, total)
        new = _leading(rows.indptr, rows.keep, pool.device)
        state[:, :, rows.slots[new]] = total.gather(
            2, kept + _spread(rows.candidate_indptr[:-1], rows.keep, pool.device)
        )
        return kept


def _leading(starts: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Indices of the first ``counts[r]`` entries of each row."""
    indices = itertools.chain.from_iterable(range(s, s + n) for s, n in zip(starts, counts, strict=False))
    return upload(list(indices), device)


def _spread(values: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``values[r]`` repeated ``counts[r]`` times."""
    return upload(values, device).repeat_interleave(upload(counts, device), output_size=sum(counts))
