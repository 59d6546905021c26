"""Random interleavings of requests over SGLang's own radix tree, allocator and pools, with a model made of hashes.

The KV of a token is a function of all tokens up to it, so what the tree caches can be compared bit for bit with
what a fresh prefill would write.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sgl_vase_kernels import KVPool
from sgl_vase_srt.engine import current
from sgl_vase_srt.engine.rounds import Rounds
from sgl_vase_srt.engine.runtime import Runtime
from sgl_vase_srt.hooks import batch as batches
from sgl_vase_srt.hooks import prefix

from sgl_vase import EvictionConfig, policy_class
from sgl_vase.config import PREFILL_MODES, PREFIX_MODES

LAYERS, HEADS, DIM, POOL, ROWS, CONTEXT = 2, 2, 4, 640, 8, 512
CONFIG = EvictionConfig(policy="random", budget=24, buffer=4, min_private=12)
MODES = {
    f"{prefix}, prefill {prefill}": replace(CONFIG, prefix=prefix, prefill=prefill)
    for prefix in PREFIX_MODES
    for prefill in PREFILL_MODES
}


@pytest.fixture(scope="module", autouse=True)
def _published() -> None:
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", device="cpu"), role="tokenizer")


@cache
def kv_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """K and V of the last of ``tokens``: float32 ``[2, layers, heads, dim]``."""
    generator = torch.Generator().manual_seed(hash(tokens) % 2**63)
    return torch.randn(2, LAYERS, HEADS, DIM, generator=generator)


class World:
    """One pool, one tree, and the requests that run on them."""

    def __init__(self, page: int, mode: str) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.page = page
        self.kv = MHATokenToKVPool(POOL, page, torch.float32, HEADS, DIM, LAYERS, "cpu", False)
        paged = (POOL, page, torch.float32, "cpu", self.kv, False)
        plain = (POOL, torch.float32, "cpu", self.kv, False)
        self.allocator: Any = PagedTokenToKVPoolAllocator(*paged) if page > 1 else TokenToKVPoolAllocator(*plain)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
            )
        )
        pool = KVPool.from_slots(self.kv.k_buffer, self.kv.v_buffer)
        rounds = Rounds(policy_class(CONFIG.policy)(), pool, CONFIG.buffer)
        self.runtime = Runtime(MODES[mode], rounds, self.rows.req_to_token, page_size=page, capacity=POOL)
        current.attached = self.runtime
        self.running: list[Any] = []
        self.known: set[tuple[int, ...]] = set()
        self.names = itertools.count()
        self.evictions = 0
        self.hits = 0

    # ------------------------------------------------------------ operations

    def start(self, prompt: tuple[int, ...]) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=400, temperature=1.0, sampling_seed=3)
        req = Req(f"r{next(self.names)}", "", array("q", prompt), params)
        self.prefill(req)

    def prefill(self, req: Any) -> None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req.init_next_round_input(self.tree)
        tokens = tuple(req.full_untruncated_fill_ids)
        matched = req.prefix_len
        self.hits += matched
        req.lock = self.tree.lock(req.last_node)
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[:matched] = self.tree.path_device_indices(req.last_node)[:matched].to(torch.int32)
        slots = self.take(matched, len(tokens), row)
        row[matched : len(tokens)] = slots.to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = len(tokens)
        for i in range(matched, len(tokens)):
            self.write(int(row[i]), tokens[: i + 1])
        prefix.checkpoint(checkpoint_kv_cache, req, self.tree)
        most = max(matched, self.runtime.config.shared(len(req.origin_input_ids)))
        assert req.kv.cache_protected_len == most // self.page * self.page
        self.known.add(tokens)
        self.running.append(req)

    def take(self, length: int, total: int, row: torch.Tensor) -> torch.Tensor:
        """Slots for the row's entries ``[length, total)``."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, total - length + self.page)
        if self.page == 1:
            slots = self.allocator.alloc(total - length)
        else:
            last = row[length - 1 : length].to(torch.int64) if length else torch.tensor([-1])
            lens, totals = torch.tensor([length]), torch.tensor([total])
            slots = self.allocator.alloc_extend(lens, lens, totals, totals, last, total - length)
        assert slots is not None
        return slots

    def write(self, slot: int, tokens: tuple[int, ...]) -> None:
        k, v = kv_of(tokens)
        for layer in range(LAYERS):
            self.kv.k_buffer[layer][slot] = k[layer]
            self.kv.v_buffer[layer][slot] = v[layer]

    def decode(self, steps: int) -> None:
        """All running requests take ``steps`` decode steps as one batch."""
        for _ in range(steps):
            lens = torch.tensor([req.kv.kv_allocated_len for req in self.running])
            batch = SimpleNamespace(
                reqs=self.running, seq_lens=lens, seq_lens_cpu=lens.clone(), seq_lens_sum=None, tree_cache=self.tree
            )
            self.runtime.plan(batch)  # type: ignore[arg-type]
            for req, length in zip(self.running, batch.seq_lens_cpu.tolist(), strict=True):
                assert length == req.kv.kv_allocated_len
                # The first step after a (re-)prefill is too early for a round.
                assert length <= CONFIG.footprint(req.kv.cache_protected_len) or req.decode_batch_idx < 1
                row = self.rows.req_to_token[req.kv.req_pool_idx]
                row[length] = int(self.take(length, length + 1, row))
                req.kv.kv_allocated_len += 1
                req.kv.kv_committed_len += 1
                req.decode_batch_idx += 1
            self.runtime.execute()
            for req in self.running:
                req.output_ids.append((7 * len(req.output_ids) + 3) % 11)
                slot = int(self.rows.req_to_token[req.kv.req_pool_idx, req.kv.kv_allocated_len - 1])
                self.write(slot, self.logical(req))

    def logical(self, req: Any) -> tuple[int, ...]:
        """Tokens whose KV was written: the newest output is the input of the next step."""
        return tuple(req.origin_input_ids) + tuple(req.output_ids)

    def end(self, index: int, kind: str) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req = self.running.pop(index % len(self.running))
        self.evictions += self.runtime.state_of(req).evictions
        if kind == "retract":
            prefix.release(release_kv_cache, req, self.tree, checkpoint=False)
            req.reset_for_retract()
            batches.forget(None, req)
            self.prefill(req)
            return
        self.known.add(self.logical(req))
        req.finished_reason = FINISH_ABORT() if kind == "abort" else FINISH_LENGTH(len(req.output_ids))
        prefix.release(release_kv_cache, req, self.tree, checkpoint=True)

    # ------------------------------------------------------------ invariants

    def check_tree(self) -> None:
        """Every token that the tree would serve has the KV of a fresh prefill."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        for tokens in self.known:
            match = self.tree.match_prefix(
                MatchPrefixParams(key=RadixKey(token_ids=array("q", tokens), extra_key=None))
            )
            slots = self.tree.path_device_indices(match.last_device_node)
            for i, slot in enumerate(slots.tolist()[: match.device_prefix_len]):
                self.check_slot(slot, tokens[: i + 1])

    def check_slot(self, slot: int, tokens: tuple[int, ...]) -> None:
        k, v = kv_of(tokens)
        for layer in range(LAYERS):
            assert torch.equal(self.kv.k_buffer[layer][slot], k[layer]), (slot, tokens)
            assert torch.equal(self.kv.v_buffer[layer][slot], v[layer]), (slot, tokens)

    def check_rows(self) -> None:
        """A row is its protected prefix, whole, and then distinct own tokens, the newest last."""
        for req in self.running:
            tokens = self.logical(req)
            row = self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].tolist()
            protected = req.kv.cache_protected_len
            if self.runtime.config.prefill == "on":
                assert protected <= CONFIG.budget - CONFIG.private_floor  # T_eff is T, whatever came before
            for i in range(protected):
                self.check_slot(row[i], tokens[: i + 1])
            own = {
                tuple(kv_of(tokens[: i + 1])[0, layer, head].tolist()): i
                for i in range(protected, len(tokens))
                for layer in range(LAYERS)
                for head in range(HEADS)
            }
            for layer, head in itertools.product(range(LAYERS), range(HEADS)):
                held = [own[tuple(self.kv.k_buffer[layer][slot, head].tolist())] for slot in row[protected:]]
                assert len(set(held)) == len(held)
                recent = min(CONFIG.buffer, len(held))
                assert held[len(held) - recent :] == list(range(len(tokens) - recent, len(tokens)))

    def check_pool(self) -> None:
        """Every slot is free, the tree's, or exactly one request's."""
        private = 0
        for req in self.running:
            private += -(-req.kv.kv_allocated_len // self.page) * self.page - req.kv.cache_protected_len
        owned = self.tree.evictable_size() + self.tree.protected_size()
        assert self.allocator.available_size() + owned + private == POOL

    def check(self) -> None:
        self.check_tree()
        self.check_rows()
        self.check_pool()


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts that share prefixes often: a choice of stems with short tails."""
    stems = st.sampled_from([(1,) * 9, tuple(range(1, 20)), tuple(range(1, 12)) + (50,) * 20, ()])
    tails = st.lists(st.integers(60, 62), min_size=1, max_size=6).map(tuple)
    return st.builds(lambda stem, tail: stem + tail, stems, tails)


def operations() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    return st.lists(
        st.one_of(
            st.tuples(st.just("start"), prompts()),
            st.tuples(st.just("decode"), st.integers(1, 14)),
            st.tuples(st.sampled_from(["finish", "abort", "retract"]), st.integers(0, 7)),
        ),
        min_size=4,
        max_size=14,
    )


@pytest.fixture
def _no_runtime() -> Iterator[None]:
    yield
    current.attached = None


def play(page: int, mode: str, script: list[tuple[Any, ...]]) -> World:
    world = World(page, mode)
    for action, argument in script:
        if action == "start":
            if len(world.running) < ROWS - 1:
                world.start(argument)
        elif world.running and action == "decode":
            if all(len(world.logical(req)) + argument < CONTEXT // 2 for req in world.running):
                world.decode(argument)
        elif world.running:
            world.end(argument, action)
        world.check()
    while world.running:
        world.end(0, "finish")
    world.check()
    return world


@pytest.mark.usefixtures("_no_runtime")
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@given(script=operations())
@settings(max_examples=350, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_tree_holds_only_what_a_fresh_prefill_would_write(
    page: int, mode: str, script: list[tuple[Any, ...]]
) -> None:
    play(page, mode, script)


@pytest.mark.usefixtures("_no_runtime")
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_the_scripts_evict_and_hit(page: int, mode: str) -> None:
    """The property would hold idly without evictions and hits: this script has both."""
    stem = tuple(range(1, 20))
    world = play(
        page,
        mode,
        [
            ("start", (*stem, 60)),
            ("start", (*stem, 61)),
            ("decode", 40),
            ("start", (*stem, 60, 62)),
            ("decode", 30),
            ("retract", 1),
            ("decode", 20),
            ("finish", 0),
            ("start", (*stem, 61, 61)),
            ("abort", 0),
        ],
    )
    assert world.evictions >= 4
    assert world.hits >= 3 * (MODES[mode].shared(len(stem)) // page * page)
