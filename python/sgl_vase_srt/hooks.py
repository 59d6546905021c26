"""THE table: every SGLang target that eviction touches, how, and why. Verified where it matters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_vase import policy_class
from sgl_vase_srt import admission, forward, metrics, prefix, requests, scheduler, server_args

SGLANG_VERSION = "0.5.23"
"""The one version whose internals were read: the hooks below name its functions."""


@dataclass(frozen=True)
class Hook:
    target: str
    kind: HookType
    call: Callable[..., Any]
    why: str


_SRT = "sglang.srt."

SCHEDULER = (
    Hook(
        f"{_SRT}managers.tp_worker.TpModelWorker.alloc_memory_pool",
        HookType.AFTER,
        scheduler.attach,
        "the pools exist and no graph is captured yet: build the runtime and the query ring",
    ),
    Hook(
        f"{_SRT}managers.schedule_batch.ScheduleBatch.check_decode_mem",
        HookType.BEFORE,
        scheduler.plan,
        "runs once a decode or mixed step, before memory pressure retracts anybody: plan rounds, free tails",
    ),
    Hook(
        f"{_SRT}managers.tp_worker.TpModelWorker.forward_batch_generation",
        HookType.BEFORE,
        scheduler.execute,
        "on the forward stream, between the forward that wrote the last KV and the one that reads it: move KV",
    ),
    Hook(
        f"{_SRT}model_executor.forward_batch_info.ForwardBatch.init_new",
        HookType.AFTER,
        forward.prepare,
        "decode positions are logical, and the queries to capture are known on the host",
    ),
    Hook(
        f"{_SRT}model_executor.model_runner.ModelRunner.sample",
        HookType.AROUND,
        forward.sample_at_logical_length,
        "mixed steps seed the sampler with the physical length, which repeats",
    ),
    Hook(
        f"{_SRT}mem_cache.common.release_kv_cache",
        HookType.AROUND,
        prefix.release,
        "an evicted row is not the request's tokens any more: it must not enter the radix tree",
    ),
    Hook(
        f"{_SRT}mem_cache.common.checkpoint_kv_cache",
        HookType.AROUND,
        prefix.checkpoint,
        "a retracted request comes back with its outputs as prompt: the tree gets the prompt only",
    ),
    Hook(
        f"{_SRT}managers.schedule_batch.Req.reset_for_retract",
        HookType.AFTER,
        scheduler.forget,
        "the row is gone: counters, randomness and the window start over",
    ),
    Hook(
        f"{_SRT}managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        HookType.AFTER,
        scheduler.retraction_order,
        "a request longer than the pool cannot be prefilled again: retract it last",
    ),
    Hook(
        f"{_SRT}managers.scheduler.Scheduler._add_request_to_queue",
        HookType.AROUND,
        scheduler.requeue,
        "and if it must be, it ends with an error instead of blocking the queue",
    ),
    Hook(
        f"{_SRT}model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        HookType.AFTER,
        admission.cell_size,
        "what a policy keeps beside each token and each request",
    ),
    Hook(
        f"{_SRT}model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes",
        HookType.AROUND,
        admission.pool_sizes,
        "is paid from --mem-fraction-static, before the pool is sized",
    ),
    Hook(
        f"{_SRT}managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
        HookType.AFTER,
        admission.running_offset,
        "a running row grows to its footprint at most",
    ),
    Hook(
        f"{_SRT}managers.schedule_policy.PrefillAdder.add_one_req",
        HookType.AROUND,
        admission.add_request,
        "so does a new one",
    ),
    Hook(
        f"{_SRT}managers.schedule_policy.PrefillAdder.add_chunked_req",
        HookType.AROUND,
        admission.add_request,
        "and one whose prompt arrives in chunks, when its last chunk is budgeted",
    ),
    Hook(
        f"{_SRT}managers.tp_worker.TpModelWorker.get_worker_info",
        HookType.AFTER,
        admission.worker_info,
        "a request may outgrow the pool: its row does not",
    ),
    Hook(
        f"{_SRT}managers.scheduler.Scheduler.init_req_max_new_tokens",
        HookType.AROUND,
        admission.arrive,
        "a request may have a budget of its own, or none",
    ),
    Hook(
        f"{_SRT}mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        HookType.AFTER,
        admission.output_limit,
        "the same bound, applied when a request arrives",
    ),
    Hook(
        f"{_SRT}managers.scheduler.Scheduler.get_init_info",
        HookType.AFTER,
        scheduler.report_ready,
        "the launcher refuses to serve unless each scheduler says that its hooks are in place",
    ),
    Hook(
        f"{_SRT}managers.scheduler.Scheduler.get_output_streamer_class",
        HookType.AFTER,
        metrics.output_streamer_class,
        "each answer carries what was evicted",
    ),
    Hook(
        f"{_SRT}managers.scheduler_components.pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
        HookType.AFTER,
        metrics.decode_log_parts,
        "the decode log line shows evictions",
    ),
    Hook(
        f"{_SRT}observability.metrics_collector.SchedulerMetricsCollector.__init__",
        HookType.AFTER,
        metrics.create_counters,
        "Prometheus counters live in the collector's multiprocess registry",
    ),
)

QUERIES = (
    Hook(
        f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.forward",
        HookType.BEFORE,
        forward.capture_queries,
        "the post-RoPE queries that the policy scores with (only for policies that ask for them)",
    ),
)

CONTROLLER = (
    Hook(
        f"{_SRT}managers.data_parallel_controller.DataParallelController.get_init_info",
        HookType.AFTER,
        scheduler.forward_ready,
        "the launcher sees the controller's word only",
    ),
)

FRONTEND = (
    Hook(
        f"{_SRT}entrypoints.engine._wait_for_scheduler_ready",
        HookType.AFTER,
        scheduler.require_ready,
        "the other half of get_init_info",
    ),
    Hook(
        f"{_SRT}managers.tokenizer_manager.TokenizerManager._validate_one_request",
        HookType.BEFORE,
        requests.check,
        "a request that cannot be served, or asks for an eviction that cannot be had, gets HTTP 400",
    ),
    Hook(
        f"{_SRT}managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        HookType.AROUND,
        metrics.fold_meta_info,
        "one eviction record an answer, not one a token",
    ),
    Hook(
        f"{_SRT}managers.tokenizer_manager.TokenizerManager.generate_request",
        HookType.AROUND,
        metrics.remember_eviction,
        "the usage block is computed where the answer's meta_info is out of reach",
    ),
    Hook(
        f"{_SRT}entrypoints.openai.usage_processor.UsageProcessor.calculate_token_usage",
        HookType.AFTER,
        metrics.add_to_usage,
        "the OpenAI usage block carries the eviction record",
    ),
)


def check_sglang_version() -> None:
    """Raise ``ValueError`` unless the pinned SGLang is installed."""
    if (found := version("sglang")) != SGLANG_VERSION:
        raise ValueError(
            f"--eviction needs sglang=={SGLANG_VERSION} (its internals are hooked), found {found}: "
            f"pip install sglang=={SGLANG_VERSION}"
        )


def _install(hooks: tuple[Hook, ...]) -> None:
    for hook in hooks:
        HookRegistry.register(hook.target, hook.call, hook.kind)


def _scheduler_hooks() -> tuple[Hook, ...]:
    assert server_args.active is not None
    return SCHEDULER + (QUERIES if policy_class(server_args.active.policy).needs_queries else ())


def register_for_this_process() -> None:
    """Register for the process that SGLang is about to run: a scheduler, or one that talks to clients."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        _install(_scheduler_hooks())
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        _install(CONTROLLER)
    if "sglang.srt.managers.tokenizer_manager" in sys.modules:
        install_frontend()


_frontend_installed = False


def install_frontend() -> None:
    """Hook the launcher and the tokenizer side of this process, once; look at the hooks each time."""
    global _frontend_installed
    if not _frontend_installed:
        _frontend_installed = True
        metrics.extend_usage_model()
        _install(FRONTEND)
        HookRegistry.apply_hooks()
    verify(FRONTEND)


def _is_ours(live: Any, hook: Callable[..., Any]) -> bool:
    live = getattr(live, "__func__", live)
    while live is not None:
        cells = getattr(live, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        live = getattr(live, "__wrapped__", None)
    return False


def verify(hooks: tuple[Hook, ...] | None = None) -> None:
    """Raise ``ValueError`` unless every hook is on its live target and no module kept the bare function.

    SGLang's loader swallows plugin errors, so this is looked up, not believed.
    """
    for hook in _scheduler_hooks() if hooks is None else hooks:
        owner_path, name = hook.target.rsplit(".", 1)
        owner = resolve_name(owner_path)
        live = getattr(owner, name)
        if not _is_ours(live, hook.call):
            raise ValueError(f"--eviction cannot serve: the hook on {hook.target} is not in place ({hook.why})")
        if isinstance(owner, type):
            continue
        bare = live
        while (inner := getattr(bare, "__wrapped__", None)) is not None:
            bare = inner
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and any(
                value is bare for value in list(vars(module).values())
            ):
                raise ValueError(f"--eviction cannot serve: {module.__name__} still calls the bare {hook.target}")
