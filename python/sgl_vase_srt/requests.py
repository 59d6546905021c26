"""What a request may ask of eviction: ``sampling_params.custom_params["eviction"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_vase import EvictionConfig
from sgl_vase_srt import compat


def asked(config: EvictionConfig, custom_params: Mapping[str, Any] | None) -> EvictionConfig | None:
    """The configuration of one request, ``None`` if it is never evicted. Raises ``ValueError`` with the range."""
    if custom_params is None or "eviction" not in custom_params:
        return config
    return config.for_request(custom_params["eviction"])


def check(_: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Raise ``ValueError``, which SGLang answers with HTTP 400, for a request that cannot be served."""
    from sgl_vase_srt import server_args

    assert server_args.active is not None
    compat.check_request(obj)
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, Mapping):
        asked(server_args.active, params.get("custom_params"))
