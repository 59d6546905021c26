"""THE table: every function of SGLang that eviction touches, how, and by which hook. Verified, not believed.

``python -m sgl_vase_srt.install --drift`` says which of them differ in another SGLang.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from sgl_vase import policy_class
from sgl_vase_srt import compat, drift
from sgl_vase_srt.engine import build, current
from sgl_vase_srt.hooks import admission, batch, forward, frontend, output, prefix, ready, sizing

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.23"
"""The one version whose internals were read: the hooks below name its functions."""

BEFORE, AFTER, AROUND = "before", "after", "around"


@dataclass(frozen=True)
class Hook:
    path: str
    """Below ``sglang.srt``."""
    kind: str
    """SGLang's ``HookType``."""
    call: Callable[..., Any]

    @property
    def target(self) -> str:
        return f"sglang.srt.{self.path}"


def attach(_: None, worker: TpModelWorker, *args: Any, **kwargs: Any) -> None:
    """Build the runtime: the pools exist and no graph is captured yet. Ends the process if it cannot evict."""
    runner = worker.model_runner
    try:
        verify(_scheduler_hooks())
        compat.check_model(runner.model_config)
        current.attached = build.build(runner, current.settings(), current.counters)
    except ValueError as error:
        logger.error("error: %s", error)
        raise SystemExit(1) from None


SCHEDULER = (
    Hook("managers.tp_worker.TpModelWorker.alloc_memory_pool", AFTER, attach),
    Hook("managers.schedule_batch.ScheduleBatch.check_decode_mem", BEFORE, batch.plan),
    Hook("managers.tp_worker.TpModelWorker.forward_batch_generation", BEFORE, batch.execute),
    Hook("managers.schedule_batch.Req.reset_for_retract", AFTER, batch.forget),
    Hook("managers.schedule_batch.ScheduleBatch._get_decode_retraction_order", AFTER, batch.retraction_order),
    Hook("managers.scheduler.Scheduler._add_request_to_queue", AROUND, batch.requeue),
    Hook("model_executor.forward_batch_info.ForwardBatch.init_new", AFTER, forward.prepare),
    Hook("model_executor.model_runner.ModelRunner.sample", AROUND, forward.sample_at_logical_length),
    Hook("mem_cache.common.release_kv_cache", AROUND, prefix.release),
    Hook("mem_cache.common.checkpoint_kv_cache", AROUND, prefix.checkpoint),
    Hook("model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size", AFTER, sizing.cell_size),
    Hook("model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes", AROUND, sizing.pool_sizes),
    Hook("managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset", AFTER, admission.growth),
    Hook("managers.schedule_policy.PrefillAdder.add_one_req", AROUND, admission.add_request),
    Hook("managers.schedule_policy.PrefillAdder.add_chunked_req", AROUND, admission.add_request),
    Hook("managers.tp_worker.TpModelWorker.get_worker_info", AFTER, admission.worker_info),
    Hook("managers.scheduler.Scheduler.init_req_max_new_tokens", AROUND, admission.arrive),
    Hook("managers.scheduler.Scheduler.get_init_info", AFTER, ready.report),
    Hook("managers.scheduler.Scheduler.get_output_streamer_class", AFTER, output.output_streamer_class),
    Hook(
        "managers.scheduler_components.pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
        AFTER,
        output.decode_log_parts,
    ),
    Hook("observability.metrics_collector.SchedulerMetricsCollector.__init__", AFTER, output.create_counters),
)
QUERIES = (Hook("layers.attention.base_attn_backend.AttentionBackend.forward", BEFORE, forward.capture_queries),)
"""Only for policies that score with queries."""
CONTROLLER = (Hook("managers.data_parallel_controller.DataParallelController.get_init_info", AFTER, ready.hand_on),)
FRONTEND = (
    Hook("entrypoints.engine._wait_for_scheduler_ready", AFTER, ready.require),
    Hook("managers.tokenizer_manager.TokenizerManager._validate_one_request", BEFORE, frontend.check),
    Hook("managers.tokenizer_manager.TokenizerManager.update_request_meta_info", AROUND, frontend.fold_meta_info),
    Hook("managers.tokenizer_manager.TokenizerManager.generate_request", AROUND, frontend.remember_eviction),
    Hook("entrypoints.openai.usage_processor.UsageProcessor.calculate_token_usage", AFTER, frontend.add_to_usage),
)


SERVER_ARGS = ("sglang.srt.server_args.ServerArgs", "sglang.srt.entrypoints.engine.Engine.server_args_class")
"""Replaced by the class with the eviction flags."""


def targets() -> list[str]:
    """Dotted names of everything that is hooked or replaced."""
    return [hook.target for hook in (*SCHEDULER, *QUERIES, *CONTROLLER, *FRONTEND)] + [*SERVER_ARGS]


def check_sglang_version() -> None:
    """Raise ``ValueError`` unless the pinned SGLang is installed."""
    if (found := version("sglang")) != SGLANG_VERSION:
        raise ValueError(
            f"--eviction needs sglang=={SGLANG_VERSION} (its internals are hooked), found {found}: "
            f"pip install sglang=={SGLANG_VERSION}"
        )


def _install(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.call, HookType(hook.kind))


def _scheduler_hooks() -> tuple[Hook, ...]:
    return SCHEDULER + (QUERIES if policy_class(current.settings().policy).needs_queries else ())


def register_for_this_process() -> None:
    """Register for the process that SGLang is about to run: a scheduler, or one that talks to clients."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        _install(_scheduler_hooks())
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        _install(CONTROLLER)
    if "sglang.srt.managers.tokenizer_manager" in sys.modules:
        install_frontend()


def install_frontend() -> None:
    """Hook the launcher and the tokenizer side of this process, once; look at the hooks each time."""
    _hook_frontend()
    verify(FRONTEND)


@cache
def _hook_frontend() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    frontend.extend_usage_model()
    _install(FRONTEND)
    HookRegistry.apply_hooks()


def _is_ours(live: Any, hook: Callable[..., Any]) -> bool:
    live = getattr(live, "__func__", live)
    while live is not None:
        cells = getattr(live, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        live = getattr(live, "__wrapped__", None)
    return False


def verify(hooks: tuple[Hook, ...]) -> None:
    """Raise ``ValueError`` unless every hook is on its live target and no module kept the bare function.

    SGLang's loader swallows plugin errors, so this is looked up, not believed.
    """
    for hook in hooks:
        owner_path, name = hook.target.rsplit(".", 1)
        owner = resolve_name(owner_path)
        live = getattr(owner, name)
        if not _is_ours(live, hook.call):
            why = (hook.call.__doc__ or "").partition("\n")[0]
            raise ValueError(f"--eviction cannot serve: the hook on {hook.target} is not in place ({why})")
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


if __name__ == "__main__":
    sys.exit(drift.main(targets(), sys.argv[1:], SGLANG_VERSION))
