"""Everything that may happen to a request while it evicts: one small, crowded server, and a model of random weights."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmark.serving.metrics import counters
from benchmark.serving.server import REPEATABLE, Server, flush
from test.e2e import tiny_model
from test.e2e.client import GREEDY, gauge, generate, generate_all, post
from test.e2e.texts import STORY, prompt_ids

pytestmark = pytest.mark.e2e

BUDGET, BUFFER, PAGE, POOL, TIMEOUT = 128, 32, 16, 896, 60
PRIVATE = BUDGET // 2
FLAGS = (
    *("--eviction", "vase", "--eviction-budget", str(BUDGET), "--eviction-buffer", str(BUFFER)),
    *("--max-total-tokens", str(POOL), "--context-length", "4096", "--page-size", str(PAGE)),
    *("--chunked-prefill-size", "128", "--enable-mixed-chunk", "--enable-return-hidden-states"),
    # Requests that may end early are overbooked.
    *("--schedule-conservativeness", "0.1"),
)
TIMEOUTS = dict.fromkeys(("SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT"), str(TIMEOUT))
LONG = 150
"""Prompt tokens of which the pool takes three: 3 x (144 + 64 + 32, and a page) = 768."""
CLOSE = 1e-3


def bound(prompt: int) -> int:
    """Most KV tokens of a request at its end; with the overlap schedule one more step may be in flight."""
    return max(BUDGET, prompt // PAGE * PAGE + PRIVATE) + BUFFER + 1


@pytest.fixture
def server(serve: Callable[..., Server], tiny: Path) -> Iterator[Server]:
    """The server, idle and its tree empty, before and after."""
    server = serve("--model-path", str(tiny), *FLAGS, **REPEATABLE, **TIMEOUTS)
    flush(server.url)
    yield server
    time.sleep(0.5)  # idle: the strict checks run
    flush(server.url)


def load(server: Server) -> dict[str, Any]:
    """What routers are told."""
    return requests.get(server.url + "/v1/loads", timeout=60).json()["loads"][0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within a minute"
        time.sleep(0.05)


def rounds(server: Server) -> float:
    return gauge(server.url, "sgl_vase:eviction_rounds")


@contextlib.contextmanager
def evicting(server: Server, prompts: list[list[int]], new_tokens: int, **extra: Any) -> Iterator[list[Future[Any]]]:
    """Requests in flight: the block is entered once each of them may have evicted."""
    before = rounds(server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(generate, server.url, prompt, new_tokens, **extra) for prompt in prompts]
        until(lambda: rounds(server) >= before + len(prompts))
        yield answers


def test_abort_and_reports_of_load(server: Server) -> None:
    """Routers see what rows hold and whole waiting prompts, not what requests may generate."""
    with evicting(server, [prompt_ids(i, LONG) for i in range(3)], 3000) as answers:
        with ThreadPoolExecutor(2) as pool:
            queued = [pool.submit(generate, server.url, prompt_ids(i, LONG), 3000) for i in (3, 4)]
            until(lambda: load(server)["num_waiting_reqs"] == 2)
            said = load(server)
            post(server.url, "/abort_request", abort_all=True).raise_for_status()
        aborted = [answer.result()["meta_info"] for answer in [*answers, *queued]]
    assert said["num_running_reqs"] == 3
    row = -(-bound(LONG) // PAGE) * PAGE
    assert 3 * (LONG // PAGE * PAGE + PRIVATE) <= said["num_used_tokens"] <= 3 * row
    assert said["num_total_tokens"] == said["num_used_tokens"] + 2 * LONG
    assert said["num_waiting_uncached_tokens"] == 2 * LONG
    assert [meta["finish_reason"]["type"] for meta in aborted] == ["abort"] * 5
    assert [bool(meta["completion_tokens"]) for meta in aborted] == [True] * 3 + [False] * 2


@pytest.mark.long
def test_timeouts(server: Server) -> None:
    """Running and waiting requests that take too long end with HTTP 503."""

    def ask(i: int) -> requests.Response:
        sampling = {**GREEDY, "max_new_tokens": 3000}
        return post(server.url, "/generate", input_ids=prompt_ids(i, LONG), sampling_params=sampling)

    before = rounds(server)
    with ThreadPoolExecutor(4) as pool:
        doomed = [pool.submit(ask, i) for i in range(4)]
        until(lambda: rounds(server) > before + 3)
        post(server.url, "/pause_generation", mode="in_place").raise_for_status()
        time.sleep(TIMEOUT + 0.5)
        post(server.url, "/continue_generation").raise_for_status()
        replies = [request.result() for request in doomed]
    assert [reply.status_code for reply in replies] == [503] * 4
    said = sorted(re.search(r"Request (\w+) timeout reached", reply.text)[1] for reply in replies)  # type: ignore[index]
    assert said == ["running"] * 3 + ["waiting"]


def test_a_client_hangs_up(server: Server) -> None:
    body = {"input_ids": prompt_ids(0, LONG), "sampling_params": {**GREEDY, "max_new_tokens": 3000}, "stream": True}
    before = rounds(server)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        until(lambda: rounds(server) >= before + 2)
        assert load(server)["num_running_reqs"] == 1
    until(lambda: load(server)["num_running_reqs"] == 0)
    assert load(server)["num_used_tokens"] == 0


def test_flush_while_requests_evict(server: Server) -> None:
    """Refused, or put off until they are done; they do not notice."""
    prompts = [prompt_ids(i, LONG) for i in range(3)]
    quiet = generate_all(server.url, prompts, 300)
    with evicting(server, prompts, 300) as answers:
        assert post(server.url, "/flush_cache").status_code == 400
        assert load(server)["num_running_reqs"] == 3
        assert post(server.url, "/flush_cache?timeout=60").status_code == 200
        assert load(server)["num_running_reqs"] == 0
    assert [answer.result()["text"] for answer in answers] == [answer["text"] for answer in quiet]
    assert generate(server.url, prompts[0], 1)["meta_info"]["cached_tokens"] == 0


def test_readers_of_a_shared_prefix_do_not_bleed(server: Server) -> None:
    """Four requests share a prefix in the tree and evict; each says what it says alone."""
    prompts = [prompt_ids(0, 288) + prompt_ids(10 + i, 8) for i in range(4)]
    together = generate_all(server.url, prompts, 200)
    alone = [generate(server.url, prompt, 200) for prompt in prompts]
    assert all(answer["meta_info"]["eviction"]["evictions"] >= 2 for answer in [*together, *alone])
    assert all(answer["meta_info"]["cached_tokens"] >= 288 for answer in alone)
    assert [a["text"] for a in together] == [a["text"] for a in alone]
    assert len({a["text"] for a in alone}) == 4
    reseeded = generate(server.url, prompts[0], 200, sampling={"sampling_seed": 1})
    assert reseeded["text"] != alone[0]["text"], "the comparison cannot fail"


def test_pause_in_place(server: Server) -> None:
    prompts = [prompt_ids(i, LONG) for i in range(3)]
    quiet = generate_all(server.url, prompts, 300)
    with evicting(server, prompts, 300) as answers:
        post(server.url, "/pause_generation", mode="in_place").raise_for_status()
        held = rounds(server)
        time.sleep(0.5)
        assert rounds(server) == held
        post(server.url, "/continue_generation").raise_for_status()
    assert [answer.result()["text"] for answer in answers] == [answer["text"] for answer in quiet]


def test_pause_with_retraction(server: Server) -> None:
    """Rows are rebuilt from their tokens, but for one that is longer than the pool by now: it ends with an error."""
    prompt = prompt_ids(0, LONG)
    quiet = generate(server.url, prompt, 300, return_logprob=True)
    with ThreadPoolExecutor(2) as pool:
        outgrown = pool.submit(
            post,
            server.url,
            "/generate",
            input_ids=prompt_ids(1, 500),
            sampling_params={**GREEDY, "max_new_tokens": 3000},
        )
        before = rounds(server)
        until(lambda: rounds(server) > before + (POOL - 500) / BUFFER)
        retracted = pool.submit(generate, server.url, prompt, 300, return_logprob=True)
        until(lambda: load(server)["num_running_reqs"] == 2)
        before = rounds(server)
        until(lambda: rounds(server) >= before + 4)
        post(server.url, "/pause_generation", mode="retract").raise_for_status()
        post(server.url, "/continue_generation").raise_for_status()
        answer, error = retracted.result(), outgrown.result()
    assert error.status_code == 503 and "cannot be prefilled again" in error.text
    meta = answer["meta_info"]
    assert meta["num_retractions"] == 1 and meta["completion_tokens"] == 300
    assert meta["eviction"]["evictions"] >= 1
    assert meta["eviction"]["kv_tokens"] <= bound(LONG)
    # Until the pause it is the same text.
    same = [
        a[1] == b[1]
        for a, b in zip(quiet["meta_info"]["output_token_logprobs"], meta["output_token_logprobs"], strict=True)
    ]
    assert all(same[:PRIVATE])


@pytest.mark.long
def test_weight_updates(server: Server, tiny: Path, tmp_path: Path) -> None:
    """New weights wait for requests that run, or come while they are paused; then the tree starts over."""
    tiny_model.build(tmp_path, tiny, seed=1)
    prompt = prompt_ids(0, LONG)

    def update(weights: Path) -> requests.Response:
        return post(server.url, "/update_weights_from_disk", model_path=str(weights))

    old = generate(server.url, prompt, 250)
    try:
        with evicting(server, [prompt], 250) as answers:
            update(tmp_path).raise_for_status()
            assert answers[0].result()["text"] == old["text"]
        new = generate(server.url, prompt, 250)
        assert new["text"] != old["text"]
        assert new["meta_info"]["cached_tokens"] == 0
        assert new["meta_info"]["eviction"] == old["meta_info"]["eviction"]

        with evicting(server, [prompt], 250) as answers:
            post(server.url, "/pause_generation", mode="in_place").raise_for_status()
            refused = update(tiny)
            assert refused.status_code == 400 and "requests are still running" in refused.text
            post(server.url, "/continue_generation").raise_for_status()
            assert answers[0].result()["meta_info"]["completion_tokens"] == 250
        flush(server.url)

        with evicting(server, [prompt], 250) as answers:
            post(server.url, "/pause_generation", mode="retract").raise_for_status()
            update(tmp_path).raise_for_status()
            post(server.url, "/continue_generation").raise_for_status()
            meta = answers[0].result()["meta_info"]
        assert meta["num_retractions"] == 1 and meta["completion_tokens"] == 250
        assert generate(server.url, prompt, 250)["text"] == new["text"]
    finally:
        update(tiny).raise_for_status()
    assert generate(server.url, prompt, 250)["text"] == old["text"]


@pytest.mark.long
def test_log_probabilities_of_a_long_prompt(server: Server) -> None:
    """A prompt that arrives in chunks beside requests that evict has the log-probabilities it has alone."""
    prompt = prompt_ids(9, 300)
    asked = {"return_logprob": True, "logprob_start_len": 0}
    alone = generate(server.url, prompt, 200, **asked)["meta_info"]
    with evicting(server, [prompt_ids(i, 60) for i in range(2)], 600):
        among = generate(server.url, prompt, 200, **asked)["meta_info"]
    for meta in (alone, among):
        assert meta["eviction"]["evictions"] > 0
        assert [len(meta[f"{kind}_token_logprobs"]) for kind in ("input", "output")] == [300, 200]
    for kind in ("input", "output"):
        for a, b in zip(alone[f"{kind}_token_logprobs"], among[f"{kind}_token_logprobs"], strict=True):
            assert a[1] == b[1] and (a[0] is None or abs(a[0] - b[0]) < CLOSE), kind
    assert [token for _, token, *_ in alone["input_token_logprobs"]] == prompt


def test_same_seed_alone_and_in_a_batch(server: Server) -> None:
    """A request's seed decides its draws: the same alone and among others, different for another seed."""
    prompt = prompt_ids(2, 40)
    alone = generate(server.url, prompt, 300, sampling={"sampling_seed": 7})
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(generate, server.url, prompt_ids(i, 40), 300) for i in (3, 4)]
        same = pool.submit(generate, server.url, prompt, 300, sampling={"sampling_seed": 7})
        reseeded = [pool.submit(generate, server.url, prompt, 300, sampling={"sampling_seed": seed}) for seed in (8, 9)]
        assert same.result()["text"] == alone["text"]
        assert all(other.result()["text"] != alone["text"] for other in reseeded)
        assert all(other.result()["meta_info"]["eviction"]["evictions"] for other in others)
    assert alone["meta_info"]["eviction"]["evictions"] > 0


def test_what_clients_ask_for(server: Server) -> None:
    """n, stop strings, log-probabilities, hidden states, a grammar: served by requests that evict."""
    prompt = prompt_ids(5, 40)
    long = {**GREEDY, "max_new_tokens": 240}
    plain = generate(server.url, prompt, 240)
    # A piece of the answer that comes up once, after evictions.
    stop = next(
        s for i in range(len(plain["text"]) * 3 // 4, 10**6) if plain["text"].find(s := plain["text"][i : i + 8]) == i
    )
    bodies: dict[str, dict[str, Any]] = {
        "n": {"sampling_params": {**long, "n": 2}},
        "log-probabilities": {"sampling_params": long, "return_logprob": True},
        "grammar": {"sampling_params": {**long, "regex": "((one|two|three)[a-z ]+, )+"}},
        "hidden states": {"sampling_params": long, "return_hidden_states": True},
        "stop": {"sampling_params": {**long, "stop": [stop]}},
    }

    def ask(body: dict[str, Any]) -> list[dict[str, Any]]:
        reply = post(server.url, "/generate", input_ids=prompt, **body)
        reply.raise_for_status()
        return reply.json() if isinstance(reply.json(), list) else [reply.json()]

    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = dict(zip(bodies, pool.map(ask, bodies.values()), strict=True))
    for name, answers in replies.items():
        for answer in answers:
            assert answer["meta_info"]["eviction"]["evictions"] > 0, name
            if name not in ("grammar", "stop"):
                assert answer["text"] == plain["text"], name
    assert len(replies["n"]) == 2
    assert len(replies["log-probabilities"][0]["meta_info"]["output_token_logprobs"]) == 240
    assert len(replies["hidden states"][0]["meta_info"]["hidden_states"]) == 240
    assert re.fullmatch("((one|two|three)[a-z ]+, )*[a-z ]*,?", replies["grammar"][0]["text"])
    stopped = replies["stop"][0]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]


@pytest.mark.long
def test_a_frontend_program_forks(server: Server) -> None:
    import sglang

    @sglang.function
    def program(s):  # type: ignore[no-untyped-def]
        s += STORY[:600]
        forks = s.fork(3)
        forks += [f" Ending {i}:" for i in range(3)]
        forks += sglang.gen("end", max_tokens=200, temperature=0, ignore_eos=True)
        s += "".join(fork["end"] for fork in forks)

    before = rounds(server)
    said = program.run(backend=sglang.RuntimeEndpoint(server.url)).text()
    assert rounds(server) >= before + 3
    ends = [generate(server.url, f"{STORY[:600]} Ending {i}:", 200)["text"] for i in range(3)]
    assert said == STORY[:600] + "".join(ends)


def test_per_request_control(server: Server) -> None:
    def ask(eviction: object) -> dict[str, object]:
        sampling = {**GREEDY, "max_new_tokens": 240, "custom_params": {"eviction": eviction}}
        return {"input_ids": prompt_ids(6, 40), "sampling_params": sampling}

    cases = ["none", {"budget": 1024}, {"budget": 64}, {"budget": 63}, {"budget": 1.5}, {"policy": "random"}, 7]
    with ThreadPoolExecutor(len(cases)) as pool:
        replies = list(pool.map(lambda eviction: post(server.url, "/generate", **ask(eviction)), cases))
    records = [reply.json()["meta_info"]["eviction"] for reply in replies[:3]]
    assert [record["policy"] for record in records] == ["none", "vase-attnv", "vase-attnv"]
    assert records[0]["evictions"] == records[1]["evictions"] == 0
    assert records[1]["budget"] == 1024
    assert records[2]["evictions"] >= 3
    assert records[2]["kv_tokens"] <= 40 + PRIVATE + BUFFER + 1
    for reply in replies[3:]:
        assert reply.status_code == 400
        assert (
            'eviction of a request must be "none" or {"budget": a whole number >= 64}'
            in json.loads(reply.text)["error"]["message"]
        )


def test_a_request_outgrows_the_pool(server: Server) -> None:
    """Only the context limit and the bounded footprint count."""
    answer = generate(server.url, prompt_ids(0, 500), POOL - 400)
    assert answer["meta_info"]["completion_tokens"] == POOL - 400
    assert answer["meta_info"]["eviction"]["kv_tokens"] <= bound(500)


def test_one_that_is_never_evicted_ends_with_the_pool(server: Server) -> None:
    """With as many tokens as stock SGLang would let it have, not with an error."""
    answer = generate(server.url, prompt_ids(0, 100), 2 * POOL, sampling={"custom_params": {"eviction": "none"}})
    assert answer["meta_info"]["completion_tokens"] == POOL - 7 * PAGE - PAGE - 1
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_those_that_do_not_fit_together_take_turns(server: Server) -> None:
    answers = generate_all(server.url, [prompt_ids(i, LONG) for i in range(5)], 150)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [150] * 5
    assert not any(a["meta_info"]["num_retractions"] for a in answers)


def test_a_full_pool_retracts(server: Server) -> None:
    """Six that may end early are let in where four fit: whoever is retracted comes back and loses nothing."""
    prompts = [prompt_ids(i, 100) for i in range(6)]
    before = counters(server)["retractions"]
    answers = generate_all(server.url, prompts, 300, sampling={"ignore_eos": False})
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [300] * 6
    retractions = sum(a["meta_info"]["num_retractions"] for a in answers)
    assert counters(server)["retractions"] - before == retractions > 0
    for answer in answers:
        assert answer["meta_info"]["eviction"]["evictions"] > 0
        assert answer["meta_info"]["eviction"]["kv_tokens"] <= bound(100)


@pytest.mark.long
def test_long_prompt_into_a_pool_of_pinned_prefixes(server: Server) -> None:
    """Running requests pin most of the pool; a prompt that does not fit beside them waits and then runs."""
    with evicting(server, [prompt_ids(i, LONG) for i in range(3)], 400) as pinned:
        long = generate(server.url, prompt_ids(9, 700), 40)
        assert long["meta_info"]["completion_tokens"] == 40
    assert all(request.result()["meta_info"]["completion_tokens"] == 400 for request in pinned)
