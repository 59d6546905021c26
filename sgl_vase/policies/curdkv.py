"""CurDKV (arXiv 2509.15038): leverage scores by a random projection that is drawn once a request."""

from __future__ import annotations

from sgl_vase.policies.vase_dkv import VaseDKV


class CurDKV(VaseDKV):
    """VaSE-DKV's score with ``G`` of each request and layer, the same in every round."""

    name = "curdkv"
    fixed_round = True
