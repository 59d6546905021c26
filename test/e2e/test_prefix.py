"""Prompts that are shared, or longer than the budget, on real servers with SGLang's strict pool checks on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmark.serving.server import REPEATABLE, Server, flush
from test.e2e.client import generate, generate_all
from test.e2e.texts import QUESTIONS, STORY, chat

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BUDGET, BUFFER = 128, 16
SIZES = ("--eviction-budget", str(BUDGET), "--eviction-buffer", str(BUFFER), "--eviction-min-private", "32")
VASE = ("--eviction", "vase", *SIZES)
DETACH = (*VASE, "--eviction-prefix", "detach")
UNSHARED = (
    *("--eviction", "vase", "--eviction-budget", "128", "--disable-radix-cache"),
    *("--chunked-prefill-size", "256", "--page-size", "16", "--enable-mixed-chunk"),
)
PREFILL = (
    *("--eviction", "vase", "--eviction-budget", "256", "--eviction-prefill", "on"),
    *("--chunked-prefill-size", "512"),
)
Serve = Callable[..., Server]


def test_shared_prefix_does_not_bleed(serve: Serve) -> None:
    """Eight requests share a 700-token prefix and evict; each says what it says alone."""
    server = serve(*VASE, **REPEATABLE)
    flush(server.url)
    prompts = [chat(f"{STORY}\n\n{question}") for question in QUESTIONS]
    together = generate_all(server.url, prompts, 84)
    assert all(answer["meta_info"]["prompt_tokens"] > 700 for answer in together)
    assert all(answer["meta_info"]["eviction"]["evictions"] >= 2 for answer in together)
    alone = [generate(server.url, prompt, 84) for prompt in prompts]
    # The shared part was hit after its first readers had evicted.
    assert all(answer["meta_info"]["cached_tokens"] > 600 for answer in alone)
    assert [a["text"] for a in together] == [a["text"] for a in alone]

    reseeded = serve(*VASE, "--eviction-seed", "1", **REPEATABLE)
    other = generate_all(reseeded.url, prompts, 84)
    assert [a["text"] for a in other] != [a["text"] for a in alone], "the comparison cannot fail"


def test_detach_bounds_a_long_shared_prompt(serve_tiny: Serve) -> None:
    """A 700-token prompt decodes from 144 slots; the tree keeps serving it to others, who answer as alone."""
    server = serve_tiny(*DETACH)
    prompts = [chat(f"{STORY}\n\n{question}") for question in QUESTIONS[:4]]
    together = generate_all(server.url, prompts, 60)
    for answer in together:
        assert answer["meta_info"]["eviction"]["evictions"] >= 2
        assert answer["meta_info"]["eviction"]["kv_tokens"] <= BUDGET + BUFFER + 1
    alone = [generate(server.url, prompt, 60) for prompt in prompts]
    assert all(answer["meta_info"]["cached_tokens"] > 600 for answer in alone)
    # A whole prompt that is hit leaves no queries behind: the first round waits for B decode steps.
    again = [generate(server.url, prompt, 60) for prompt in prompts]
    assert [a["text"] for a in alone] == [a["text"] for a in again]
    flush(server.url)


def test_a_long_prompt_is_compacted_after_its_prefill(serve_tiny: Serve) -> None:
    """2,000 prompt tokens decode from 320 slots; the tree shares the first T - M of them, and answers repeat."""
    server = serve_tiny(*PREFILL, **REPEATABLE)
    flush(server.url)
    prompts = [chat(f"{STORY * 3}\n\n{question}") for question in QUESTIONS[:2]]
    first, second, short = generate_all(server.url, [*prompts, chat("Hi")], 40)
    again = generate(server.url, prompts[0], 40)
    for answer in (first, second, again):
        assert answer["meta_info"]["prompt_tokens"] > 2000
        assert answer["meta_info"]["eviction"]["evictions"] == 1
        assert answer["meta_info"]["eviction"]["kv_tokens"] <= 256 + 64
    assert short["meta_info"]["eviction"]["evictions"] == 0
    assert again["meta_info"]["cached_tokens"] == 256 - 128
    assert again["text"] == first["text"]
    flush(server.url)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["protect", "detach"])
def test_six_thousand_prompt_tokens_decode_from_576_slots(serve: Serve, prefix: str) -> None:
    flags = ("--eviction", "vase", "--eviction-budget", "512", "--eviction-prefill", "on", "--eviction-prefix", prefix)
    server = serve(*flags, "--chunked-prefill-size", "2048")
    flush(server.url)
    prompt = [(7 * i + i * i) % 40000 + 100 for i in range(6000)]
    # No round precedes the first decode step: the prefill's result may not be processed yet.
    for new_tokens, held, rounds in ((2, 6001, 0), (3, 513, 1), (66, 576, 1), (130, 576, 2)):
        answer = generate(server.url, prompt, new_tokens)["meta_info"]
        assert answer["prompt_tokens"] == 6000
        assert (answer["eviction"]["kv_tokens"], answer["eviction"]["evictions"]) == (held, rounds), new_tokens
        flush(server.url)


def test_long_private_prompt(serve_tiny: Serve) -> None:
    """Without a radix cache a long prompt is the request's own: it is compacted at the first decode steps."""
    server = serve_tiny(*UNSHARED)
    prompts = [chat(STORY * 3 + question) for question in QUESTIONS[:2]] + [chat("Hi")]
    long, other, short = generate_all(server.url, prompts, 60)
    for answer in (long, other):
        assert answer["meta_info"]["prompt_tokens"] > 2000
        record = answer["meta_info"]["eviction"]
        assert record["evictions"] == 1
        assert record["kv_tokens"] <= 128 + 64
    assert short["meta_info"]["eviction"]["evictions"] == 0
