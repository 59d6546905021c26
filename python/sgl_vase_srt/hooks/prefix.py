"""What the radix tree may own of a request that evicts.

req_to_token[row]:  0 ...... P | P ........ P+K | P+K ..... P+K+B | (freed)
                    protected  | survivors      | buffer          |
owner:              radix tree | this request   | this request    | pool
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_vase_srt.engine import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


def release(original: Callable[..., Any], req: Req, tree_cache: BasePrefixCache, *, checkpoint: bool) -> Any:
    """Keep an evicted row out of the tree: its protected part is in there already, the rest is no prefix.

    With ``--eviction-prefill on`` no row publishes more than leaves ``T_eff = T`` to those who match it.
    """
    runtime = current.runtime()
    checkpoint = runtime.finish(req) and checkpoint
    if checkpoint and req.kv.holds_kv and not req.skip_radix_cache_insert:
        length = req.owned_kv_len()
        if (most := runtime.publishable(req, length)) < length:
            req.refresh_fill_ids()
            tree_cache.checkpoint(req, up_to=most)
            checkpoint = False
    return original(req, tree_cache, checkpoint=checkpoint)


def checkpoint(original: Callable[..., Any], req: Req, tree_cache: BasePrefixCache) -> Any:
    """Publish what the tree may own and no more; the rest of the row stays the request's, to evict."""
    most = current.runtime().shareable(req)
    if req.extend_end <= most or req.skip_radix_cache_insert:
        return original(req, tree_cache)
    tree_cache.checkpoint(req, up_to=most)
    req.prefix_len = req.extend_end
    return None
