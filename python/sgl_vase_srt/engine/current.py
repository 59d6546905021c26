"""What this process serves with. The only state of the package that is global; each part is set once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vase import EvictionConfig

if TYPE_CHECKING:
    from sgl_vase_srt.engine.counters import Counters
    from sgl_vase_srt.engine.runtime import Runtime

config: EvictionConfig | None = None
"""Set where the server args arrive, before SGLang loads its plugins; ``None``: eviction is off."""
counters: Counters | None = None
"""Set when SGLang creates its own metrics, if it does."""
_runtime: Runtime | None = None


def serve_with(chosen: EvictionConfig) -> None:
    """Make ``chosen`` the configuration of this process."""
    global config
    config = chosen


def settings() -> EvictionConfig:
    """The configuration of a process in which eviction is known to be on."""
    assert config is not None
    return config


def count_in(created: Counters) -> None:
    """Make ``created`` the counters of the runtime to come."""
    global counters
    counters = created


def attach(built: Runtime) -> None:
    """Make ``built`` the runtime of this scheduler process."""
    global _runtime
    _runtime = built


def runtime() -> Runtime:
    """The runtime of this scheduler process: there is one once the model worker has its pools."""
    assert _runtime is not None
    return _runtime
