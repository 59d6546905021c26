"""The scheduler's side: who is due, the round in two halves, and the end of a request.

A round is *planned* on the schedule stream from host integers (tail slots go back to the pool, lengths
shrink) and *executed* on the forward stream before the next forward, which is the first reader of the
shorter row and the first writer of the freed slots.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sgl_vase_kernels import KVPool, QueryWindow, Rows, ops, upload

from sgl_vase import EvictionConfig, Policy, Round, RowPlan, policy_class
from sgl_vase.policy import FIRST_POSITIONS
from sgl_vase.randomness import request_key
from sgl_vase_srt import compat, requests
from sgl_vase_srt.ring import QueryRing
from sgl_vase_srt.trace import Trace

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_vase_srt.metrics import Counters

logger = logging.getLogger(__name__)

WORKSPACE = 256 << 20
"""Bytes that one launch's temporaries may take beside the KV pool; more due rows are moved in several."""
LONG_ROW = 4096 + 1024
"""A row that selection walks in blocks."""


@dataclass
class RequestState:
    """What eviction remembers of one request between its prefill and its end."""

    config: EvictionConfig | None
    """The server's, or what the request asked for; ``None``: it is never evicted."""
    seed: int
    evictions: int = 0
    evicted_tokens: int = 0
    ring_slot: int = 0
    captured_from: int = 0
    """First logical position whose query is in the ring."""
    kept: int = 0
    """Leading private entries that survived the last round."""
    kv_tokens: int | None = None
    """Physical length at the end, once the row is released."""


@dataclass(frozen=True)
class _Due:
    """One planned cut, with the row's slots as they were when it was planned."""

    state: RequestState
    req: Req
    plan: RowPlan
    copy: tuple[torch.Tensor, torch.Tensor] | None
    """A row that detaches: its tree-owned slots and the ones they are copied to."""
    slots: torch.Tensor
    round: int
    carried: int
    ring_slot: int
    end: int
    valid: int


@dataclass
class Totals:
    """Counted since the start of the process."""

    evictions: int = 0
    evicted_tokens: int = 0


@dataclass
class Runtime:
    """Eviction in one scheduler process."""

    config: EvictionConfig
    policy: Policy
    pool: KVPool
    req_to_token: torch.Tensor
    page_size: int
    capacity: int
    """Tokens of the KV pool."""
    scale: float
    ring: QueryRing | None
    state: torch.Tensor | None
    totals: Totals = field(default_factory=Totals)
    counters: Counters | None = None
    trace: Trace | None = None
    capture: bool | tuple[torch.Tensor, torch.Tensor, torch.Tensor] = True
    """Queries of the forward at hand to keep: none, every row's (decode; also while graphs are captured), or
    ``window_tokens`` of an extend."""
    _pending: list[_Due] = field(default_factory=list)

    @property
    def _most_candidates(self) -> int:
        """Of one launch: what ``WORKSPACE`` holds of scores, reserve scores and survivors' indices."""
        return WORKSPACE // (16 * self.pool.layers * self.pool.heads)

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
            state = state_of(req)
            if state.config is None:
                continue
            length, shared = req.kv.kv_allocated_len, req.kv.cache_protected_len
            detaching = shared > 0 and state.config.prefix == "detach"
            protected = 0 if detaching else shared
            if self.ring is not None and not state.ring_slot and length >= state.config.target(protected):
                self._start_capture(req, logical_length(req))
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
        if self.ring is None:
            return True
        return logical_length(req) - state.captured_from >= self.ring.window

    def _start_capture(self, req: Req, position: int) -> None:
        """Queries from ``position`` on go into the ring."""
        assert self.ring is not None
        state = state_of(req)
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
        end = logical_length(req)
        self._pending.append(
            _Due(
                state=state,
                req=req,
                plan=plan,
                copy=copy,
                slots=row[plan.protected : plan.length].to(torch.int64),
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
        self.totals.evictions += 1
        self.totals.evicted_tokens += evicted
        if self.counters is not None:
            self.counters.planned(evicted, first=state.evictions == 1)
        return evicted

    # --------------------------------------------------------------- execute

    def execute(self) -> None:
        """Enqueue the move of all planned cuts; call on the forward stream."""
        if self.ring is not None:
            self.ring.flush()
        due, self._pending = self._pending, []
        if not due:
            return
        begin = time.perf_counter()
        starts: list[int] = []
        room = 0
        for i, d in enumerate(due):
            candidates = d.plan.length - d.plan.protected
            room -= candidates
            # A copy may go to slots that an earlier cut gave back: that cut is moved first.
            if not starts or d.copy is not None or room < 0:
                starts.append(i)
                room = self._most_candidates - candidates
        for start, stop in zip(starts, [*starts[1:], len(due)], strict=True):
            if (copy := due[start].copy) is not None:
                ops.copy_slots(self.pool, *copy)
            self._move(due[start:stop])
        if self.counters is not None:
            self.counters.executed(time.perf_counter() - begin)

    def _move(self, due: list[_Due]) -> None:
        if self.pool.device.type == "cuda":
            for tensor in (t for d in due for t in (d.slots, *(d.copy or ()))):
                tensor.record_stream(torch.cuda.current_stream())
        plans = [d.plan for d in due]
        rows = Rows(
            slots=torch.cat([d.slots for d in due]),
            lengths=tuple(p.length - p.protected for p in plans),
            buffer=self.config.buffer,
            first=tuple(p.protected for p in plans),
            keep=tuple(p.keep for p in plans),
            reserve=tuple(p.reserve for p in plans),
            sinks=tuple(max(0, FIRST_POSITIONS - p.protected) for p in plans),
            seed=tuple(d.state.seed for d in due),
            round=tuple(d.round for d in due),
            carried=tuple(d.carried for d in due),
        )
        queries = None
        if self.ring is not None:
            queries = QueryWindow(
                self.ring.data,
                slot=tuple(d.ring_slot for d in due),
                end=tuple(d.end for d in due),
                valid=tuple(d.valid for d in due),
                scale=self.scale,
            )
        kept = self.policy.select(Round(self.pool, rows, queries, self.state))
        ops.compact(self.pool, rows, kept, keep_order=self.policy.needs_order)
        if self.trace is not None:
            self.trace.write([d.req.rid for d in due], self.pool, rows, kept)

    def warm_up(self) -> None:
        """One round over the empty pool for each size of row that a kernel is built for.

        A server that compiles at its first round stalls every request, and what the kernels do not take would
        end it there.
        """
        longest = self.config.footprint()
        lengths = [longest, *(n for n in (2**i for i in range(7, 31)) if self.config.private_floor < n < longest)]
        if self.capacity > LONG_ROW and longest <= LONG_ROW:
            lengths.append(LONG_ROW)
        device, buffer = self.pool.device, self.config.buffer
        for length in lengths:
            keep = (length - buffer + 1) // 2
            zero = (0,)
            rows = Rows(
                # Slot 0 is the padding's; page 0 of paged pools is its own.
                torch.arange(self.page_size, self.page_size + length, device=device),
                *((length,), buffer, zero, (keep,), (keep // 4,), zero, zero, zero, zero),
            )
            queries = None
            if self.ring is not None:
                queries = QueryWindow(self.ring.data, zero, (length,), (buffer,), self.scale)
            kept = self.policy.select(Round(self.pool, rows, queries, self.state))
            ops.compact(self.pool, rows, kept, keep_order=self.policy.needs_order)
        if self.state is not None:
            self.state.zero_()

    # ---------------------------------------------------------------- window

    def window_tokens(
        self, batch: ScheduleBatch, decoding: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Tokens of an extend (or mixed) forward whose queries are kept: int64 indices into the
        forward's tokens, ring slots, logical positions.

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
            state = state_of(req)
            if i >= first_decoding:
                low = high = logical_length(req) - 1
                high += 1
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
        device = self.pool.device
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

    def shared_prefix(self, req: Req, tree_cache: Any) -> int:
        """Tokens of the row that the tree owns, or will once the prefill's result is processed."""
        if getattr(tree_cache, "disable", False) or req.skip_radix_cache_insert:
            return req.kv.cache_protected_len
        return max(req.kv.cache_protected_len, shareable(req) // self.page_size * self.page_size)

    # ------------------------------------------------------------------- end

    def forget(self, req: Req) -> None:
        """Drop what is planned or held for ``req``."""
        self._pending = [d for d in self._pending if d.req is not req]
        state = state_of(req)
        if state.ring_slot:
            assert self.ring is not None
            self.ring.give_back(req.kv.req_pool_idx, state.ring_slot)
            state.ring_slot = 0

    def record(self, state: RequestState, kv_tokens: int) -> dict[str, Any]:
        """What an answer says about eviction."""
        return {
            "policy": state.config.policy if state.config else "none",
            "budget": state.config.budget if state.config else None,
            "evictions": state.evictions,
            "evicted_tokens": state.evicted_tokens,
            "kv_tokens": kv_tokens,
        }


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this process; there is one once the model worker has its pools."""
    assert _runtime is not None
    return _runtime


def state_of(req: Req) -> RequestState:
    """The request's eviction state, made on first use."""
    state: RequestState | None = getattr(req, "eviction_state", None)
    if state is None:
        params = req.sampling_params
        if params.sampling_seed is not None:
            request_seed = params.sampling_seed
        elif params.top_k == 1:  # greedy: answers must not depend on the request's id
            request_seed = 0
        else:
            request_seed = int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little")
        config = runtime().config
        state = req.eviction_state = RequestState(
            requests.asked(config, params.custom_params), request_key(config.seed, request_seed)
        )
    return state


def publishable(req: Req, length: int) -> int:
    """How many of the row's first ``length`` tokens the tree may own: it keeps what was matched in it."""
    config = state_of(req).config
    return max(length if config is None else config.shared(length), req.kv.cache_protected_len)


def shareable(req: Req) -> int:
    """What the tree may own of a row while it runs: of the prompt, and what was matched beyond it. A retracted
    request prefills its outputs too; owned by the tree, they could never be compacted again."""
    return publishable(req, len(req.origin_input_ids))


def logical_length(req: Req) -> int:
    """Tokens whose KV was ever written for ``req``: physical length plus what was evicted."""
    return req.kv.kv_allocated_len + state_of(req).evicted_tokens


# ---------------------------------------------------------------------- hooks


def attach(_: None, worker: TpModelWorker, *args: Any, **kwargs: Any) -> None:
    """Build the runtime once the worker has its pools."""
    global _runtime
    from sglang.srt.runtime_context import get_parallel

    from sgl_vase_srt import forward, hooks, metrics, server_args

    config = server_args.active
    assert config is not None
    runner = worker.model_runner
    try:
        hooks.verify()
        compat.check_model(runner.model_config)
        layers = forward.attention_layers(runner)
        if config.footprint() > runner.token_to_kv_pool.size:
            raise ValueError(
                f"--eviction-budget {config.budget} and --eviction-buffer {config.buffer} never evict in a KV pool of "
                f"{runner.token_to_kv_pool.size} tokens: lower --eviction-budget, or raise --mem-fraction-static "
                "or --max-total-tokens"
            )
    except ValueError as error:
        logger.error("error: %s", error)
        raise SystemExit(1) from None
    kv = runner.token_to_kv_pool
    policy = policy_class(config.policy)(config.options)
    pool = KVPool.from_slots(
        kv.k_buffer,
        kv.v_buffer,
        layer_offset=kv.start_layer,
        head_offset=_head_offset(runner, kv.head_num),
    )
    rows = runner.req_to_token_pool.req_to_token.shape[0]
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
            rows=rows,
            first_layer=kv.start_layer,
        )
    _runtime = Runtime(
        config=config,
        policy=policy,
        pool=pool,
        req_to_token=runner.req_to_token_pool.req_to_token,
        page_size=kv.page_size,
        capacity=kv.size,
        scale=layers[0].scaling,
        ring=ring,
        counters=metrics.counters(),
        trace=Trace.from_environment(get_parallel().tp_rank),
        state=torch.zeros(pool.layers, pool.heads, pool.slots, device=pool.device) if policy.needs_state else None,
    )
    if ops.backend(pool.device) == "triton":
        _runtime.warm_up()
    logger.info(
        "KV eviction is on: %s, %s kernels. The pool's %d tokens hold %d requests of at most %d tokens each; "
        "query ring: %d slots, %.1f MiB",
        config.resolved(),
        ops.backend(pool.device),
        kv.size,
        kv.size // (-(-config.footprint() // kv.page_size) * kv.page_size),
        config.footprint(),
        ring.slots if ring is not None else 0,
        ring.nbytes / 2**20 if ring is not None else 0.0,
    )


def _head_offset(runner: ModelRunner, heads: int) -> int:
    """Global index of this rank's first KV head (heads may be replicated over ranks)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    total = runner.model_config.get_total_num_kv_heads()
    return parallel.attn_tp_rank * total // parallel.attn_tp_size if heads * parallel.attn_tp_size >= total else 0


def plan(batch: ScheduleBatch, selected_indices: list[int] | None = None) -> None:
    if selected_indices is None:
        runtime().plan(batch)


def execute(worker: TpModelWorker, *args: Any, **kwargs: Any) -> None:
    runtime().execute()


def forget(_: None, req: Req) -> None:
    """After a retraction: the state starts over with the rebuilt row."""
    req.eviction_state = None


def finish(req: Req) -> bool:
    """The row of ``req`` is about to be released: settle its state. True if it was never evicted."""
    if not req.kv.holds_kv:
        return True
    state = state_of(req)
    state.kv_tokens = req.kv.kv_committed_len
    runtime().forget(req)
    return state.evictions == 0


def retraction_order(order: list[int], reqs: list[Req]) -> list[int]:
    """Keep longest what cannot come back: a retracted request prefills its whole logical length."""
    return sorted(order, key=lambda i: can_return(reqs[i]))


def can_return(req: Req) -> bool:
    """Whether a prefill could bring back the request's prompt and outputs."""
    return fits(req.seqlen)


def fits(tokens: int) -> bool:
    """Whether the pool could hold so many tokens at once, as a prefill needs them."""
    current = runtime()
    return tokens + current.page_size < current.capacity


def requeue(original: Callable[..., None], scheduler: Scheduler, req: Req, is_retracted: bool = False) -> None:
    """A retracted request that no prefill can bring back ends with an error instead of blocking the queue."""
    if not req.is_retracted or can_return(req):  # a pause does not pass the argument
        original(scheduler, req, is_retracted=is_retracted)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    req.to_finish = FINISH_ABORT(
        f"Retracted after {req.seqlen} tokens, more than the KV pool of {runtime().capacity} holds at once: it cannot "
        "be prefilled again. Raise --max-total-tokens or lower --max-running-requests.",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
    )
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=req.to_finish.to_json()), req)


def report_ready(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Tell the launcher that this scheduler evicts: its hooks were verified when the pools were built."""
    return {**info, "eviction_ready": runtime().config.policy}


def forward_ready(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Hand on what the replicas of a data-parallel controller said; all of them must have."""
    said = [replica.get("eviction_ready") for replica in controller._scheduler_init_infos]
    return {**info, "eviction_ready": said[0] if all(said) else None}


def require_ready(infos: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
    """Raise unless every scheduler process said that its hooks are in place."""
    from sgl_vase_srt import server_args

    if server_args.active is not None and any(info.get("eviction_ready") is None for info in infos):
        raise RuntimeError(
            f"--eviction {server_args.active.policy} cannot serve: a scheduler process runs without the sgl_vase "
            "plugin (is SGLANG_PLUGINS set without sgl_vase, or did the plugin fail to load there? see its log above)"
        )
