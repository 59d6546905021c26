"""The launcher serves only when every scheduler process has said that its hooks are in place."""

from __future__ import annotations

from typing import Any

from sgl_vase_srt.engine import current

READY = "eviction_ready"


def report(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Tell the launcher that this scheduler evicts: its hooks were verified when the pools were built."""
    return {**info, READY: current.runtime().config.policy}


def hand_on(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Hand on what the replicas of a data-parallel controller said, which is all that the launcher sees."""
    said = [replica.get(READY) for replica in controller._scheduler_init_infos]
    return {**info, READY: said[0] if all(said) else None}


def require(infos: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
    """Refuse to serve unless every scheduler process said that its hooks are in place."""
    if current.config is not None and any(info.get(READY) is None for info in infos):
        raise RuntimeError(
            f"--eviction {current.config.policy} cannot serve: a scheduler process runs without the sgl_vase "
            "plugin (is SGLANG_PLUGINS set without sgl_vase, or did the plugin fail to load there? see its log above)"
        )
