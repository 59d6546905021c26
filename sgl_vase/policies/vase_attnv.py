"""VaSE-AttnV (arXiv 2606.03928): reserve large value ranges, draw the rest by window attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round, choice, odd, switch


@dataclass(frozen=True)
class Options:
    """``sampling``: draw (True) or take the top scores. ``magnitude``: of a value vector, what the reserve
    ranks by. ``sinks``: the first positions lead the reserve. ``pool_width``: of the scores, odd, 1 = off."""

    sampling: bool = True
    magnitude: ops.Magnitude = "range"
    sinks: bool = True
    pool_width: int = 5

    def __post_init__(self) -> None:
        switch("sampling", self.sampling)
        choice("magnitude", self.magnitude, ops.MAGNITUDES)
        switch("sinks", self.sinks)
        odd("pool_width", self.pool_width)


class VaseAttnV(Policy):
    """The ``N_v`` largest value ranges stay; the rest is drawn without replacement with window attention as weights."""

    name = "vase-attnv"
    aliases = ("vase",)
    needs_queries = True
    needs_order = True
    Options: ClassVar[type] = Options

    def select(self, round: Round) -> torch.Tensor:
        pool, rows = round.pool, round.rows
        assert round.queries is not None
        score = ops.window_attention_scores(pool, rows, round.queries, pool_width=self.options.pool_width)
        return ops.select(
            pool,
            rows,
            score,
            race=self.options.sampling,
            reserve_score=ops.value_magnitude(pool, rows, self.options.magnitude),
            sinks_lead=self.options.sinks,
        )
