"""What a scheduler says about eviction: with each answer, in its log, in its metrics."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sgl_vase_srt.engine import current
from sgl_vase_srt.engine.counters import Counters

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

KEY = "eviction"
"""Name of the record in an answer's ``meta_info`` and in the usage block."""


@cache
def output_streamer_class(base: type[SchedulerOutputStreamer], *_: Any) -> type[SchedulerOutputStreamer]:
    """Each answer carries what was evicted."""

    class EvictionOutputStreamer(base):
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            records = [[current.runtime().record(req)] for req in reqs]
            return {**super().build_additional_customized_info(reqs), KEY: records}

    return EvictionOutputStreamer


def decode_log_parts(parts: list[str], *_: Any) -> list[str]:
    """The decode log line shows evictions."""
    runtime = current.runtime()
    return [*parts, f"#evictions: {runtime.evictions}, #evicted-token: {runtime.evicted_tokens}"]


def create_counters(_: None, collector: Any, labels: dict[str, str], *args: Any, **kwargs: Any) -> None:
    """Prometheus counters live in the collector's multiprocess registry."""
    current.counters = Counters(labels)
