"""The operations of ``ops`` as Triton kernels; one launch covers all layers, KV heads and due requests."""

from sgl_vase_kernels.triton_ops.compaction import compact
from sgl_vase_kernels.triton_ops.magnitude import key_norms, value_magnitude
from sgl_vase_kernels.triton_ops.projection import projected_norms
from sgl_vase_kernels.triton_ops.selection import select

__all__ = ["compact", "key_norms", "projected_norms", "select", "value_magnitude"]
