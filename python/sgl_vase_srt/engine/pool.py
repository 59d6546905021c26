"""SGLang's KV pool, as the kernels see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vase_kernels import KVPool

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def kv_pool(runner: ModelRunner) -> KVPool:
    """A view of the runner's token pool, without a copy. Raises ``ValueError`` for a layout that the kernels lack."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.store_dtype != pool.dtype:
        raise ValueError(
            "--eviction needs the plain NHD token pool of multi-head attention in fp32, bf16 or fp16, this model has "
            f"{type(pool).__name__}, {getattr(pool, 'kv_cache_layout', '?')}, {pool.dtype}"
        )
    return KVPool.from_slots(
        pool.k_buffer, pool.v_buffer, layer_offset=pool.start_layer, head_offset=_head_offset(runner, pool.head_num)
    )


def _head_offset(runner: ModelRunner, heads: int) -> int:
    """Global index of this rank's first KV head (heads may be replicated over ranks)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    total = runner.model_config.get_total_num_kv_heads()
    return parallel.attn_tp_rank * total // parallel.attn_tp_size if heads * parallel.attn_tp_size >= total else 0
