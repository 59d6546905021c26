"""The operations of ``ops`` as Triton kernels; one launch covers all layers, KV heads and due requests."""

from sgl_vase_kernels.triton_ops.attention import window_attention_scores
from sgl_vase_kernels.triton_ops.compaction import compact
from sgl_vase_kernels.triton_ops.magnitude import key_norms, value_magnitude
from sgl_vase_kernels.triton_ops.projection import projected_norms
from sgl_vase_kernels.triton_ops.queries import store_queries
from sgl_vase_kernels.triton_ops.selection import select
from sgl_vase_kernels.triton_ops.similarity import cosine_redundancy, mean_direction_cosine

__all__ = [
    "compact",
    "cosine_redundancy",
    "key_norms",
    "mean_direction_cosine",
    "projected_norms",
    "select",
    "store_queries",
    "value_magnitude",
    "window_attention_scores",
]
