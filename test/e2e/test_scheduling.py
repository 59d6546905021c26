"""What happens to a request under pressure: admission, retraction, aborts, and everything a client may ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.server import Server
from test.e2e.client import GREEDY, flush, gauge, generate, generate_all, post
from test.e2e.texts import QUESTIONS, chat, prompt_ids

pytestmark = pytest.mark.e2e

Serve = Callable[..., Server]
SMALL = (
    *("--eviction", "vase", "--eviction-budget", "256", "--eviction-min-private", "96"),
    "--enable-return-hidden-states",
)
DKV = ("--eviction", "vase-dkv", "--eviction-budget", "128", "--eviction-buffer", "32")


def test_admission_at_the_bounded_footprint(serve: Serve) -> None:
    """A pool of 8,192 runs 24 requests of 128 + 1,500 tokens at once (8,192 / 320 = 25), not five."""
    server = serve("--eviction", "vase-dkv", "--eviction-budget", "256")
    flush(server.url)
    stop = threading.Event()
    most = 0.0

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.3):
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


def test_a_request_outgrows_the_pool(serve: Serve) -> None:
    """Only the context limit and the bounded footprint count: 700 tokens from a pool of 448."""
    server = serve(*DKV, "--max-total-tokens", "448")
    answer = generate(server.url, chat("Tell me about the moon."), 700)
    assert answer["meta_info"]["completion_tokens"] == 700
    assert answer["meta_info"]["eviction"]["kv_tokens"] <= 128 + 32


def test_two_that_do_not_fit_together_take_turns(serve: Serve) -> None:
    server = serve(*DKV, "--max-total-tokens", "448")
    answers = generate_all(server.url, [prompt_ids(i, 200) for i in range(3)], 150)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [150] * 3
    flush(server.url)


def test_forced_retraction(serve: Serve) -> None:
    """Retracted requests prefill prompt and outputs again, are compacted right after, and lose nothing."""
    server = serve(
        *DKV,
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "128",
        SGLANG_TEST_RETRACT="1",
        SGLANG_TEST_RETRACT_INTERVAL="60",
    )
    answers = generate_all(server.url, [chat(question) for question in QUESTIONS[:6]], 300)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [300] * 6
    retracted = [a for a in answers if a["meta_info"]["num_retractions"]]
    assert retracted
    for answer in answers:
        record = answer["meta_info"]["eviction"]
        assert record["evictions"] > 0
        prompt = answer["meta_info"]["prompt_tokens"]
        assert record["kv_tokens"] <= max(128, prompt + 64) + 32 + 1
    flush(server.url)


def test_same_seed_alone_and_in_a_batch(serve: Serve) -> None:
    """A request's seed decides its draws: the same alone and among others, different for another seed."""
    server = serve(*SMALL)
    prompt = chat(QUESTIONS[2])

    def ask(text: str, **sampling: Any) -> dict[str, Any]:
        return generate(server.url, text, 400, sampling=sampling)

    alone = ask(prompt, sampling_seed=7)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, chat(question), temperature=0.8) for question in QUESTIONS[3:6]]
        same = pool.submit(ask, prompt, sampling_seed=7)
        reseeded = [pool.submit(ask, prompt, sampling_seed=seed) for seed in (8, 9)]
        assert same.result()["text"] == alone["text"]
        assert any(other.result()["text"] != alone["text"] for other in reseeded)
        assert all(other.result()["meta_info"]["eviction"]["evictions"] for other in others)
    assert alone["meta_info"]["eviction"]["evictions"] > 0


def test_what_clients_ask_for(serve: Serve) -> None:
    """n, stop strings, log-probabilities, hidden states, a grammar: served by requests that evict."""
    server = serve(*SMALL)
    long = {**GREEDY, "max_new_tokens": 360}
    count = "Count from one to two hundred, in words, separated by commas."
    bodies = {
        "n": {"text": chat(count), "sampling_params": {**long, "n": 2}},
        "logprobs": {"text": chat(count), "sampling_params": long, "return_logprob": True, "logprob_start_len": 0},
        "grammar": {
            "text": chat(count),
            "sampling_params": {**long, "regex": r"(one|two|three|[a-z ]+, )+", "ignore_eos": True},
        },
        "hidden states": {"text": chat(count), "sampling_params": long, "return_hidden_states": True},
        "stop": {"text": chat(count), "sampling_params": {**long, "stop": ["QQQ"], "ignore_eos": True}},
    }
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = dict(
            zip(bodies, pool.map(lambda body: post(server.url, "/generate", **body), bodies.values()), strict=True)
        )
    for name, reply in replies.items():
        assert reply.status_code == 200, (name, reply.text)
        for answer in reply.json() if name == "n" else [reply.json()]:
            assert answer["meta_info"]["eviction"]["evictions"] > 0, name
    assert len(replies["logprobs"].json()["meta_info"]["output_token_logprobs"]) == 360
    flush(server.url)


def test_per_request_control(serve: Serve) -> None:
    server = serve(*SMALL)

    def ask(eviction: object) -> dict[str, object]:
        sampling = {**GREEDY, "max_new_tokens": 340, "custom_params": {"eviction": eviction}}
        return {"text": chat("Describe a garden."), "sampling_params": sampling}

    cases = ["none", {"budget": 1024}, {"budget": 128}, {"budget": 95}, {"budget": 1.5}, {"policy": "random"}, 7]
    with ThreadPoolExecutor(len(cases)) as pool:
        replies = list(pool.map(lambda eviction: post(server.url, "/generate", **ask(eviction)), cases))
    records = [reply.json()["meta_info"]["eviction"] for reply in replies[:3]]
    assert [record["policy"] for record in records] == ["none", "vase-attnv", "vase-attnv"]
    assert records[0]["evictions"] == records[1]["evictions"] == 0
    assert records[1]["budget"] == 1024
    assert records[2]["evictions"] >= 3
    assert records[2]["kv_tokens"] <= 128 + 64 + 1
    for reply in replies[3:]:
        assert reply.status_code == 400
        assert 'eviction of a request must be "none" or {"budget": a whole number >= 96}' in reply.text.replace(
            "\\", ""
        )


def test_pause_and_continue(serve: Serve) -> None:
    server = serve(*SMALL)
    prompt = chat(QUESTIONS[6])
    quiet = generate(server.url, prompt, 360)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(generate, server.url, prompt, 360)
        time.sleep(4)
        post(server.url, "/pause_generation", mode="in_place").raise_for_status()
        time.sleep(1)
        post(server.url, "/continue_generation").raise_for_status()
        assert paused.result()["text"] == quiet["text"]
    flush(server.url)


def test_many_with_equal_triggers(serve: Serve) -> None:
    """Sixteen equal requests are due at the same step, with the overlap schedule."""
    server = serve("--eviction", "vase-dkv", "--eviction-budget", "256")
    flush(server.url)
    answers = generate_all(server.url, [prompt_ids(i, 100) for i in range(16)], 260)
    assert len({str(answer["meta_info"]["eviction"]) for answer in answers}) == 1
    assert answers[0]["meta_info"]["eviction"]["evictions"] >= 1
    flush(server.url)


def test_long_prompt_into_a_pool_of_pinned_prefixes(serve: Serve) -> None:
    """Running requests pin most of the pool; a prompt that does not fit beside them waits and then runs."""
    server = serve(*DKV, "--max-total-tokens", "1280")
    with ThreadPoolExecutor(4) as pool:
        pinned = [pool.submit(generate, server.url, prompt_ids(i, 300), 180) for i in range(3)]
        time.sleep(2)
        long = pool.submit(generate, server.url, prompt_ids(9, 900), 40)
        assert long.result()["meta_info"]["completion_tokens"] == 40
        assert all(request.result()["meta_info"]["completion_tokens"] == 180 for request in pinned)
    flush(server.url)


@pytest.mark.slow
def test_a_hundred_long_generations(serve: Serve) -> None:
    """A hundred at once and one alone, overlap on: no request loops or bleeds under load."""
    server = serve("--eviction", "vase-dkv", "--eviction-budget", "256", "--max-total-tokens", "32768")
    prompts = [chat(f"{QUESTIONS[i % 8]} Use the number {i}.") for i in range(100)]
    together = generate_all(server.url, prompts, 600)
    for i in (0, 37, 99):
        assert generate(server.url, prompts[i], 600)["text"] == together[i]["text"]
    flush(server.url)


@pytest.mark.slow
def test_sixty_four_requests_of_1500_tokens(serve: Serve) -> None:
    """The worked example of docs/scheduling.md, to the end: all complete, none is retracted."""
    server = serve("--eviction", "vase-dkv", "--eviction-budget", "256")
    flush(server.url)
    answers = generate_all(server.url, [prompt_ids(i, 128) for i in range(64)], 1500)
    assert all(answer["meta_info"]["completion_tokens"] == 1500 for answer in answers)
    assert all(answer["meta_info"]["num_retractions"] == 0 for answer in answers)


@pytest.mark.slow
def test_six_thousand_tokens_from_a_pool_of_2048(serve: Serve) -> None:
    server = serve("--eviction", "vase-dkv", "--eviction-budget", "256", "--max-total-tokens", "2048")
    answer = generate(server.url, chat("Tell me about the moon."), 6000)
    assert answer["meta_info"]["completion_tokens"] == 6000
