"""Eviction policies for KV caches: what stays. Imports torch and the kernels, no serving engine."""

from sgl_vase.config import EvictionConfig, RowPlan
from sgl_vase.policy import Policy, Round
from sgl_vase.registry import policy_class, policy_names

__all__ = ["EvictionConfig", "Policy", "Round", "RowPlan", "policy_class", "policy_names"]
