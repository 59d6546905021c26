"""What one request may ask of eviction: ``sampling_params.custom_params["eviction"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_vase import EvictionConfig


def asked(config: EvictionConfig, custom_params: Mapping[str, Any] | None) -> EvictionConfig | None:
    """The configuration of one request, ``None`` if it is never evicted. Raises ``ValueError`` with the range."""
    if custom_params is None or "eviction" not in custom_params:
        return config
    return config.for_request(custom_params["eviction"])
