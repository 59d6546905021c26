"""The value ranges of VaSE (arXiv 2606.03928) alone: kept largest first, or evicted largest first."""

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


@dataclass(frozen=True)
class EvictOptions(Options):
    """``sinks``: the first positions always stay."""

    sinks: bool = False


class ValueRange(Policy):
    """``max_j v_ij - min_j v_ij``; the top stay."""

    name = "value-range"
    Options: ClassVar[type] = Options
    sign: ClassVar[int] = 1

    def select(self, round: Round) -> torch.Tensor:
        score = self.sign * ops.value_magnitude(round.pool, round.rows, "range")
        return ops.select(round.pool, round.rows, score, sinks=self.options.sinks)


class EvictLargeRange(ValueRange):
    """The paper's ablation: the largest ranges go."""

    name = "evict-large-range"
    Options: ClassVar[type] = EvictOptions
    sign = -1
