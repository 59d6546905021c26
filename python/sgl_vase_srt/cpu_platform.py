"""A portable CPU platform for SGLang: torch-native attention, no AMX, no CPU build of ``sgl_kernel``.

SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``) needs a CPU build of ``sgl_kernel`` that PyPI does not have.
This platform needs PyTorch only: slow, but the same scheduler, KV pool and radix cache as on a GPU.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

NAME = "vase_cpu"
DEFAULT_POOL_TOKENS = 65536
TILE = 16
"""Rows of a matrix product under ``VASE_BATCH_INVARIANT=1``."""


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU device operations of SGLang under the identity of an out-of-tree platform, without any capability."""

    # Out of tree, not CPU: the CPU paths of SGLang's layers call ops of the CPU build of sgl_kernel.
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """The default of ``--device``: SGLang expects the string that ``DeviceMixin`` promises, not a device."""
        return self.device_type

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Bound the KV pool, which SGLang would let fill most of the host's memory, and let idle threads sleep.

        Runs before the worker processes are spawned, so they inherit the environment.
        """
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_POOL_TOKENS
        # OpenMP threads that spin at a barrier make a busy machine a hundred times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def init_backend(self) -> None:
        """``VASE_BATCH_INVARIANT=1``: what a request decodes does not depend on how many decode with it."""
        if os.environ.get("VASE_BATCH_INVARIANT") == "1":
            tile_products()


@cache
def tile_products() -> torch.library.Library:
    """Compute every matrix product ``TILE`` rows at a time, the last padded, as long as what is returned lives.

    The CPU libraries choose code by the number of rows, and each orders its sums otherwise: the last bit of a
    request's numbers would tell the size of its batch. Slower: two to three times in a prefill, five for a lone
    row, hardly for 16.
    """
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(a, (0, 0, 0, -len(a) % TILE))
        out = a.new_empty(len(padded), b.shape[1])
        for rows, sums in zip(padded.split(TILE), out.split(TILE), strict=True):
            torch.mm(rows, b, out=sums)
        return out[: len(a)]

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        return beta * bias + alpha * mm(a, b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a kernel is replaced
        library.impl("mm", mm, "CPU")
        library.impl("addmm", addmm, "CPU")
    return library


def activate() -> str | None:
    """Entry point of ``sglang.srt.platforms``: the platform's dotted name, or ``None`` to leave the field to others.

    With ``SGLANG_PLATFORM=vase_cpu`` it serves on any machine without an accelerator; unasked, only where SGLang
    would find no platform at all.
    """
    if torch.accelerator.is_available():
        return None
    asked = os.environ.get("SGLANG_PLATFORM") == NAME
    others = any(point.name != NAME for point in entry_points(group="sglang.srt.platforms"))
    if not asked and (others or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"):
        return None
    return f"{__name__}.{PortableCpuPlatform.__name__}"
