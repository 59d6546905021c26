"""Admission at the bounded footprint, and the long runs that only a slow test can afford."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.serving.server import REPEATABLE, Server, flush
from test.e2e.client import GREEDY, gauge, generate, generate_all, post
from test.e2e.texts import QUESTIONS, chat, prompt_ids

pytestmark = pytest.mark.e2e

Serve = Callable[..., Server]
DKV = ("--eviction", "vase-dkv", "--eviction-budget", "256")


def test_admission_at_the_bounded_footprint(serve_tiny: Serve) -> None:
    """A pool of 8,192 runs 24 requests of 128 + 1,500 tokens at once (8,192 / 320 = 25), not five."""
    server = serve_tiny(*DKV)
    flush(server.url)
    stop = threading.Event()
    most = 0.0

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.1):
            most = max(most, gauge(server.url, "sglang:num_running_reqs"))
            if most >= 24:
                post(server.url, "/abort_request", abort_all=True)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()

    def ask(i: int) -> dict[str, Any]:
        sampling = {**GREEDY, "max_new_tokens": 1500}
        return post(server.url, "/generate", input_ids=prompt_ids(i, 128), sampling_params=sampling).json()

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    stop.set()
    watcher.join()
    assert most >= 24
    # What was aborted in the queue has no such count.
    retractions = [m["num_retractions"] for answer in answers if "num_retractions" in (m := answer["meta_info"])]
    assert len(retractions) >= 24 and not any(retractions)
    time.sleep(1)
    flush(server.url)


def test_many_with_equal_triggers(serve_tiny: Serve) -> None:
    """Twenty-four equal requests are due at the same steps, with the overlap schedule."""
    server = serve_tiny(*DKV)
    flush(server.url)
    answers = generate_all(server.url, [prompt_ids(i, 100) for i in range(24)], 360)
    assert len({str(answer["meta_info"]["eviction"]) for answer in answers}) == 1
    assert answers[0]["meta_info"]["eviction"]["evictions"] >= 2
    flush(server.url)


@pytest.mark.slow
def test_a_hundred_long_generations(serve: Serve) -> None:
    """A hundred at once and one alone, overlap on: no request loops or bleeds under load."""
    server = serve(*DKV, "--max-total-tokens", "32768", **REPEATABLE)
    prompts = [chat(f"{QUESTIONS[i % 8]} Use the number {i}.") for i in range(100)]
    together = generate_all(server.url, prompts, 600)
    for i in (0, 37, 99):
        assert generate(server.url, prompts[i], 600)["text"] == together[i]["text"]
    flush(server.url)


@pytest.mark.slow
def test_sixty_four_requests_of_1500_tokens(serve: Serve) -> None:
    """The worked example of docs/scheduling.md, to the end: all complete, none is retracted."""
    server = serve(*DKV)
    flush(server.url)
    answers = generate_all(server.url, [prompt_ids(i, 128) for i in range(64)], 1500)
    assert all(answer["meta_info"]["completion_tokens"] == 1500 for answer in answers)
    assert all(answer["meta_info"]["num_retractions"] == 0 for answer in answers)


@pytest.mark.slow
def test_six_thousand_tokens_from_a_pool_of_2048(serve: Serve) -> None:
    server = serve(*DKV, "--max-total-tokens", "2048")
    answer = generate(server.url, chat("Tell me about the moon."), 6000)
    assert answer["meta_info"]["completion_tokens"] == 6000
