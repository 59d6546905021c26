"""Key norms (arXiv 2406.11430): small keys draw much attention."""

from __future__ import annotations

import torch
from sgl_vase_kernels import ops

from sgl_vase.policy import Policy, Round


class KNorm(Policy):
    """Minus the L2 norm of the key."""

    name = "knorm"

    def select(self, round: Round) -> torch.Tensor:
        return ops.select(round.pool, round.rows, -ops.key_norms(round.pool, round.rows))
