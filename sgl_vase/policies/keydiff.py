"""KeyDiff (arXiv 2504.15364): keep keys that point away from the others."""

from __future__ import annotations

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round


class KeyDiff(Policy):
    """Minus the cosine of a key with the mean of all normalised keys."""

    name = "keydiff"

    def select(self, round: Round) -> torch.Tensor:
        return ops.select(round.pool, round.rows, -ops.mean_direction_cosine(round.pool, round.rows))
