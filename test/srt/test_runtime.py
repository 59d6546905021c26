"""Planning and requeueing without a server: what depends on numbers only."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sgl_vase_kernels import KVPool
from sgl_vase_srt.engine import current, rounds
from sgl_vase_srt.engine.ring import QueryRing
from sgl_vase_srt.engine.rounds import Rounds
from sgl_vase_srt.engine.runtime import Runtime
from sgl_vase_srt.hooks import admission, sizing
from sgl_vase_srt.hooks import batch as batches

from sgl_vase import EvictionConfig, policy_class, policy_names

CONFIG = EvictionConfig(policy="random", budget=12, buffer=4, min_private=8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Rows of 16 slots, the first two of which are the tree's, in a pool that remembers where KV came from."""
    slots = torch.arange(64 * 16, dtype=torch.float32).reshape(-1, 1, 1)
    pool = KVPool.from_slots([slots.clone()], [slots.clone()])
    rows = torch.arange(64 * 16, dtype=torch.int32).reshape(64, 16)
    built = Runtime(CONFIG, Rounds(policy_class(CONFIG.policy)(), pool, CONFIG.buffer), rows, 1, 64 * 16)
    monkeypatch.setattr(current, "attached", built)
    return built


def request(rid: str, row: int = 0, length: int = 0, prompt: int = 2) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(rid, "", array("q", range(prompt)), SamplingParams(max_new_tokens=100, temperature=1.0))
    req.kv.req_pool_idx = row
    req.kv.kv_allocated_len = req.kv.kv_committed_len = length
    req.kv.cache_protected_len = 2
    req.decode_batch_idx = 5
    return req


@pytest.mark.parametrize("workspace", [rounds.WORKSPACE, 16 * 50], ids=["one launch", "three rows a launch"])
def test_sixty_four_rows_due_at_the_same_step(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, workspace: int
) -> None:
    """All are cut at once, each to its own survivors; nobody's length or position goes below what it holds."""
    monkeypatch.setattr(rounds, "WORKSPACE", workspace)
    reqs = [request(f"r{i}", i, 16) for i in range(64)]
    freed: list[tuple[int, int]] = []
    tree = SimpleNamespace(free_kv_row=lambda kv, spans: freed.extend((kv.req_pool_idx, *span) for span in spans))
    lens = torch.full((64,), 16)
    batch: Any = SimpleNamespace(
        reqs=reqs, seq_lens=lens, seq_lens_cpu=lens.clone(), seq_lens_sum=None, tree_cache=tree
    )
    runtime.plan(batch)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [12] * 64
    assert freed == [(i, 12, 16) for i in range(64)]
    assert [runtime.logical_length(req) for req in reqs] == [16] * 64
    runtime.execute()
    chosen = set()
    for i in range(64):
        held = (runtime.rounds.pool.k[0][16 * i : 16 * i + 12].flatten() - 16 * i).tolist()
        assert held[:2] == [0, 1] and held[8:] == [12, 13, 14, 15]
        assert len({*held}) == 12 and all(0 <= slot < 16 for slot in held)
        chosen.add(tuple(held))
    assert len(chosen) > 32, "the draws are each request's own"


@pytest.mark.parametrize("name", policy_names())
def test_warming_up_leaves_nothing_behind(name: str) -> None:
    """Every policy takes the synthetic rows, and what an earlier round would leave is not there."""
    config = EvictionConfig(policy=name, budget=300, buffer=16)
    policy = policy_class(name)()
    buffers = [torch.zeros(6000, 2, 16) for _ in range(4)]
    pool = KVPool.from_slots(buffers[:2], buffers[2:])
    ring = QueryRing(
        **{"layers": 2, "slots": 3, "window": 16, "q_heads": 4, "dim": 16, "rows": 4, "dtype": torch.float32},
        device=pool.device,
    )
    state = torch.zeros(2, 2, 6000) if policy.needs_state else None
    used = ring if policy.needs_queries else None
    warmed = Rounds(policy, pool, config.buffer, 0.25, used, state)
    chosen: list[torch.Tensor] = []
    select = policy.select
    policy.select = lambda round: chosen.append(select(round)) or chosen[-1]  # type: ignore[method-assign]
    warmed.warm_up(config, 1, 6000)
    assert [kept.shape for kept in chosen] == [(2, 2, (n - 16 + 1) // 2) for n in (316, 256, rounds.LONG_ROW)]
    assert state is None or not state.any()
    assert not any(buffer.any() for buffer in buffers)


@pytest.mark.parametrize("announced", [True, False], ids=["decode", "pause"])
@pytest.mark.parametrize(("outputs", "returns"), [(0, True), (1000, True), (1021, False)])
def test_who_cannot_come_back_ends_with_an_error(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, announced: bool, outputs: int, returns: bool
) -> None:
    """Retracted by a full pool or by /pause_generation, which does not say so."""
    from sglang.srt.managers import scheduler as sglang_scheduler

    monkeypatch.setattr(sglang_scheduler, "_make_abort_req", lambda req, finished_reason: finished_reason)
    req = request("r")
    req.output_ids.extend(range(outputs))
    req.is_retracted = True
    queued: list[Any] = []
    ended: list[Any] = []
    host: Any = SimpleNamespace(send_abort_output=lambda reason, req: ended.append(reason))
    batches.requeue(lambda _, req, is_retracted: queued.append(req), host, req, is_retracted=announced)
    assert bool(queued) == returns and bool(ended) != returns
    if ended:
        assert ended[0]["status_code"] == 503 and "--max-total-tokens" in ended[0]["message"]


def test_a_new_request_is_not_a_retracted_one(runtime: Runtime) -> None:
    """Its prompt may not fit either: that is for SGLang to say."""
    queued: list[Any] = []
    batches.requeue(lambda _, req, is_retracted: queued.append(req), SimpleNamespace(), request("r", prompt=2000))  # type: ignore[arg-type]
    assert queued


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (None, 5000),
        ({"eviction": {"budget": 900}}, 5000),
        ({"eviction": {"budget": 2000}}, 7),
        ({"eviction": "none"}, 7),
    ],
    ids=["the server's budget", "its own", "its own, larger than the pool", "none"],
)
def test_an_answer_may_outgrow_the_pool_only_if_its_row_does_not(
    runtime: Runtime, asked: dict[str, Any] | None, limit: int
) -> None:
    """7 is what SGLang allows in this pool of 1,024."""
    req = request("r")
    req.sampling_params.custom_params = asked
    req.sampling_params.max_new_tokens = 5000
    host = SimpleNamespace(max_total_num_tokens=runtime.capacity, page_size=1)
    found: list[int] = []

    def set_limit(host: Any, req: Any) -> None:
        found.append(min(req.sampling_params.max_new_tokens, max(7, host.max_total_num_tokens - 10**6)))

    admission.arrive(set_limit, host, req)  # type: ignore[arg-type]
    assert host.max_total_num_tokens == runtime.capacity
    assert found == [limit]


@pytest.mark.parametrize(("steps", "protected", "room"), [(0, 0, 12), (0, 10, 12), (1, 10, 12), (1, 0, 6)])
def test_a_fresh_row_is_budgeted_with_the_prompt_that_the_tree_will_own(
    runtime: Runtime, steps: int, protected: int, room: int
) -> None:
    """Ten tokens: up to 22 if they are the tree's, which it is not told before the first decode step; else up to 16."""
    req = request("r", length=10, prompt=10)
    req.decode_batch_idx, req.kv.cache_protected_len = steps, protected
    assert admission.headroom(req, SimpleNamespace(disable=False)) == room


@pytest.mark.parametrize("most", [None, 4, 40, 10**6])
def test_pool_and_side_state_fit_the_budget_together(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    from sglang.srt import runtime_context

    cell, each, available = 100, 5000, 10**6
    monkeypatch.setattr(current, "config", CONFIG)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: SimpleNamespace(max_running_requests=most))
    configurator = SimpleNamespace(_cell_size=cell, eviction_bytes_per_request=each)
    tokens = sizing.pool_sizes(lambda c, budget, page: budget // c._cell_size, configurator, available, 1)
    slots = min(most or 10**9, tokens // CONFIG.private_floor + 1) + 1
    assert tokens * cell + slots * each <= available
    share = (available - 2 * each) // (cell + each // CONFIG.private_floor)
    assert tokens >= share and (tokens > share) == (most in (4, 40)), "no smaller than if each token paid its share"
