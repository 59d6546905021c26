"""Throughput and memory of serving with eviction against the full cache.

    python -m benchmark.throughput --model DIR --scenarios equal-batch,memory-bound-1/4 --out DIR [--quick]

Real servers, driven one at a time by SGLang's own client with equal work (``ignore_eos``, fixed seeds). The
variants of a scenario stay up together and take turns (A B C, B C A, ...), so that a drifting machine hits all
alike; ratios are formed turn by turn, within a call. Raw rows go to ``rows.jsonl`` as they are measured; a second
call measures what is missing. ``--redraw`` makes tables and plots from the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pynvml
import requests

from benchmark.common.machine import gpus, machine
from benchmark.common.pages import add_docs
from benchmark.common.progress import bar
from benchmark.common.rows import append, read
from benchmark.serving.metrics import COUNTERS, counters, total
from benchmark.serving.server import STOCK, Fleet, Server, family, flush
from benchmark.serving.variants import BASELINES, IDEAL, OFF, Variant, evicting
from sgl_vase import EvictionConfig

BUDGET, QUICK_BUDGET = 512, 48
BUFFER, QUICK_BUFFER = 64, 16
SERVERS_AT_ONCE = 5


@dataclass(frozen=True)
class Scenario:
    """A workload: the server's pool (``None``: what its memory holds) and the client's requests."""

    name: str
    pool: int | None
    client: tuple[str, ...]
    requests: int
    variants: tuple[Variant, ...]
    tokens_in: int
    tokens_out: int


def random_work(requests: int, tokens_in: int, tokens_out: int, ratio: float = 1.0) -> tuple[str, ...]:
    return (
        *("--dataset-name", "random-ids", "--num-prompts", str(requests), "--random-range-ratio", str(ratio)),
        *("--random-input-len", str(tokens_in), "--random-output-len", str(tokens_out)),
    )


def scenarios(quick: bool, policies: Sequence[str], budget: int, long_out: int, batch: int) -> dict[str, Scenario]:
    """Every scenario by name; ``quick`` checks the plumbing: a few tokens, and mostly the first policy only."""
    buffer = QUICK_BUFFER if quick else BUFFER
    small = ("--eviction-buffer", str(buffer)) if quick else ()
    with_off = (*BASELINES, *(evicting(policy, budget, flags=small) for policy in policies), OFF)
    shown = policies[:1] if quick else policies
    compared = with_off[: len(BASELINES) + len(shown)]
    # Quick: as many tokens as show a second request in a pool that holds one at its full length.
    batch, tokens_in, out, half = (
        (2, budget // 4, 2 * budget, 2 * budget) if quick else (batch, 128, long_out, long_out // 2)
    )
    found: list[Scenario] = []

    def add(
        name: str, pool: int | None, n: int, tokens: tuple[int, int], variants: tuple[Variant, ...], *client: str
    ) -> None:
        work = client or random_work(n, *tokens)
        found.append(Scenario(name, pool, work, n, variants, *tokens))

    roomy = batch * (tokens_in + out + 64) + 1024
    add("equal-batch", roomy, batch, (tokens_in, out), with_off)
    # KV tokens over time: the flat line.
    add("one-request", roomy, 1, (tokens_in, out), compared)
    groups = 2 if batch > 2 and batch % 2 == 0 else 1
    group = ("--gsp-num-groups", str(groups), "--gsp-prompts-per-group", str(batch // groups))
    gsp_out = budget * 2
    add(
        "shared-prefix",
        roomy,
        batch,
        (512 + 64, gsp_out),
        compared,
        *("--dataset-name", "generated-shared-prefix", "--gsp-system-prompt-len", "512", *group),
        *("--gsp-question-len", "64", "--gsp-output-len", str(gsp_out), "--num-prompts", str(batch)),
        # All at once, none would find another's prefix in the tree.
        *("--request-rate", "0.25"),
    )
    add("short-outputs", roomy, batch * 2, (128, budget // 2 if quick else 192), with_off)
    add(
        "poisson",
        roomy,
        batch * 2,
        (256, half),
        compared,
        *random_work(batch * 2, 256, half, 0.25),
        *("--request-rate", "0.5"),
    )
    # Rows that are kept between T and T + B tokens (detached: the round is as large as it gets, and due at the second
    # token) against stock decoding as many through that range, which is a free and perfect eviction. B tokens hold one
    # round, as in a long answer; both are short and take turns, for slow stretches of a machine last half a minute.
    ideal = Variant(IDEAL, env=STOCK, client=(*random_work(batch, budget, buffer), "--tokenize-prompt"))
    detach = (*small, "--eviction-prefix", "detach")
    kept = (evicting(policy, budget, flags=detach) for policy in shown)
    full = (budget + buffer - 1, buffer)
    add("steady", roomy, batch, full, (ideal, *kept), *random_work(batch, *full), "--tokenize-prompt")
    offered = batch * 2
    for share in (4,) if quick else (8, 4, 2, 1):
        pool = max(offered * (tokens_in + half) // share, budget + 2 * buffer) + 64
        add(f"memory-bound-1/{share}", pool, offered, (tokens_in, half), compared)
    published = dict.fromkeys((*policies, "r-kv"))
    paper = [evicting(policy, t, f"{policy} T {t}") for t in (2048, 4096, 6144) for policy in published]
    for thousand in (16, 32):
        add(f"paper-{thousand}k", None, 16, (256, thousand * 1024), (*BASELINES, *paper))
    return {scenario.name: scenario for scenario in found}


class Watch:
    """Polls ``/metrics`` and the server's memory while a run goes on."""

    GAUGES = ("sglang:num_running_reqs", "sglang:num_used_tokens")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.samples: list[tuple[float, float, float]] = []
        self.peak_rss = 0
        self.peak_gpu = 0

    def _poll(self) -> None:
        begin = time.monotonic()
        while not self._stop.wait(0.5):
            with contextlib.suppress(requests.RequestException):
                text = self._server.metrics()
                running, used = (total(text, name) or 0.0 for name in self.GAUGES)
                self.samples.append((time.monotonic() - begin, running, used))
            with contextlib.suppress(psutil.NoSuchProcess):
                members = family(self._server.pid)
                self.peak_rss = max(self.peak_rss, sum(p.memory_info().rss for p in members))
                self.peak_gpu = max(self.peak_gpu, gpu_memory({p.pid for p in members}))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def gpu_memory(pids: set[int]) -> int:
    """Bytes that the processes hold on all GPUs."""
    used = [p for gpu in gpus() for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) if p.pid in pids]
    return sum(p.usedGpuMemory or 0 for p in used)


CLIENTS = multiprocessing.get_context("forkserver")
CLIENTS.set_forkserver_preload(["sglang.benchmark.serving"])  # imported once, not once a run: that takes as long as one


def client(arguments: Sequence[str], log: Path) -> None:
    """SGLang's own client, in this process; what it prints goes to ``log``."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["serving", *arguments]
    from sglang.benchmark.serving import cli_main

    cli_main()


def drive(server: Server, offered: int, work: Sequence[str], seed: int, scratch: Path) -> dict[str, Any]:
    """One run of the client against a server that is up; the row without its identity."""
    flush(server.url)
    output, log = scratch / "client.jsonl", scratch / "client.log"
    output.unlink(missing_ok=True)
    arguments = [
        *("--backend", "sglang", "--base-url", server.url),
        *("--model", str(server.model), "--seed", str(seed), "--output-file", str(output), "--output-details"),
        *("--disable-tqdm", "--warmup-requests", "0", *work),
    ]
    before = counters(server)
    process = CLIENTS.Process(target=client, args=(arguments, log), daemon=True)
    with Watch(server) as watch:
        process.start()
        process.join()
    after = counters(server)  # a dead server is found here, before its client is blamed
    if process.exitcode:
        raise RuntimeError(f"the client failed on {' '.join(work)}:\n{log.read_text()[-2000:]}")
    result = json.loads(output.read_text().splitlines()[-1])
    if result["completed"] != offered:
        raise RuntimeError(f"{result['completed']} of {offered} requests completed:\n{log.read_text()[-2000:]}")
    running = [sample[1] for sample in watch.samples if sample[1]]
    kept = ("duration", "output_throughput", "total_output_tokens", "completed")
    latencies = [f"{stat}_{name}_ms" for name in ("ttft", "tpot", "itl") for stat in ("mean", "median", "p99")]
    return {
        **{key: result.get(key) for key in (*kept, *latencies)},
        **{key: after[key] - before[key] for key in COUNTERS},
        "peak_running": max(running, default=0.0),
        "mean_running": sum(running) / len(running) if running else 0.0,
        "peak_kv_tokens": max((sample[2] for sample in watch.samples), default=0.0),
        "peak_rss_mib": watch.peak_rss / 2**20,
        "peak_gpu_mib": watch.peak_gpu / 2**20,
        "samples": [[round(t, 1), r, u] for t, r, u in watch.samples],
    }


def rotated(variants: Sequence[Variant], turn: int) -> Sequence[Variant]:
    """The order of a turn: another variant is first in each, for the first may be slower."""
    order = deque(variants)
    order.rotate(-turn)
    return order


def planned(scenario: Scenario, variant: Variant, repetition: int, budget: int, flags: Sequence[str]) -> dict[str, Any]:
    """What a row says before it is measured, and by which a second call knows that it was."""
    sized = () if scenario.pool is None else ("--max-total-tokens", str(scenario.pool))
    return {
        "scenario": scenario.name,
        "variant": variant.name,
        "repetition": repetition,
        "budget": budget,
        "flags": [*flags, *sized, *variant.flags],
        "client": [*(variant.client or scenario.client)],
    }


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, got {text}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl, tables and plots")
    parser.add_argument("--scenarios", default="all", help="names, comma separated, or all (but paper-16k, paper-32k)")
    parser.add_argument("--policies", default="vase-dkv,vase", help="policies to run beside stock")
    parser.add_argument("--variants", default="", help="run these variants only, comma separated, e.g. stock,vase")
    parser.add_argument("--budget", type=positive, help=f"--eviction-budget (default: {BUDGET}, quick: {QUICK_BUDGET})")
    parser.add_argument("--long-out", type=positive, default=4096, help="output tokens of the long scenarios")
    parser.add_argument("--batch", type=positive, default=8, help="requests at once; a queue is offered twice as many")
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--quick", action="store_true", help="a few tokens: the plumbing, not the speed")
    parser.add_argument("--server-flags", default="--device cpu --sleep-on-idle", help="flags of every server")
    parser.add_argument("--redraw", action="store_true", help="tables and plots of --out only")
    add_docs(parser, summary=True)
    args = parser.parse_args(argv)
    from benchmark.serving import plot  # needs matplotlib: found missing before the runs, not after

    if args.redraw:
        if not (args.out / "rows.jsonl").is_file():
            parser.error(f"--out {args.out}: no rows.jsonl there; name a folder that was measured before")
        print(plot.report(args.out, args.docs, args.summary))
        return 0
    args.budget = args.budget or (QUICK_BUDGET if args.quick else BUDGET)

    policies = list(dict.fromkeys(args.policies.split(",")))
    for policy in policies:
        try:
            EvictionConfig(policy, args.budget, QUICK_BUFFER if args.quick else BUFFER)
        except ValueError as error:
            parser.error(f"--policies {args.policies} --budget {args.budget}: {error}")
    table = scenarios(args.quick, policies, args.budget, args.long_out, args.batch)
    on_request = ("paper-16k", "paper-32k")
    names = [n for n in table if n not in on_request] if args.scenarios == "all" else args.scenarios.split(",")
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--scenarios: unknown {', '.join(unknown)}; known: {', '.join(table)}")
    if args.variants:
        wanted = set(args.variants.split(","))
        known = {variant.name for name in names for variant in table[name].variants}
        if unknown := sorted(wanted - known):
            parser.error(f"--variants: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        for name in names:
            variants = table[name].variants
            if not wanted.intersection(variant.name for variant in variants):
                parser.error(f"--variants {args.variants}: none of them belongs to {name}")
            kept = tuple(variant for variant in variants if variant.name in (*wanted, IDEAL))
            table[name] = replace(table[name], variants=kept)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    rows = args.out / "rows.jsonl"
    repetitions = 1 if args.quick else args.repetitions
    measured = read(rows) if rows.exists() else []
    identity = {"model": args.model.name, **machine()}
    call = time.strftime("%Y-%m-%dT%H:%M:%S")
    for row in measured:
        if changed := [name for name in ("model", "machine", "versions") if row.get(name) != identity[name]]:
            parser.error(f"--out {args.out}: its rows are of another {' and '.join(changed)}; name another folder")
    flags = (*args.server_flags.split(), "--enable-metrics", "--decode-log-interval", "10", "--random-seed", "1")
    # A server without a pool of its own size takes what the device has, and two have no room on a GPU.
    limit = 1 if gpus() or any(table[name].pool is None for name in names) else SERVERS_AT_ONCE
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bar())
        turns = [
            (scenario, variant, plan)
            for scenario in map(table.__getitem__, names)
            for repetition in range(repetitions)
            for variant in rotated(scenario.variants, repetition)
            if (plan := planned(scenario, variant, repetition, args.budget, flags))
            and not any(plan == {name: row[name] for name in plan} for row in measured)
        ]
        task = progress.add_task("throughput", total=len(turns))
        fleet = stack.enter_context(Fleet(args.model, limit))
        for scenario, variant, plan in turns:
            progress.update(task, description=f"{scenario.name}: starting {variant.name}")
            beside = {other.name: (p["flags"], other.env) for of, other, p in turns if of is scenario}
            if len(beside) <= limit:  # those of a scenario start together
                fleet.start(list(beside.values()))
            server = fleet.get(plan["flags"], variant.env)
            progress.update(task, description=f"{scenario.name}: {variant.name}")
            row = {
                **plan,
                "pool_tokens": total(server.metrics(), "sglang:max_total_num_tokens"),
                "requests": scenario.requests,
                "tokens_in": scenario.tokens_in,
                "tokens_out": scenario.tokens_out,
                "env": variant.env,
                "seed": 1,
                "call": call,
                **identity,
                **drive(server, scenario.requests, plan["client"], 1, args.out),
            }
            append(rows, row)
            progress.advance(task)
    for left in ("client.jsonl", "client.log"):
        (args.out / left).unlink(missing_ok=True)
    print(plot.report(args.out, args.docs, args.summary))
    return 0
