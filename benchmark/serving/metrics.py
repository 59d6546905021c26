"""What a server counts, from its ``/metrics`` page."""

import re

from benchmark.serving.server import Server


def total(text: str, name: str) -> float | None:
    """A metric of a Prometheus page summed over its labels, ``None`` if it is not there."""
    values = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.M)
    return sum(map(float, values)) if values else None


COUNTERS = {
    "evictions": "sgl_vase:eviction_rounds",
    "evicted_tokens": "sgl_vase:evicted_tokens",
    "evicted_requests": "sgl_vase:evicted_requests",
    "eviction_seconds": "sgl_vase:eviction_seconds",
    "planning_seconds": "sgl_vase:planning_seconds",
    "retractions": "sglang:num_retracted_requests",
    "cached_tokens": "sglang:cached_tokens",
    "prompt_tokens": "sglang:prompt_tokens",
}


def counters(server: Server) -> dict[str, float]:
    text = server.metrics()
    return {key: total(text, name) or 0.0 for key, name in COUNTERS.items()}
