"""What eviction remembers of one request between its prefill and its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vase import EvictionConfig
from sgl_vase.randomness import request_key
from sgl_vase_srt.engine import options

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class RequestState:
    """Counters and positions of one request; all lengths are in tokens."""

    config: EvictionConfig | None
    """The server's, or what the request asked for; ``None``: it is never evicted."""
    seed: int
    evictions: int = 0
    evicted_tokens: int = 0
    ring_slot: int = 0
    """Where its queries go; 0: they are not kept."""
    captured_from: int = 0
    """First logical position whose query is in the ring."""
    kept: int = 0
    """Leading private entries that survived the last round."""
    kv_tokens: int | None = None
    """Physical length at the end, once the row is released."""


def new_state(req: Req, config: EvictionConfig) -> RequestState:
    """The state of a request that was not seen before, on a server that evicts by ``config``."""
    params = req.sampling_params
    if params.sampling_seed is not None:
        seed = params.sampling_seed
    elif params.top_k == 1:  # greedy: answers must not depend on the request's id
        seed = 0
    else:
        seed = int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little")
    return RequestState(options.asked(config, params.custom_params), request_key(config.seed, seed))
