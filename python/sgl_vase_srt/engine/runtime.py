"""The scheduler's half: which rows are due, what a row may hold and share, and the end of a request.

A round is *planned* on the schedule stream from host integers: tail slots go back to the pool and lengths
shrink. It is *executed* on the forward stream before the next forward, which is the first reader of the
shorter row and the first writer of the freed slots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sgl_vase_kernels import upload

from sgl_vase import EvictionConfig, RowPlan
from sgl_vase_srt.engine.counters import Counters
from sgl_vase_srt.engine.ring import QueryRing
from sgl_vase_srt.engine.rounds import Due, Rounds
from sgl_vase_srt.engine.state import RequestState, new_state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries of an extend to keep: indices into its tokens, ring slots, logical positions; int64 ``[n]`` each."""


@dataclass
class Runtime:
    """Eviction in one scheduler process. ``req_to_token``: int32 ``[rows, context]``, SGLang's table of slots."""

    config: EvictionConfig
    rounds: Rounds
    req_to_token: torch.Tensor
    page_size: int
    capacity: int
    """Tokens of the KV pool."""
    counters: Counters | None = None
    evictions: int = 0
    evicted_tokens: int = 0
    capture: bool | Window = True
    """Queries of the forward at hand to keep: none, every row's (decode; also while graphs are captured), or
    ``window_tokens`` of an extend."""
    _pending: list[Due] = field(default_factory=list)

    @property
    def ring(self) -> QueryRing | None:
        """The query ring, if the policy scores with queries."""
        return self.rounds.ring

    # -------------------------------------------------------------- requests

    def state_of(self, req: Req) -> RequestState:
        """The request's eviction state, made on first use."""
        state: RequestState | None = getattr(req, "eviction_state", None)
        if state is None:
            state = req.eviction_state = new_state(req, self.config)
        return state

    def logical_length(self, req: Req) -> int:
        """Tokens whose KV was ever written for ``req``: physical length plus what was evicted."""
        length: int = req.kv.kv_allocated_len
        return length + self.state_of(req).evicted_tokens

    def publishable(self, req: Req, length: int) -> int:
        """How many of the row's first ``length`` tokens the tree may own: it keeps what was matched in it."""
        config = self.state_of(req).config
        return max(length if config is None else config.shared(length), req.kv.cache_protected_len)

    def shareable(self, req: Req) -> int:
        """What the tree may own of a row while it runs: of the prompt, and what was matched beyond it. A retracted
        request prefills its outputs too; owned by the tree, they could never be compacted again."""
        return self.publishable(req, len(req.origin_input_ids))

    def shared_prefix(self, req: Req, tree_cache: Any) -> int:
        """Tokens of the row that the tree owns, or will once the prefill's result is processed."""
        owned: int = req.kv.cache_protected_len
        if getattr(tree_cache, "disable", False) or req.skip_radix_cache_insert:
            return owned
        return max(owned, self.shareable(req) // self.page_size * self.page_size)

    def fits(self, tokens: int) -> bool:
        """Whether the pool could hold so many tokens at once, as a prefill needs them."""
        return tokens + self.page_size < self.capacity

    def finish(self, req: Req) -> bool:
        """The row of ``req`` is about to be released: settle its state. True if it was never evicted."""
        if not req.kv.holds_kv:
            return True
        state = self.state_of(req)
        state.kv_tokens = req.kv.kv_committed_len
        self._pending = [d for d in self._pending if d.req is not req]
        if state.ring_slot:
            assert self.ring is not None
            self.ring.give_back(req.kv.req_pool_idx, state.ring_slot)
            state.ring_slot = 0
        return state.evictions == 0

    def record(self, req: Req) -> dict[str, Any]:
        """What an answer says about eviction."""
        state = self.state_of(req)
        return {
            "policy": state.config.policy if state.config else "none",
            "budget": state.config.budget if state.config else None,
            "evictions": state.evictions,
            "evicted_tokens": state.evicted_tokens,
            "kv_tokens": req.kv.kv_committed_len if state.kv_tokens is None else state.kv_tokens,
        }

    # ------------------------------------------------------------------ plan

    def plan(self, batch: ScheduleBatch) -> None:
        """Cut every due row of a decode batch: free its tail, shrink its lengths, queue the move."""
        begin = time.perf_counter()
        self._plan(batch)
        if self.counters is not None:
            self.counters.searched(time.perf_counter() - begin)

    def _plan(self, batch: ScheduleBatch) -> None:
        cuts: dict[int, int] = {}
        for i, req in enumerate(batch.reqs):
            # Before its first decode step is behind it, a prefill's result may be unprocessed:
            # the protected length is stale and its slots may still be the tree's.
            if req.decode_batch_idx < 1 or not req.kv.holds_kv:
                continue
            state = self.state_of(req)
            if state.config is None:
                continue
            length, shared = req.kv.kv_allocated_len, req.kv.cache_protected_len
            detaching = shared > 0 and state.config.prefix == "detach"
            protected = 0 if detaching else shared
            if self.ring is not None and not state.ring_slot and length >= state.config.target(protected):
                self._start_capture(req, self.logical_length(req))
            plan = state.config.plan_row(length, protected)
            if plan is None or not self._window_full(state, req):
                continue
            copy = self._detach(req, batch) if detaching else None
            if detaching and copy is None:
                # No room for the copy now: bound the private part meanwhile, try again at the next round.
                plan = state.config.plan_row(length, shared)
            if plan is not None:
                cuts[i] = self._cut(req, state, plan, batch, copy)
        if not cuts:
            return
        delta = [cuts.get(i, 0) for i in range(len(batch.reqs))]
        # New tensors: the previous forward may still read the old ones.
        batch.seq_lens = batch.seq_lens - upload(delta, batch.seq_lens.device).to(batch.seq_lens.dtype)
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(delta, dtype=batch.seq_lens_cpu.dtype)
        batch.seq_lens_sum = None

    def _window_full(self, state: RequestState, req: Req) -> bool:
        return self.ring is None or self.logical_length(req) - state.captured_from >= self.ring.window

    def _start_capture(self, req: Req, position: int) -> None:
        """Queries from ``position`` on go into the ring."""
        assert self.ring is not None
        state = self.state_of(req)
        state.ring_slot = self.ring.take(req.kv.req_pool_idx)
        state.captured_from = position

    def _detach(self, req: Req, batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Give the row slots of its own for what it shares, and let go of the tree.

        The copy to make, from the tree's slots to the row's, or ``None`` if the pool has no room. Whoever gets
        the tree's slots next writes them in a later forward.
        """
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        shared = req.kv.cache_protected_len
        evict_from_tree_cache(batch.tree_cache, shared)
        slots = batch.tree_cache.token_to_kv_pool_allocator.alloc(shared)
        if slots is None:
            return None
        row = self.req_to_token[req.kv.req_pool_idx]
        copy = row[:shared].to(torch.int64), slots
        row[:shared] = slots.to(row.dtype)
        batch.tree_cache.unlock(req.lock)
        req.lock = None
        req.kv.cache_protected_len = req.kv.cache_inserted_len = 0
        return copy

    def _cut(
        self,
        req: Req,
        state: RequestState,
        plan: RowPlan,
        batch: ScheduleBatch,
        copy: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> int:
        row = self.req_to_token[req.kv.req_pool_idx]
        end = self.logical_length(req)
        self._pending.append(
            Due(
                req=req,
                plan=plan,
                copy=copy,
                slots=row[plan.protected : plan.length].to(torch.int64),
                seed=state.seed,
                round=state.evictions,
                carried=state.kept,
                ring_slot=state.ring_slot,
                end=end,
                valid=min(self.config.buffer, end - state.captured_from) if self.ring is not None else 0,
            )
        )
        free_from = -(-plan.target // self.page_size) * self.page_size
        if free_from < plan.length:
            batch.tree_cache.free_kv_row(req.kv, [(free_from, plan.length)])
        req.kv.kv_committed_len = req.kv.kv_allocated_len = plan.target
        evicted = plan.length - plan.target
        state.evictions += 1
        state.evicted_tokens += evicted
        state.kept = plan.keep
        self.evictions += 1
        self.evicted_tokens += evicted
        if self.counters is not None:
            self.counters.planned(evicted, first=state.evictions == 1)
        return evicted

    def execute(self) -> None:
        """Enqueue the moves of all planned cuts; call on the forward stream."""
        if self.ring is not None:
            self.ring.flush()
        due, self._pending = self._pending, []
        if not due:
            return
        begin = time.perf_counter()
        self.rounds.execute(due)
        if self.counters is not None:
            self.counters.executed(time.perf_counter() - begin)

    # ---------------------------------------------------------------- window

    def window_tokens(self, batch: ScheduleBatch, decoding: int) -> Window | None:
        """Tokens of an extend (or mixed) forward whose queries are kept; its last ``decoding`` rows decode.

        A prefill matters when its row will be due at once: the newest ``B`` queries of a long
        private part. What the tree will own is not private.
        """
        assert self.ring is not None
        index: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        start = 0
        first_decoding = len(batch.reqs) - decoding
        for i, (req, extend) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
            state = self.state_of(req)
            if i >= first_decoding:
                high = self.logical_length(req)
                low = high - 1
            else:
                low, high = self._prefill_window(req, state, batch.prefix_lens[i], extend, batch)
            if state.ring_slot and low < high:
                first = start + (low - batch.prefix_lens[i] if i < first_decoding else 0)
                index += range(first, first + high - low)
                positions += range(low, high)
                slots += [state.ring_slot] * (high - low)
            start += extend
        if not index:
            return None
        self.ring.flush()
        device = self.rounds.pool.device
        return upload(index, device), upload(slots, device), upload(positions, device)

    def _prefill_window(
        self, req: Req, state: RequestState, prefix: int, extend: int, batch: ScheduleBatch
    ) -> tuple[int, int]:
        """Positions ``[low, high)`` of this chunk whose queries are kept."""
        total = len(req.full_untruncated_fill_ids)
        if state.config is None:
            return 0, 0
        shared = 0 if state.config.prefix == "detach" else self.shared_prefix(req, batch.tree_cache)
        if total < state.config.target(shared):
            return 0, 0
        low, high = max(prefix, total - self.config.buffer), prefix + extend
        if low < high and not state.ring_slot:
            self._start_capture(req, low)
        return low, high
