"""A thin HTTP client of a server under test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from benchmark.serving.metrics import total

GREEDY = {"temperature": 0, "ignore_eos": True}
"""No penalties: with the overlap schedule theirs depend on when a request arrives, in stock SGLang too."""


def post(url: str, path: str, **body: Any) -> requests.Response:
    return requests.post(url + path, json=body, timeout=3600)


def generate(url: str, prompt: str | list[int], new_tokens: int, **extra: Any) -> dict[str, Any]:
    """One native ``/generate`` answer; ``sampling`` overrides sampling parameters, the rest joins the request."""
    sampling = {**GREEDY, "max_new_tokens": new_tokens, **extra.pop("sampling", {})}
    key = "text" if isinstance(prompt, str) else "input_ids"
    response = post(url, "/generate", **{key: prompt, "sampling_params": sampling, **extra})
    response.raise_for_status()
    return response.json()


def generate_all(
    url: str, prompts: list[Any], new_tokens: int, rids: list[str] | None = None, **extra: Any
) -> list[dict[str, Any]]:
    """All prompts at once, each a request of its own."""
    named = [{} if rids is None else {"rid": rid} for rid in rids or prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p, n: generate(url, p, new_tokens, **n, **extra), prompts, named))


def gauge(url: str, name: str) -> float:
    """A value from ``/metrics``, summed over labels."""
    value = total(requests.get(url + "/metrics", timeout=30).text, name)
    assert value is not None, f"{name} is not in /metrics"
    return value
