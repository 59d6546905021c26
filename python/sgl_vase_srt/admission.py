"""What a request may still take from the pool: its bounded footprint, not its whole future.

An evicting row never has more than ``T_eff + B`` slots (page rounding on top). SGLang budgets by
``max_new_tokens`` in three places; each is given the smaller of the two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_vase import EvictionConfig, policy_class
from sgl_vase_srt import scheduler

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder


def headroom(req: Req, tree_cache: Any) -> float:
    """Slots that the row of ``req`` may still gain: at most up to its footprint, never below zero.

    A waiting request is counted from its whole prompt: its prefill is budgeted separately.
    """
    config = scheduler.state_of(req).config
    if config is None:
        return math.inf
    runtime = scheduler.runtime()
    held = req.kv.kv_allocated_len or len(req.origin_input_ids) + len(req.output_ids)
    shared = runtime.shared_prefix(req, tree_cache)
    if config.prefix == "protect" or scheduler.state_of(req).evictions:
        # Until a decode step is behind it, what its prefill gives the tree may not be processed.
        protected = req.kv.cache_protected_len if req.decode_batch_idx else shared
        return max(0, config.footprint(protected) - held)
    # Detaching copies first and lets go afterwards; a pool too small for that keeps the prefix.
    return min(max(0, config.footprint() - held) + shared, max(0, runtime.capacity - held - 2 * runtime.page_size))


def running_offset(offset: float, adder: PrefillAdder, req: Req) -> float:
    """Expected growth of a running request.

    One that may outgrow the pool has its whole footprint reserved: it could not come back from a retraction.
    """
    room = headroom(req, adder.tree_cache)
    longest = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return room if room < math.inf and not scheduler.fits(longest) else min(offset, room)


def add_request(original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any) -> Any:
    """Admit ``req`` with the output budget that its row can take.

    The separate ignore-EOS path simulates with logical lengths, so it is not taken.
    """
    params = req.sampling_params
    if scheduler.state_of(req).config is None:
        return original(adder, req, *args, **kwargs)
    asked, ignore_eos = params.max_new_tokens, params.ignore_eos
    params.max_new_tokens = min(asked, len(req.output_ids) + int(headroom(req, adder.tree_cache)))
    params.ignore_eos = False
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        params.max_new_tokens, params.ignore_eos = asked, ignore_eos


def worker_info(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """The longest request is bounded by the model's context, not by the pool (field 4 of the tuple).

    Rows that detach need a ring slot while they hold little of their own: then no more of them may run
    than there are slots (field 2).
    """
    runtime = scheduler.runtime()
    running = info[2]
    if runtime.ring is not None and runtime.config.prefix == "detach":
        running = min(running, runtime.ring.slots)
    return (*info[:2], running, info[3], worker.model_config.context_len - 1, *info[5:])


_arriving: EvictionConfig | None = None
"""Configuration of the request whose output limit is being set, ``None`` if it never evicts."""


def arrive(original: Callable[..., None], of: Any, req: Req) -> None:
    """Let ``output_limit`` know whose limit it is: SGLang asks for it by lengths alone."""
    global _arriving
    _arriving = scheduler.state_of(req).config
    original(of, req)


def output_limit(
    limit: int | None, allocator: Any, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **_: Any
) -> int | None:
    """A request whose bounded footprint fits an empty pool may generate as much as it asks for."""
    if _arriving is None:
        return limit
    page = allocator.page_size
    most = max(input_tokens, _arriving.footprint(input_tokens)) + page
    return max_new_tokens if -(-most // page) * page + 1 <= token_capacity else limit


def cell_size(size: int, configurator: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a pool token and of what the policy keeps beside each; ``pool_sizes`` adds what it keeps a request."""
    from sglang.srt.runtime_context import get_parallel

    from sgl_vase_srt import server_args

    assert server_args.active is not None
    model = kvc.model_config
    ranks = get_parallel().attn_tp_size
    policy = policy_class(server_args.active.policy)(server_args.active.options)
    configurator.eviction_bytes_per_request = policy.state_bytes(
        layers=num_layers,
        q_heads=model.num_attention_heads // ranks,
        dim=model.head_dim,
        window=server_args.active.buffer,
        itemsize=model.dtype.itemsize,
    )
    return size + (4 * num_layers * model.get_num_kv_heads(ranks) if policy.needs_state else 0)


def pool_sizes(original: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """The pool that fits beside its policy's side state, so that ``--mem-fraction-static`` covers both.

    A request takes side state only while it holds ``M`` tokens or more: either each pool token pays its share of
    that, or, if fewer may run, ``--max-running-requests`` of them are paid in advance; whichever leaves more. The
    ring has a scratch slot besides, and rounds up.
    """
    from sglang.srt.runtime_context import get_schedule

    from sgl_vase_srt import server_args

    assert server_args.active is not None
    size, each = configurator._cell_size, configurator.eviction_bytes_per_request
    plans = [(size + -(-each // server_args.active.private_floor), available_bytes - 2 * each)]
    if most := get_schedule().max_running_requests:
        plans.append((size, available_bytes - (most + 1) * each))
    configurator._cell_size, budget = max(plans, key=lambda plan: plan[1] / plan[0])
    return original(configurator, budget, page_size)
