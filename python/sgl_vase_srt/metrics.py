"""How users see that eviction runs: answers, usage, log line, counters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from sgl_vase_srt import scheduler

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

KEY = "eviction"


# ----------------------------------------------------------------- scheduler


@cache
def _streamer(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    class EvictionOutputStreamer(base):  # type: ignore[misc, valid-type]
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            runtime = scheduler.runtime()
            records = []
            for req in reqs:
                state = scheduler.state_of(req)
                physical = req.kv.kv_committed_len if state.kv_tokens is None else state.kv_tokens
                records.append([runtime.record(state, physical)])
            return {**super().build_additional_customized_info(reqs), KEY: records}

    return EvictionOutputStreamer


def output_streamer_class(base: type[SchedulerOutputStreamer], *_: Any) -> type[SchedulerOutputStreamer]:
    return _streamer(base)


def decode_log_parts(parts: list[str], *_: Any) -> list[str]:
    totals = scheduler.runtime().totals
    return [*parts, f"#evictions: {totals.evictions}, #evicted-token: {totals.evicted_tokens}"]


class Counters:
    """Prometheus counters of one scheduler process."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter

        def counter(name: str, text: str) -> Any:
            return Counter(f"sgl_vase:{name}", text, labelnames=labels.keys()).labels(**labels)

        self._rounds = counter("eviction_rounds", "Rows cut: eviction rounds, counted a request.")
        self._requests = counter("evicted_requests", "Requests cut at least once; again after a retraction.")
        self._tokens = counter("evicted_tokens", "KV tokens evicted.")
        self._seconds = counter("eviction_seconds", "Seconds spent scoring, choosing, moving; on a GPU: enqueueing it.")
        self._search = counter("planning_seconds", "Seconds spent looking for due rows, before each decode step.")

    def planned(self, tokens: int, first: bool) -> None:
        """One row was cut by ``tokens`` entries, for the ``first`` time or again."""
        self._rounds.inc()
        self._requests.inc(first)
        self._tokens.inc(tokens)

    def searched(self, seconds: float) -> None:
        """The rows of a decode batch were looked through, and those that were due planned."""
        self._search.inc(seconds)

    def executed(self, seconds: float) -> None:
        """All cuts of a step were moved (on a GPU: enqueued)."""
        self._seconds.inc(seconds)


_counters: Counters | None = None


def create_counters(_: None, collector: Any, labels: dict[str, str], *args: Any, **kwargs: Any) -> None:
    global _counters
    _counters = Counters(labels)


def counters() -> Counters | None:
    """The counters, if metrics are on in this process."""
    return _counters


# ------------------------------------------------------------------ frontend


def fold_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """One record an answer; SGLang would append one a step."""
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, rest, index, finish_reason)
    if KEY in customized_info:
        meta_info[KEY] = customized_info[KEY][index][0]


_answered: ContextVar[dict[int, dict[str, Any]] | None] = ContextVar("_answered", default=None)
"""Latest eviction record of each choice of the request that this task answers."""


async def remember_eviction(
    original: Callable[..., AsyncIterator[Any]], *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    seen: dict[int, dict[str, Any]] = {}
    _answered.set(seen)
    async for out in original(*args, **kwargs):
        for i, answer in enumerate(out if isinstance(out, list) else [out]):
            if KEY in answer.get("meta_info", {}):
                seen[answer.get("index", i)] = answer["meta_info"][KEY]
        yield out


def add_to_usage(usage: Any, *_: Any, **__: Any) -> Any:
    """Add the record to the OpenAI usage block, summed over its choices."""
    if seen := _answered.get():
        records = list(seen.values())
        usage.eviction = {
            **records[0],
            **{key: sum(r[key] for r in records) for key in ("evictions", "evicted_tokens", "kv_tokens")},
        }
    return usage


def extend_usage_model() -> None:
    """Let SGLang's usage model, and every response that embeds it, carry an ``eviction`` object."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    protocol.UsageInfo.model_config["extra"] = "allow"
    protocol.UsageInfo.model_rebuild(force=True)
    for model in vars(protocol).values():
        if isinstance(model, type) and issubclass(model, BaseModel) and "usage" in model.model_fields:
            model.model_rebuild(force=True)
