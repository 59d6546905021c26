"""A server under random load, with every pool check of SGLang on.

    python -m benchmark.soak --model DIR --requests 2000 --seed 1

Random arrivals and lengths, shared prefixes, clients that abort or hang up at random moments, flushes and pauses,
retraction by force and by a full pool; one server for each mix of policy, page size, budget, prefix mode and
schedule. Any model will do; a tiny one is faster and meets as many events.

A violation (a request lost, answered twice, with the wrong length or beyond its bound, a slot leaked, a dead
server, a sampled answer that differs from its solo run, a prefix that the tree serves wrongly) makes the exit
status non-zero. The last line is a JSON summary.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests
from transformers import AutoConfig

from benchmark.common.progress import bar
from benchmark.serving.server import REPEATABLE, STRICT, Server

COMMON = ("--context-length", "4096", "--max-total-tokens", "2560", "--dtype", "float32", "--random-seed", "1")
CLOSE = 1e-3
"""Log-probabilities of one request alone and in a batch may differ by rounding."""


@dataclass(frozen=True)
class Mix:
    """A server under test."""

    budget: int
    buffer: int
    flags: str
    env: Mapping[str, str] = field(default_factory=dict)


FORCED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "97"}
# Admits more than fits: the pool fills up and retracts by itself.
OVERBOOKED = "--schedule-conservativeness 0.1"
MIXES = (
    Mix(128, 32, f"--eviction vase --page-size 1 --chunked-prefill-size 128 {OVERBOOKED}"),
    Mix(160, 32, "--eviction vase-dkv --page-size 16 --chunked-prefill-size 128 --enable-mixed-chunk", FORCED),
    Mix(128, 32, "--eviction vase --page-size 64 --eviction-prefix detach --disable-overlap-schedule", FORCED),
    Mix(192, 64, f"--eviction snapkv --disable-radix-cache --enable-mixed-chunk {OVERBOOKED}"),
    Mix(128, 16, f"--eviction vase-dkv --eviction-prefix detach --chunked-prefill-size 256 {OVERBOOKED}"),
    Mix(256, 64, "--eviction h2o --page-size 16 --enable-mixed-chunk --disable-overlap-schedule"),
    Mix(160, 32, f"--eviction vase --eviction-prefill on --page-size 16 --chunked-prefill-size 128 {OVERBOOKED}"),
)


@dataclass(frozen=True)
class Job:
    """One request, and how its client leaves before the answer, if it does."""

    rid: str
    tokens: tuple[int, ...]
    new_tokens: int
    ignore_eos: bool = True
    """Otherwise SGLang bets on an early end and may overbook the pool."""
    logprobs: str | None = None
    """Of the ``answer``, or of the ``prompt`` too, which is then prefilled whole."""
    leaves: str | None = None
    """``abort``: by a call; ``hang up``: closes the connection; ``hang up mid-stream``."""
    after: float = 0
    """Seconds until then."""
    evict: bool = True
    """Otherwise the answer tells what the tree holds, whenever a row might have detached from it."""


def jobs(count: int, rng: random.Random, vocabulary: int) -> list[Job]:
    """Random requests; six in ten start with one of four long prefixes."""
    low, high = min(100, vocabulary // 2), min(40000, vocabulary)
    prefixes = [tuple(rng.randrange(low, high) for _ in range(length)) for length in (70, 200, 330, 330)]
    made = []
    for i in range(count):
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else ()
        tail = tuple(rng.randrange(low, high) for _ in range(rng.randrange(1, 120)))
        made.append(
            Job(
                f"soak-{i:06}",  # an abort takes every id that starts with its own
                prefix + tail,
                rng.randrange(500, 900) if rng.random() < 0.05 else rng.randrange(20, 260),
                rng.random() < 0.5,
                rng.choice((None, None, "answer", "prompt")),
                rng.choice(("abort", "hang up", "hang up mid-stream")) if rng.random() < 0.15 else None,
                rng.uniform(0.1, 4.0),
            )
        )
    return made


class Load:
    """Sends jobs to one server and collects what is wrong."""

    def __init__(self, server: Server, mix: Mix) -> None:
        self.server = server
        self.mix = mix
        self.violations: list[str] = []
        self.seen: Counter[str] = Counter()
        self.tally: Counter[str] = Counter()
        self.answers: dict[str, dict[str, Any]] = {}

    def post(self, path: str, timeout: float = 900, **body: Any) -> requests.Response:
        return requests.post(self.server.url + path, json=body, timeout=timeout)

    def send(self, job: Job) -> dict[str, Any] | None:
        """The answer; ``None`` if the client left before it came."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": job.new_tokens, "ignore_eos": job.ignore_eos}
        if not job.evict:
            sampling["custom_params"] = {"eviction": "none"}
        body: dict[str, Any] = {"rid": job.rid, "input_ids": job.tokens, "sampling_params": sampling}
        if job.logprobs:
            start = 0 if job.logprobs == "prompt" else -1
            body |= {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        if job.leaves == "hang up mid-stream":
            return self.stream(job, body)
        try:
            return self.post("/generate", job.after if job.leaves == "hang up" else 900, **body).json()
        except requests.Timeout:
            return None

    def stream(self, job: Job, body: dict[str, Any]) -> dict[str, Any] | None:
        until = time.monotonic() + job.after
        answer = None
        with requests.post(self.server.url + "/generate", json={**body, "stream": True}, stream=True) as reply:
            for line in reply.iter_lines():
                if time.monotonic() > until:
                    return None
                if line.startswith(b"data: {"):
                    answer = json.loads(line[6:])
        return answer

    def run(self, job: Job, delay: float) -> None:
        time.sleep(delay)
        timer = threading.Timer(job.after, self.post, ("/abort_request",), {"rid": job.rid})
        if job.leaves == "abort":
            timer.start()
        try:
            answer = self.send(job)
        except requests.RequestException as error:
            self.violations.append(f"{job.rid}: no answer: {error}")
            return
        finally:
            timer.cancel()
        if answer is None:
            self.tally[f"left: {job.leaves}"] += 1
        else:
            self.check(job, answer)

    def check(self, job: Job, answer: dict[str, Any]) -> None:
        meta = answer.get("meta_info")
        if meta is None:
            self.violations.append(f"{job.rid}: {answer}")
            return
        self.seen[meta["id"]] += 1
        reason = meta["finish_reason"]["type"]
        self.tally[f"ended: {reason}"] += 1
        if reason == "abort":
            if job.leaves != "abort":
                self.violations.append(f"{job.rid}: aborted by itself: {meta['finish_reason']}")
            return
        self.answers[job.rid] = answer
        record = meta["eviction"]
        self.tally["retracted"] += bool(meta["num_retractions"])
        self.tally["evicted"] += bool(record["evictions"])
        self.tally["evictions"] += record["evictions"]
        ended_early = reason == "stop" and not job.ignore_eos and meta["completion_tokens"] <= job.new_tokens
        if meta["completion_tokens"] != job.new_tokens and not ended_early:
            self.violations.append(f"{job.rid}: {meta['completion_tokens']} of {job.new_tokens} tokens ({reason})")
        if job.logprobs and len(meta["output_token_logprobs"]) != meta["completion_tokens"]:
            self.violations.append(f"{job.rid}: {len(meta['output_token_logprobs'])} log-probabilities")
        if job.logprobs == "prompt" and len(meta["input_token_logprobs"]) != len(job.tokens):
            self.violations.append(f"{job.rid}: {len(meta['input_token_logprobs'])} log-probabilities of the prompt")
        if record["kv_tokens"] > (bound := self.bound(job, meta)):
            self.violations.append(f"{job.rid}: holds {record['kv_tokens']} tokens, bound {bound}")

    def bound(self, job: Job, meta: dict[str, Any]) -> int:
        """Most tokens that the row of ``job`` has at its end."""
        budget, buffer = self.mix.budget, self.mix.buffer
        if meta["completion_tokens"] < 3 or (meta["num_retractions"] and not meta["eviction"]["evictions"]):
            return len(job.tokens) + meta["completion_tokens"]  # it ended before its (rebuilt) row was due
        private = "--disable-radix-cache" in self.mix.flags or "--eviction-prefill on" in self.mix.flags
        floor = 0 if private else len(job.tokens) + max(budget // 2, 2 * buffer)
        return max(budget, floor) + buffer + 1

    def meddle(self, done: threading.Event, rng: random.Random) -> None:
        """What an operator may do to a busy server: flush (refused while it is busy), pause with and without
        retraction."""
        while not done.wait(rng.uniform(0.5, 3)):
            what = rng.choice(("flush", "flush", "in_place", "in_place", "in_place", "retract"))
            if what == "flush":
                self.tally["flushed" if self.post("/flush_cache").ok else "flush refused"] += 1
                continue
            self.tally[f"paused: {what}"] += 1
            self.post("/pause_generation", mode=what)
            time.sleep(rng.uniform(0, 0.3))
            self.post("/continue_generation")

    def settle(self, work: Sequence[Job], sample: int, rng: random.Random) -> None:
        """After the load: the pool is whole, the tree serves, sampled answers equal their solo runs."""
        if twice := [rid for rid, times in self.seen.items() if times > 1]:
            self.violations.append(f"answered twice: {twice}")
        time.sleep(3)  # the idle checks run
        probes = [
            Job(f"probe-{i}", (*job.tokens, 101), 8, logprobs="answer", evict=False)
            for i, job in enumerate(rng.sample(work, 8))
        ]
        warm = [self.send(probe) for probe in probes]
        flushed = self.post("/flush_cache?timeout=10")
        if not flushed.ok:
            self.violations.append(f"the pool is not whole: {flushed.text}")
        for probe, before in zip(probes, warm, strict=True):
            if before is not None and before["meta_info"]["cached_tokens"]:
                difference = self.compare("cached prefixes compared", probe, before)
                self.violations += [difference] if difference else []
        self.post("/flush_cache?timeout=10")  # the probes published more than a row that evicts would
        alike = [job for job in work if job.rid in self.answers and self.repeats(self.answers[job.rid]["meta_info"])]
        sampled = rng.sample(alike, min(sample, len(alike)))
        if "detach" in self.mix.flags:  # these found no room to detach, or had no need; alone they might
            sampled = [replace(job, evict=False) for job in sampled]
        differences = [self.compare("solo runs compared", job, self.answers[job.rid]) for job in sampled]
        self.judge([text for text in differences if text], len(sampled))
        if "Traceback" in self.server.log() or "leak" in self.server.log().lower():
            self.violations.append("the server's log has a traceback or a leak")

    def repeats(self, meta: dict[str, Any]) -> bool:
        """Whether an answer follows from its request alone. When a row detaches depends on the tree and the pool."""
        return not meta["num_retractions"] and not ("detach" in self.mix.flags and meta["eviction"]["evictions"])

    def judge(self, differences: Sequence[str], compared: int) -> None:
        """A difference is a violation, but for a few where decode steps ran in mixed batches: their attention is
        summed in another order, and a draw or a token that was as good as tied turns out otherwise."""
        if "--enable-mixed-chunk" in self.mix.flags and len(differences) <= compared // 10:
            self.tally["differences by rounding"] += len(differences)
        else:
            self.violations += differences

    def compare(self, what: str, job: Job, before: dict[str, Any]) -> str | None:
        """How ``before`` differs from the answer that ``job`` gets now, alone; up to the first token that was tied."""
        alone = self.send(replace(job, leaves=None, logprobs=job.logprobs or "answer"))
        assert alone is not None
        self.tally[what] += 1
        tokens = list(zip(before["output_ids"], alone["output_ids"], strict=False))
        same = next((i for i, (a, b) in enumerate(tokens) if a != b), len(tokens))
        said = [[p for p, *_ in answer["meta_info"].get("output_token_logprobs", ())] for answer in (before, alone)]
        off = [i for i, (a, b) in enumerate(zip(*said, strict=False)) if i < same and abs(a - b) > CLOSE]
        if before["output_ids"] == alone["output_ids"] and not off:
            return None
        lead = -1.0
        if same < len(tokens):
            (first, *_), (second, *_) = alone["meta_info"]["output_top_logprobs"][same]
            lead = first - second
        if not off and 0 <= lead <= CLOSE:
            self.tally["ties"] += 1
            return None
        return (
            f"{job.rid}: {what}: tokens differ from {same} of {len(tokens)}, where the first led by {lead:.6f}; "
            f"log-probabilities from {off[:1]}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=40, help="answers to compare with a solo run, each server")
    parser.add_argument("--mixes", default=",".join(map(str, range(1, len(MIXES) + 1))), help="numbers of server mixes")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--server-flags", default="--device cpu --sleep-on-idle")
    args = parser.parse_args(argv)
    vocabulary = AutoConfig.from_pretrained(args.model).vocab_size
    tally: Counter[str] = Counter()
    violations = 0
    begin = time.monotonic()
    numbers = [int(number) for number in args.mixes.split(",")]
    with bar() as progress:
        for number in numbers:
            mix = MIXES[number - 1]
            # A mix alone meets the load that it meets among others.
            rng = random.Random(f"{args.seed} {number}")
            work = jobs(args.requests // len(numbers), rng, vocabulary)
            sizes = ("--eviction-budget", str(mix.budget), "--eviction-buffer", str(mix.buffer))
            task = progress.add_task(f"mix {number}: {mix.flags}", total=len(work))
            flags = (*args.server_flags.split(), *COMMON, *sizes, *mix.flags.split())
            with Server(args.model, flags, env={**STRICT, **REPEATABLE, **mix.env}) as server:
                load = Load(server, mix)
                done = threading.Event()
                meddler = threading.Thread(target=load.meddle, args=(done, random.Random(rng.random())), daemon=True)
                meddler.start()
                with ThreadPoolExecutor(args.concurrency) as pool:
                    for running in [pool.submit(load.run, job, rng.expovariate(4.0)) for job in work]:
                        running.result()
                        progress.advance(task)
                done.set()
                meddler.join()
                load.settle(work, args.sample, rng)
            tally += load.tally
            for text in load.violations:
                progress.console.print(f"mix {number}: {text}", soft_wrap=True, markup=False)
            violations += len(load.violations)
    summary = {"requests": args.requests, "seed": args.seed, "seconds": round(time.monotonic() - begin)}
    print(json.dumps({**summary, **dict(sorted(tally.items())), "violations": violations}))
    return bool(violations)
