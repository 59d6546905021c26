"""Real servers over HTTP, SGLang's strict pool checks on: what an answer says, and what the pool holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import requests

from benchmark.serving.server import Server, flush
from sgl_vase import EvictionConfig
from test.e2e.client import gauge, generate, generate_all, post
from test.e2e.texts import QUESTIONS, chat

pytestmark = pytest.mark.e2e

BUDGET, BUFFER, PRIVATE = 128, 16, 48
SIZES = ("--eviction-budget", str(BUDGET), "--eviction-buffer", str(BUFFER), "--eviction-min-private", str(PRIVATE))
VASE = ("--eviction", "vase", *SIZES)
PAGED = (
    *("--eviction", "vase-dkv", *SIZES, "--page-size", "16", "--disable-overlap-schedule"),
    *("--enable-mixed-chunk", "--chunked-prefill-size", "256"),
)
Serve = Callable[..., Server]
BOTH = [pytest.param(VASE, id="overlap"), pytest.param(PAGED, id="paged", marks=pytest.mark.long)]


def expected(prompt: int, new_tokens: int, page: int = 1) -> tuple[int, int]:
    """Rounds, and KV tokens at the end, of a request whose prompt the tree owns."""
    config = EvictionConfig(budget=BUDGET, buffer=BUFFER, min_private=PRIVATE)
    length, rounds, protected = prompt, 0, prompt // page * page
    # The first token comes from the prefill; a round may precede each decode step but the first.
    for step in range(new_tokens - 1):
        if step >= 1 and (plan := config.plan_row(length, protected)):
            length, rounds = plan.target, rounds + 1
        length += 1
    return rounds, length


@pytest.mark.parametrize("flags", BOTH)
def test_prompts_of_every_awkward_length(serve_tiny: Serve, flags: tuple[str, ...]) -> None:
    """Counters of unequal requests in one batch are those that the budget arithmetic predicts."""
    server = serve_tiny(*flags)
    page = 16 if flags is PAGED else 1
    lengths = [1, 2, 63, 64, 65, 127, 129, 300]
    prompts = [[(7 * i + 11 * n) % 40000 + 100 for i in range(n)] for n in lengths]
    for n, answer in zip(lengths, generate_all(server.url, prompts, 175), strict=True):
        record = answer["meta_info"]["eviction"]
        rounds, held = expected(n, 175, page)
        assert record["evictions"] == rounds > 0, n
        assert record["evicted_tokens"] == rounds * BUFFER, n
        # With the overlap schedule one more step is in flight when a request ends.
        assert held <= record["kv_tokens"] <= held + 1, n
    flush(server.url)


@pytest.mark.parametrize("flags", BOTH)
def test_resend_of_prompt_and_answer(serve_tiny: Serve, flags: tuple[str, ...]) -> None:
    """The tree learned the prompt only; the second turn is recomputed past it, as a cold server does."""
    server = serve_tiny(*flags)
    flush(server.url)
    question = "Write about the sea, the ships and the people who work there."
    first = generate(server.url, chat(question), 200)
    assert first["meta_info"]["eviction"]["evictions"] > 0
    second_turn = chat(question, first["text"], "Now say it in one sentence.")
    warm = generate(server.url, second_turn, 40)
    assert 0 < warm["meta_info"]["cached_tokens"] <= first["meta_info"]["prompt_tokens"]
    flush(server.url)
    cold = generate(server.url, second_turn, 40)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["text"] == cold["text"]


def test_kv_stays_bounded_while_1500_tokens_are_generated(serve_tiny: Serve) -> None:
    server = serve_tiny(*VASE)
    flush(server.url)
    used: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            used.append(gauge(server.url, "sglang:num_used_tokens"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answer = generate(server.url, chat("Write a long story about a river."), 1500)
    finally:
        done.set()
        watcher.join()
    record = answer["meta_info"]["eviction"]
    assert record["evictions"] >= (1500 - BUDGET) // BUFFER
    assert record["kv_tokens"] + record["evicted_tokens"] >= 1500
    assert BUDGET - BUFFER < max(used) <= BUDGET + BUFFER + 1
    assert gauge(server.url, "sgl_vase:evicted_tokens") >= record["evicted_tokens"]
    assert "#evictions: " in server.log()


def test_identical_requests_in_a_row(serve_tiny: Serve) -> None:
    server = serve_tiny(*VASE)
    first, second = (generate(server.url, chat(QUESTIONS[5]), 200) for _ in range(2))
    assert first["text"] == second["text"]
    assert first["meta_info"]["eviction"] == second["meta_info"]["eviction"]
    assert first["meta_info"]["eviction"]["evictions"] > 0


def test_abort_in_mid_generation(serve_tiny: Serve) -> None:
    server = serve_tiny(*VASE)
    answers: list[requests.Response] = []
    request = threading.Thread(
        target=lambda: answers.append(
            post(
                server.url,
                "/generate",
                text=chat(QUESTIONS[0]),
                rid="doomed",
                sampling_params={"max_new_tokens": 4000, "ignore_eos": True},
            )
        )
    )
    before = gauge(server.url, "sgl_vase:eviction_rounds")
    request.start()
    while gauge(server.url, "sgl_vase:eviction_rounds") < before + 2:
        time.sleep(0.1)
    post(server.url, "/abort_request", rid="doomed").raise_for_status()
    request.join(60)
    assert answers and answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    time.sleep(2)  # idle: the strict checks run
    flush(server.url)
    assert generate(server.url, chat("Hello"), 5)["text"]


def test_openai_usage_and_server_info(serve_tiny: Serve) -> None:
    server = serve_tiny(*VASE)
    info = requests.get(server.url + "/server_info", timeout=30).json()
    assert (info["eviction"], info["eviction_budget"], info["eviction_buffer"]) == ("vase-attnv", BUDGET, BUFFER)
    asked = {"model": "x", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 5}
    usage = post(server.url, "/v1/chat/completions", **asked).json()["usage"]
    assert usage["eviction"]["policy"] == "vase-attnv"
    assert usage["eviction"]["kv_tokens"] >= usage["prompt_tokens"] + 4
    streamed = post(server.url, "/v1/chat/completions", **asked, stream=True, stream_options={"include_usage": True})
    assert '"eviction":{"policy":"vase-attnv"' in streamed.text


@pytest.mark.long
def test_a_budget_above_the_length_changes_nothing(serve_tiny: Serve) -> None:
    """Eviction on but under budget, off, and SGLang without the plugin say the same words."""
    prompts = [chat(question) for question in QUESTIONS[:2]]
    texts = {}
    for name, flags, env in (
        ("evicting", VASE, {}),
        ("off", (), {}),
        ("stock", (), {"SGLANG_PLUGINS": "vase_cpu"}),
    ):
        answers = [generate(serve_tiny(*flags, **env).url, prompt, 60) for prompt in prompts]
        texts[name] = [answer["text"] for answer in answers]
        assert all(("eviction" in answer["meta_info"]) == (name == "evicting") for answer in answers)
    assert texts["evicting"] == texts["off"] == texts["stock"]
