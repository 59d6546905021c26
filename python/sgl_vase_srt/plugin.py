"""Entry point of the plugin: the flags always, everything else only when eviction is on."""

from __future__ import annotations


def activate() -> None:
    """Called by SGLang's ``load_plugins`` in every process, before it applies the registered hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sgl_vase_srt import install
    from sgl_vase_srt.engine import current
    from sgl_vase_srt.flags import VaseServerArgs

    for target in install.SERVER_ARGS:
        HookRegistry.register(target, VaseServerArgs, HookType.REPLACE)
    if current.config is not None:
        install.register_for_this_process()
