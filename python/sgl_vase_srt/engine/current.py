"""What this process serves with. The only state of the package that is global; each part is assigned once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vase import EvictionConfig

if TYPE_CHECKING:
    from sgl_vase_srt.engine.counters import Counters
    from sgl_vase_srt.engine.runtime import Runtime

config: EvictionConfig | None = None
"""From the server args, before SGLang loads its plugins; ``None``: eviction is off."""
counters: Counters | None = None
"""From SGLang's metrics collector, if this scheduler has one."""
attached: Runtime | None = None
"""From the model worker of this scheduler, once it has its pools."""


def settings() -> EvictionConfig:
    """The configuration of a process in which eviction is known to be on."""
    assert config is not None
    return config


def runtime() -> Runtime:
    """The runtime of this scheduler, for hooks that are called once it is attached."""
    assert attached is not None
    return attached
