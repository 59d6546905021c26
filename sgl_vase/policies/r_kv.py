"""R-KV (arXiv 2505.24133): attention importance minus the redundancy of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round, choice, switch

SIMILAR = 0.5
"""Cosine above which two keys are copies, of which ``spare_newest`` spares the newest."""


@dataclass(frozen=True)
class Options:
    """``lam``: weight of importance in [0, 1], of redundancy ``1 - lam``. ``variant``: how importance is taken,
    as the VaSE paper's baseline (the whole window, average pooling 5, group mean) or as R-KV's own code (newest 8
    queries, max pooling 7, group maximum; that code takes the maximum before the softmax). ``spare_newest``: a key is
    not redundant with those whose newest copy it is."""

    lam: float = 0.5
    variant: Literal["vase", "r-kv"] = "vase"
    spare_newest: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lam, bool) or not isinstance(self.lam, int | float) or not 0 <= self.lam <= 1:
            raise ValueError(f"option lam must be a number in [0, 1], got {self.lam!r}")
        choice("variant", self.variant, ("vase", "r-kv"))
        switch("spare_newest", self.spare_newest)


class RKV(Policy):
    """``lam I - (1 - lam) Red``: ``I`` window attention, ``Red`` softmax of a key's mean cosine with the others."""

    name = "r-kv"
    needs_queries = True
    needs_order = True
    Options: ClassVar[type] = Options

    def select(self, round: Round) -> torch.Tensor:
        pool, rows, options = round.pool, round.rows, self.options
        assert round.queries is not None
        if options.variant == "vase":
            importance = ops.window_attention_scores(pool, rows, round.queries)
        else:
            importance = ops.window_attention_scores(
                pool, rows, round.queries, pool_width=7, pooling="max", group="max", last=8
            )
        redundancy = ops.cosine_redundancy(pool, rows, spare_newest=SIMILAR if options.spare_newest else None)
        return ops.select(pool, rows, options.lam * importance - (1 - options.lam) * redundancy)
