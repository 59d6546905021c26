"""VaSE-DKV (arXiv 2606.03928): keep the largest randomly projected key and value norms; no queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round, positive


@dataclass(frozen=True)
class Options:
    """``rank``: columns of the random projection."""

    rank: int = 20

    def __post_init__(self) -> None:
        positive("rank", self.rank)


class VaseDKV(Policy):
    """``||G^T k||^2 ||G^T v||^2``, ``G ~ N(0, 1/rank)`` of each request, layer and round; the first positions stay."""

    name = "vase-dkv"
    Options: ClassVar[type] = Options
    fixed_round: ClassVar[bool] = False
    """Draw the projection once a request instead of once a round."""

    def select(self, round: Round) -> torch.Tensor:
        score = ops.projected_norms(round.pool, round.rows, self.options.rank, fixed_round=self.fixed_round)
        return ops.select(round.pool, round.rows, score, sinks=True)
