"""A uniform draw: the control every other policy has to beat (arXiv 2609.03430 finds it strong)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round, switch


@dataclass(frozen=True)
class Options:
    """``sinks``: the first positions always stay."""

    sinks: bool = True

    def __post_init__(self) -> None:
        switch("sinks", self.sinks)


class Random(Policy):
    """Uniform without replacement, drawn anew for each layer, KV head and round."""

    name = "random"
    Options: ClassVar[type] = Options

    def select(self, round: Round) -> torch.Tensor:
        pool, rows = round.pool, round.rows
        score = torch.ones(pool.layers, pool.heads, rows.candidate_indptr[-1], device=pool.device)
        return ops.select(pool, rows, score, race=True, sinks=self.options.sinks)
