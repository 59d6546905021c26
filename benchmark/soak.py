"""A server under random load, with every pool check of SGLang on.

    python -m benchmark.soak --model DIR --requests 2000 --seed 1

Random arrivals and lengths, shared prefixes, aborts and disconnects at random moments, forced retraction, one
server for each mix of page size, budget and policy. A violation (a request lost, answered with the wrong
length or beyond its bound, a slot leaked, a dead server, a sampled answer that differs from its solo run)
makes the exit status non-zero. The last line is a JSON summary.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.progress import Progress

from benchmark.server import Server

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass(frozen=True)
class Mix:
    """A server under test."""

    budget: int
    buffer: int
    flags: tuple[str, ...]
    env: dict[str, str]


RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "97"}
MIXES = (
    Mix(128, 32, ("--eviction", "vase", "--page-size", "1", "--chunked-prefill-size", "128"), {}),
    Mix(
        160,
        32,
        ("--eviction", "vase-dkv", "--page-size", "16", "--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        RETRACTING,
    ),
    Mix(128, 32, ("--eviction", "random", "--page-size", "64", "--disable-overlap-schedule"), RETRACTING),
    Mix(192, 64, ("--eviction", "snapkv", "--disable-radix-cache", "--enable-mixed-chunk"), {}),
)
COMMON = ("--context-length", "4096", "--max-total-tokens", "2560", "--dtype", "float32", "--random-seed", "1")


@dataclass(frozen=True)
class Job:
    """One request: its tokens, how many to generate, and when the client loses patience, if ever."""

    rid: str
    tokens: tuple[int, ...]
    new_tokens: int
    abort_after: float | None
    disconnect: bool


def jobs(count: int, rng: random.Random) -> list[Job]:
    prefixes = [tuple(rng.randrange(100, 40000) for _ in range(rng.choice((70, 200, 330)))) for _ in range(4)]
    made = []
    for i in range(count):
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else ()
        tail = tuple(rng.randrange(100, 40000) for _ in range(rng.randrange(1, 120)))
        leaves = rng.random() < 0.15
        made.append(
            Job(
                f"soak-{i}",
                prefix + tail,
                rng.randrange(20, 260),
                rng.uniform(0.2, 6.0) if leaves else None,
                rng.random() < 0.5,
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

    def send(self, job: Job) -> dict[str, Any] | None:
        sampling = {"temperature": 0, "max_new_tokens": job.new_tokens, "ignore_eos": True}
        body = {"rid": job.rid, "input_ids": job.tokens, "sampling_params": sampling}
        timeout = job.abort_after if job.disconnect and job.abort_after else 900
        try:
            return requests.post(self.server.url + "/generate", json=body, timeout=timeout).json()  # type: ignore[no-any-return]
        except requests.Timeout:
            return None

    def run(self, job: Job, delay: float) -> None:
        time.sleep(delay)
        timer = None
        if job.abort_after is not None and not job.disconnect:
            timer = threading.Timer(job.abort_after, self.abort, (job,))
            timer.start()
        try:
            answer = self.send(job)
        except requests.RequestException as error:
            self.violations.append(f"{job.rid}: no answer: {error}")
            return
        finally:
            if timer is not None:
                timer.cancel()
        if answer is None:
            self.tally["disconnected"] += 1
        else:
            self.check(job, answer)

    def abort(self, job: Job) -> None:
        requests.post(self.server.url + "/abort_request", json={"rid": job.rid}, timeout=60)

    def check(self, job: Job, answer: dict[str, Any]) -> None:
        meta = answer.get("meta_info")
        if meta is None:
            self.violations.append(f"{job.rid}: {answer}")
            return
        self.seen[meta["id"]] += 1
        reason = meta["finish_reason"]["type"]
        self.tally[reason] += 1
        if reason == "abort":
            if job.abort_after is None:
                self.violations.append(f"{job.rid}: aborted by itself: {meta['finish_reason']}")
            return
        self.answers[job.rid] = answer
        self.tally["retracted"] += bool(meta["num_retractions"])
        self.tally["evicted"] += bool(meta["eviction"]["evictions"])
        if meta["completion_tokens"] != job.new_tokens:
            self.violations.append(f"{job.rid}: {meta['completion_tokens']} of {job.new_tokens} tokens")
        floor = max(self.mix.budget // 2, 2 * self.mix.buffer)
        bound = max(self.mix.budget, len(job.tokens) + floor) + self.mix.buffer + 1
        if meta["eviction"]["kv_tokens"] > bound:
            self.violations.append(f"{job.rid}: holds {meta['eviction']['kv_tokens']} tokens, bound {bound}")

    def settle(self, sample: Sequence[Job]) -> None:
        """After the load: the pool is whole, the tree serves, sampled answers equal their solo runs."""
        twice = [rid for rid, times in self.seen.items() if times > 1]
        if twice:
            self.violations.append(f"answered twice: {twice}")
        time.sleep(3)  # the idle checks run
        flushed = requests.post(self.server.url + "/flush_cache", timeout=60)
        if not flushed.ok:
            self.violations.append(f"the pool is not whole: {flushed.text}")
        for job in sample:
            before = self.answers.get(job.rid)
            alone = None if before is None or before["meta_info"]["num_retractions"] else self.send(job)
            if alone is None:
                continue
            if alone["meta_info"]["num_retractions"]:
                self.tally["solo run retracted"] += 1
                continue
            self.tally["compared"] += 1
            if alone["text"] != before["text"]:  # type: ignore[index]
                self.violations.append(f"{job.rid}: differs from its solo run")
        if "Traceback" in self.server.log() or "leak" in self.server.log().lower():
            self.violations.append("the server's log has a traceback or a leak")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=5, help="answers to compare with a solo run, each server")
    parser.add_argument("--mixes", type=int, default=len(MIXES), help="how many of the server mixes to run")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--server-flags", default="--device cpu")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    tally: Counter[str] = Counter()
    violations: list[str] = []
    begin = time.monotonic()
    mixes = MIXES[: args.mixes]
    with Progress() as progress:
        for number, mix in enumerate(mixes):
            work = jobs(args.requests // len(mixes), rng)
            sizes = ("--eviction-budget", str(mix.budget), "--eviction-buffer", str(mix.buffer))
            task = progress.add_task(f"mix {number + 1}: {' '.join(mix.flags[:4])}", total=len(work))
            flags = (*args.server_flags.split(), *COMMON, *sizes, *mix.flags)
            with Server(args.model, flags, env={**STRICT, **mix.env}) as server:
                load = Load(server, mix)
                with ThreadPoolExecutor(args.concurrency) as pool:
                    for running in [pool.submit(load.run, job, rng.expovariate(4.0)) for job in work]:
                        running.result()
                        progress.advance(task)
                candidates = [job for job in work if job.abort_after is None]
                load.settle(rng.sample(candidates, min(args.sample, len(candidates))))
            tally += load.tally
            violations += [f"mix {number + 1}: {text}" for text in load.violations]
    for text in violations:
        print(text)
    print(
        json.dumps(
            {
                "requests": args.requests,
                "seed": args.seed,
                "seconds": round(time.monotonic() - begin),
                **tally,
                "violations": len(violations),
            }
        )
    )
    return bool(violations)


if __name__ == "__main__":
    raise SystemExit(main())
