"""What a request may still take from the pool: its bounded footprint, not its whole future.

An evicting row never has more than ``T_eff + B`` slots (page rounding on top). SGLang budgets by
``max_new_tokens`` in several places; each is given the smaller of the two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_vase_srt.engine import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler


def headroom(req: Req, tree_cache: Any) -> float:
    """Slots that the row of ``req`` may still gain: at most up to its footprint, never below zero.

    A waiting request is counted from its whole prompt: its prefill is budgeted separately.
    """
    runtime = current.runtime()
    state = runtime.state_of(req)
    config = state.config
    if config is None:
        return math.inf
    held = req.kv.kv_allocated_len or len(req.origin_input_ids) + len(req.output_ids)
    shared = runtime.shared_prefix(req, tree_cache)
    if config.prefix == "protect" or state.evictions:
        # Until a decode step is behind it, what its prefill gives the tree may not be processed.
        protected = req.kv.cache_protected_len if req.decode_batch_idx else shared
        return max(0, config.footprint(protected) - held)
    # Detaching copies first and lets go afterwards; a pool too small for that keeps the prefix.
    return min(max(0, config.footprint() - held) + shared, max(0, runtime.capacity - held - 2 * runtime.page_size))


def growth(offset: float, adder: PrefillAdder, req: Req) -> float:
    """Expect a running row to grow to its footprint at most.

    One that may outgrow the pool has its whole footprint reserved: it could not come back from a retraction.
    """
    room = headroom(req, adder.tree_cache)
    longest = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return room if room < math.inf and not current.runtime().fits(longest) else min(offset, room)


def add_request(original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any) -> Any:
    """Admit a request (a chunked one: its last chunk) with the output budget that its row can take.

    The separate ignore-EOS path simulates with logical lengths, so it is not taken.
    """
    params = req.sampling_params
    if current.runtime().state_of(req).config is None:
        return original(adder, req, *args, **kwargs)
    asked, ignore_eos = params.max_new_tokens, params.ignore_eos
    params.max_new_tokens = min(asked, len(req.output_ids) + int(headroom(req, adder.tree_cache)))
    params.ignore_eos = False
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        params.max_new_tokens, params.ignore_eos = asked, ignore_eos


def worker_info(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """Bound the longest request by the model's context, not by the pool (field 4 of the tuple).

    Rows that detach need a ring slot while they hold little of their own: then no more of them may run
    than there are slots (field 2).
    """
    runtime = current.runtime()
    running = info[2]
    if runtime.ring is not None and runtime.config.prefix == "detach":
        running = min(running, runtime.ring.slots)
    return (*info[:2], running, info[3], worker.model_config.context_len - 1, *info[5:])


def arrive(original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
    """Let a request whose bounded footprint fits an empty pool generate as much as it asks for.

    SGLang clips the answer to ``max_total_num_tokens``; it reads that here for nothing else.
    """
    config = current.runtime().state_of(req).config
    pool, page = scheduler.max_total_num_tokens, scheduler.page_size
    tokens = len(req.origin_input_ids)
    if config is not None and -(-max(tokens, config.footprint(tokens)) // page) * page + page + 1 <= pool:
        scheduler.max_total_num_tokens = 1 << 40
    try:
        original(scheduler, req)
    finally:
        scheduler.max_total_num_tokens = pool
