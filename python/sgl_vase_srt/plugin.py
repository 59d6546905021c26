"""Entry point of the plugin: the flags always, everything else only when eviction is on."""

from __future__ import annotations


def activate() -> None:
    """Called by SGLang's ``load_plugins`` in every process, before it applies the registered hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sgl_vase_srt import hooks, server_args

    HookRegistry.register("sglang.srt.server_args.ServerArgs", server_args.VaseServerArgs, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.entrypoints.engine.Engine.server_args_class", server_args.VaseServerArgs, HookType.REPLACE
    )
    if server_args.active is not None:
        hooks.register_for_this_process()
