"""StreamingLLM (arXiv 2309.17453): the first positions and the most recent."""

from __future__ import annotations

import torch
from sgl_vase_kernels import ops, upload

from sgl_vase.policy import Policy, Round


class Streaming(Policy):
    """Attention sinks and the newest candidates, the same for every layer and head."""

    name = "streaming"
    needs_order = True

    def select(self, round: Round) -> torch.Tensor:
        pool, rows = round.pool, round.rows
        starts = upload(rows.candidate_indptr[:-1], pool.device)
        counts = upload(rows.candidates, pool.device)
        total = rows.candidate_indptr[-1]
        age = torch.arange(total, device=pool.device) - starts.repeat_interleave(counts, output_size=total)
        score = age.float().expand(pool.layers, pool.heads, -1).contiguous()
        return ops.select(pool, rows, score, sinks=True)
