"""Prometheus counters of one scheduler process."""

from __future__ import annotations

from typing import Any


class Counters:
    """One child of each counter, for the ``labels`` that SGLang gives its own metrics."""

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang sets the folder of the multiprocess registry before prometheus_client is first imported.
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
