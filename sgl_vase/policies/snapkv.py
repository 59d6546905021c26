"""SnapKV (arXiv 2404.14469): keep what the newest queries look at."""

from __future__ import annotations

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round


class SnapKV(Policy):
    """Attention of the query window, averaged along time (width 5) and over the head group; the top stay."""

    name = "snapkv"
    needs_queries = True
    needs_order = True

    def select(self, round: Round) -> torch.Tensor:
        assert round.queries is not None
        return ops.select(round.pool, round.rows, ops.window_attention_scores(round.pool, round.rows, round.queries))
