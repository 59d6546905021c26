"""The runtime of a scheduler process, from its model worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sgl_vase_kernels import ops

from sgl_vase import EvictionConfig, policy_class
from sgl_vase_srt.engine.counters import Counters
from sgl_vase_srt.engine.layers import attention_layers
from sgl_vase_srt.engine.pool import kv_pool
from sgl_vase_srt.engine.ring import QueryRing
from sgl_vase_srt.engine.rounds import Rounds
from sgl_vase_srt.engine.runtime import Runtime
from sgl_vase_srt.engine.trace import Trace

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def build(runner: ModelRunner, config: EvictionConfig, counters: Counters | None) -> Runtime:
    """Side buffers and kernels for the pools of ``runner``. Raises ``ValueError`` for a model or a pool that cannot
    evict by ``config``."""
    from sglang.srt.runtime_context import get_parallel

    pool = kv_pool(runner)
    layers = attention_layers(runner)
    kv = runner.token_to_kv_pool
    if config.footprint() > kv.size:
        raise ValueError(
            f"--eviction-budget {config.budget} and --eviction-buffer {config.buffer} never evict in a KV pool of "
            f"{kv.size} tokens: lower --eviction-budget, or raise --mem-fraction-static or --max-total-tokens"
        )
    policy = policy_class(config.policy)(config.options)
    req_to_token = runner.req_to_token_pool.req_to_token
    ring = None
    if policy.needs_queries:
        ring = QueryRing(
            layers=len(layers),
            slots=min(runner.max_running_requests, kv.size // config.private_floor + 1),
            window=config.buffer,
            q_heads=layers[0].tp_q_head_num,
            dim=layers[0].head_dim,
            dtype=runner.dtype,
            device=pool.device,
            rows=req_to_token.shape[0],
            first_layer=kv.start_layer,
        )
    state = torch.zeros(pool.layers, pool.heads, pool.slots, device=pool.device) if policy.needs_state else None
    trace = Trace.from_environment(get_parallel().tp_rank)
    rounds = Rounds(policy, pool, config.buffer, layers[0].scaling, ring, state, trace)
    if ops.backend(pool.device) == "triton":
        rounds.warm_up(config, kv.page_size, kv.size)
    logger.info(
        "KV eviction is on: %s, %s kernels. The pool's %d tokens hold %d requests of at most %d tokens each; "
        "query ring: %d slots, %.1f MiB",
        config.resolved(),
        ops.backend(pool.device),
        kv.size,
        kv.size // (-(-config.footprint() // kv.page_size) * kv.page_size),
        config.footprint(),
        ring.slots if ring is not None else 0,
        ring.data.nbytes / 2**20 if ring is not None else 0.0,
    )
    return Runtime(config, rounds, req_to_token, kv.page_size, kv.size, counters)
