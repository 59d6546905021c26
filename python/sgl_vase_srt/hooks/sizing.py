"""The KV pool's size: what eviction keeps beside the pool is paid from ``--mem-fraction-static`` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_vase import policy_class
from sgl_vase_srt.engine import current


def cell_size(size: int, configurator: Any, kvc: Any, num_layers: int) -> int:
    """Count what a policy keeps beside each pool token; ``pool_sizes`` adds what it keeps a request. All in bytes."""
    from sglang.srt.runtime_context import get_parallel

    config, model = current.settings(), kvc.model_config
    ranks = get_parallel().attn_tp_size
    policy = policy_class(config.policy)(config.options)
    configurator.eviction_bytes_per_request = policy.state_bytes(
        layers=num_layers,
        q_heads=model.num_attention_heads // ranks,
        dim=model.head_dim,
        window=config.buffer,
        itemsize=model.dtype.itemsize,
    )
    return size + (4 * num_layers * model.get_num_kv_heads(ranks) if policy.needs_state else 0)


def pool_sizes(original: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """Size the pool that fits beside its policy's side state.

    A request takes side state only while it holds ``M`` tokens or more: either each pool token pays its share of
    that, or, if fewer may run, ``--max-running-requests`` of them are paid in advance; whichever leaves more. The
    ring has a scratch slot besides, and rounds up.
    """
    from sglang.srt.runtime_context import get_schedule

    size, each = configurator._cell_size, configurator.eviction_bytes_per_request
    plans = [(size + -(-each // current.settings().private_floor), available_bytes - 2 * each)]
    if most := get_schedule().max_running_requests:
        plans.append((size, available_bytes - (most + 1) * each))
    configurator._cell_size, budget = max(plans, key=lambda plan: plan[1] / plan[0])
    return original(configurator, budget, page_size)
