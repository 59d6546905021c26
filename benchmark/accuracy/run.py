"""Accuracy of a served model with eviction against the full cache.

    python -m benchmark.accuracy --model DIR --task NAME --policies a,b,... --compression 2,4,8 --out DIR [--quick]

Each policy answers the same problems with the same sampling seeds on real servers. A budget is the mean trace of the
full cache (prompt and answer, measured first) divided by the compression. Every answer goes to ``rows.jsonl`` with its
text as it comes; a second call continues where the first stopped. ``--redraw`` makes tables and plots from the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.progress import Progress

from benchmark.accuracy import report
from benchmark.accuracy.processors import ENV, FLAGS, Seeded
from benchmark.accuracy.report import FULL
from benchmark.accuracy.tasks import PAPER_TOKENS, REASONING_MODEL, TASKS, Item, Task, chat_ids, task
from benchmark.accuracy.variants import Variant, eviction_flags, private_floor
from benchmark.common.arguments import InputError
from benchmark.common.machine import machine, named
from benchmark.common.pages import add_docs
from benchmark.common.progress import bar
from benchmark.common.rows import Row, append, read
from benchmark.serving.server import REPEATABLE, STOCK, Server, ServerError, flush, generate
from sgl_vase.config import PREFIX_MODES

POLICIES = "vase-attnv,vase-dkv,r-kv,snapkv,curdkv,random,streaming,h2o,keydiff,knorm,value-range,evict-large-range"
ABLATIONS = (
    "vase-attnv:reserve=0,vase-attnv:sampling=false,vase-attnv:reserve=0:sampling=false,"
    "vase-attnv:reserve=0.125,vase-attnv:reserve=0.5,"
    "vase-attnv:magnitude=absmax,vase-attnv:magnitude=l2,vase-attnv:magnitude=variance"
)
SERVER_FLAGS = "--device cpu --dtype float32 --sleep-on-idle"
PAPER_BUDGET = "paper"
SEEDED = Seeded.to_str()
LINES = 64
SPREAD = 1.0


@dataclass(frozen=True)
class Cell:
    """One variant at one budget on one task; ``variant`` is ``None`` for the full cache.

    ``prompt``: mean prompt tokens of the task.
    """

    task: Task
    variant: Variant | None
    label: str
    budget: int
    prompt: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        if self.variant is None:
            return (self.task.name, *FULL)
        return (self.task.name, self.variant.name, self.variant.prefix, self.label)

    @property
    def value_tokens(self) -> int | None:
        """``N_v``, ``None`` for the server's default."""
        if self.variant is None:
            return None
        share = self.variant.reserve
        if share is None and self.variant.policy in ("vase", "vase-attnv"):
            share = self.task.reserve
        protected = self.prompt if self.variant.prefix == "protect" else 0
        private = max(self.budget - protected, private_floor(self.budget, self.task.buffer))
        return None if share is None else round(share * private)


def groups(cells: Sequence[Cell], out: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str], list[Cell]]]:
    """Server flags, environment, and the cells that such a server serves: one variant at all its budgets."""
    found: dict[tuple[Variant | None, int, int | None], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.variant, cell.task.buffer, cell.value_tokens].append(cell)
    for (variant, buffer, value_tokens), members in found.items():
        if variant is None:
            yield (), STOCK, members
        else:
            yield eviction_flags(variant, [m.budget for m in members], buffer, value_tokens, out), {}, members


@dataclass(frozen=True)
class Request:
    """One sample of one problem in one cell."""

    cell: Cell
    item: Item
    sample: int

    @property
    def key(self) -> tuple[str, ...]:
        return (*self.cell.key, self.item.id, str(self.sample))

    def seed(self, base: int) -> int:
        """Of SGLang's sampler and the evictions: the same in all cells, so that they differ in nothing else."""
        return zlib.crc32(f"{base} {self.cell.task.name} {self.item.id} {self.sample}".encode()) % 2**31


@dataclass(frozen=True)
class Settings:
    """What all requests have in common; rows of different settings do not mix."""

    model: Path
    seed: int
    temperature: float
    top_p: float

    def ask(self, server: Server, request: Request) -> Row:
        """The answer of a running server, as a row that is not graded yet."""
        cell = request.cell
        prompt: dict[str, Any] = {"text": request.item.prompt}
        most = cell.task.new_tokens
        if cell.task.chat:
            prompt = {"input_ids": (ids := chat_ids(self.model, request.item.prompt))}
            most = min(most, PAPER_TOKENS - len(ids))
        seed = request.seed(self.seed)
        params: dict[str, Any] = {"seed": seed, "temperature": self.temperature, "top_p": self.top_p}
        if cell.variant is not None:
            params["eviction"] = {"budget": cell.budget}
        sampling = {"temperature": 0, "max_new_tokens": most, "sampling_seed": seed}
        body = {**prompt, "sampling_params": {**sampling, "custom_params": params}, "custom_logit_processor": SEEDED}
        answer = generate(server.url, body, str(request.key))
        meta = answer["meta_info"]
        eviction = meta.get("eviction") or {}
        if cell.variant is not None and eviction.get("budget") != cell.budget:
            raise ServerError(f"{request.key}: asked for a budget of {cell.budget}, got {eviction}")
        names = ("task", "variant", "prefix", "compression", "problem")
        return {
            **dict(zip(names, request.key, strict=False)),
            "sample": request.sample,
            "budget": cell.budget,
            "seed": seed,
            "prompt_tokens": meta["prompt_tokens"],
            "tokens": meta["completion_tokens"],
            "at_limit": meta["finish_reason"]["type"] == "length",
            "loop": report.loops(answer["output_ids"]),
            **{name: eviction.get(name, 0) for name in ("evictions", "evicted_tokens", "kv_tokens")},
            "text": answer["text"],
        }


class Runner:
    """Runs requests on servers, a few at a time, and appends graded rows to ``rows.jsonl``."""

    def __init__(self, settings: Settings, out: Path, flags: Sequence[str], servers: int, concurrency: int) -> None:
        self.settings, self.out, self.flags = settings, out, (*flags, *FLAGS)
        self.servers, self.concurrency = servers, concurrency
        self.file = out / "rows.jsonl"
        self.rows = read(self.file) if self.file.exists() else []
        threads = max(1, len(os.sched_getaffinity(0)) // servers)
        self.env = ENV | REPEATABLE | ({"OMP_NUM_THREADS": str(threads)} if servers > 1 else {})

    def missing(self, cells: Sequence[Cell], problems: dict[str, list[Item]], samples: dict[str, int]) -> list[Request]:
        """What the rows do not hold yet."""
        names = ("task", "variant", "prefix", "compression", "problem", "sample")
        done = {tuple(str(row[name]) for name in names) for row in self.rows}
        return [
            request
            for cell in cells
            for sample in range(samples[cell.task.name])
            for item in problems[cell.task.name]
            if (request := Request(cell, item, sample)).key not in done
        ]

    def run(self, todo: Sequence[Request], progress: Progress) -> None:
        """Serve every request; raises the first error of a server, with all rows until then kept."""
        by_cell: dict[Cell, list[Request]] = defaultdict(list)
        for request in todo:
            by_cell[request.cell].append(request)
        bar = progress.add_task("", total=len(todo))
        answers: queue.Queue[tuple[Request, Row]] = queue.Queue()
        up: list[Server] = []

        def serve(flags: tuple[str, ...], env: dict[str, str], cells: list[Cell]) -> None:
            server = Server(self.settings.model, (*self.flags, *flags), env={**self.env, **env})
            up.append(server)

            def ask(request: Request) -> tuple[Request, Row]:
                return request, self.settings.ask(server, request)

            with server, ThreadPoolExecutor(self.concurrency) as clients:
                for cell in cells:
                    flush(server.url)  # a prompt that the tree has leaves no queries to choose by
                    for answer in clients.map(ask, by_cell[cell]):
                        answers.put(answer)

        with ThreadPoolExecutor(self.servers) as pool:
            running = [pool.submit(serve, *group) for group in groups(list(by_cell), self.out)]
            try:
                for request, row in _drain(answers, running):
                    progress.update(bar, description=" ".join(request.cell.key))
                    self.rows.append({**row, **request.cell.task.grades(request.item, row["text"])})
                    append(self.file, self.rows[-1])
                    progress.advance(bar)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for server in up:
                    server.stop()
                raise


def _drain(answers: queue.Queue[Any], running: Sequence[Future[None]]) -> Iterator[Any]:
    """Answers as they come until every server is done; raises what a server raised."""
    while True:
        finished = all(future.done() for future in running)
        try:
            yield answers.get(timeout=0.2)
        except queue.Empty:
            for future in running:
                if future.done():
                    future.result()
            if finished:
                return


def budget(compression: str, task: Task, rows: Sequence[Row]) -> int:
    """``T`` of a compression: the mean full-cache trace of the task divided by it, or the paper's."""
    if compression == PAPER_BUDGET:
        if task.budget is None:
            raise InputError(f"--compression {PAPER_BUDGET}: the paper has no budget for {task.name}")
        return task.budget
    try:
        return round(report.mean_trace(_full(task, rows)) / float(compression))
    except (ValueError, ZeroDivisionError):
        raise InputError(f"--compression: a number above 0 or {PAPER_BUDGET} is needed, got {compression!r}") from None


def prompt_tokens(task: Task, rows: Sequence[Row]) -> int:
    """Mean prompt tokens of a task that the full cache has answered."""
    return round(mean(row["prompt_tokens"] for row in _full(task, rows)))


def _full(task: Task, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["task"], row["variant"]) == (task.name, FULL[0])]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmark.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--model", type=Path, default=REASONING_MODEL, help="Hugging Face directory or name (default: the shipped one)")
    add("--task", default="reasoning", help=f"comma separated, of {', '.join(TASKS)} (default: %(default)s)")
    add(
        "--data",
        type=Path,
        help="folder of JSONL files with problem and answer: aime25, aime26, hmmt, math, gpqa, gsm8k",
    )
    add(
        "--policies",
        default=POLICIES,
        help="name or name:option=value:..., comma separated; reserve: N_v / (T_eff - P)",
    )
    add("--ablations", default="", help="more of them, at --ablation-compression only; all: the paper's")
    add("--prefixes", default="protect,detach", help="--eviction-prefix modes (default: %(default)s)")
    add("--compression", help=f"mean trace / budget, comma separated, or {PAPER_BUDGET} (default: 2,4,8 for reasoning)")
    add("--ablation-compression", default="4", help="(default: %(default)s)")
    add("--out", type=Path, required=True, help="folder of rows.jsonl, tables and plots")
    add("--problems", type=int, help="first problems of a task (default: all of them; reasoning: 100)")
    add("--samples", type=int, help="per problem (default: 1 for reasoning, 1 to 16 for the paper's tasks)")
    add("--lines", type=int, default=LINES, help="length of the reasoning task's programs (default: %(default)s)")
    add("--spread", type=float, default=SPREAD, help="how unequally often they look values up (default: %(default)s)")
    add("--new-tokens", type=int, help="most tokens of an answer (default: 1.5 x the chain; paper's tasks: 32,768)")
    add("--buffer", type=int, help="--eviction-buffer (default: 16 for reasoning, else 64)")
    add("--temperature", type=float, default=0.6)
    add("--top-p", type=float, default=0.95)
    add("--seed", type=int, default=0, help="of problems, sampling and evictions (default: %(default)s)")
    add("--servers", type=int, default=1, help="servers up at a time, cores shared (default: %(default)s)")
    add("--concurrency", type=int, default=48, help="requests of a server at a time (default: %(default)s)")
    add("--server-flags", default=SERVER_FLAGS, help="flags of every server (default: %(default)s)")
    add("--quick", action="store_true", help="one policy, one budget, few problems: the plumbing, not the accuracy")
    add("--redraw", action="store_true", help="tables and plots of --out only")
    add_docs(found, summary=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for arguments that cannot be used."""
    args = parser().parse_args(argv)
    try:
        if not args.redraw:
            measure(args)
        print(report.report(args.out, args.docs, args.summary))
    except (InputError, ServerError, OSError) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace) -> None:
    """Run what the arguments ask for and the rows do not hold yet."""
    if args.quick:
        args.policies, args.ablations, args.prefixes = "vase-attnv", "", "protect"
        args.compression, args.problems, args.samples = args.compression or "4", args.problems or 24, 1
    tasks = [
        _adjusted(task(name, args.data, args.lines, args.seed, args.spread), args) for name in args.task.split(",")
    ]
    if unknown := sorted({*args.prefixes.split(",")} - {*PREFIX_MODES}):
        raise InputError(f"--prefixes: unknown {', '.join(unknown)}; known: {', '.join(PREFIX_MODES)}")
    main_table, ablations = (
        [Variant.parse(spec, prefix) for prefix in args.prefixes.split(",") for spec in specs.split(",") if spec]
        for specs in (args.policies, ABLATIONS if args.ablations == "all" else args.ablations)
    )
    problems = {t.name: t.load(args.problems) for t in tasks}
    args.out.mkdir(parents=True, exist_ok=True)
    _check_settings(args, tasks)
    settings = Settings(args.model, args.seed, args.temperature, args.top_p)
    runner = Runner(settings, args.out, args.server_flags.split(), args.servers, args.concurrency)
    samples = {t.name: t.samples for t in tasks}
    with bar() as progress:
        runner.run(runner.missing([Cell(t, None, FULL[2], 0) for t in tasks], problems, samples), progress)
        cells = [
            Cell(t, variant, label, budget(label, t, runner.rows), prompt_tokens(t, runner.rows))
            for t in tasks
            for variants, labels in (
                (main_table, args.compression or ("2,4,8" if t.budget is None else PAPER_BUDGET)),
                (ablations, args.ablation_compression if t.budget is None or args.compression else PAPER_BUDGET),
            )
            for label in labels.split(",")
            for variant in variants
        ]
        runner.run(runner.missing(cells, problems, samples), progress)


def _adjusted(found: Task, args: argparse.Namespace) -> Task:
    """The task with the arguments that override its defaults."""
    given = {"samples": args.samples, "new_tokens": args.new_tokens, "buffer": args.buffer}
    return replace(found, **{name: value for name, value in given.items() if value is not None})


def _check_settings(args: argparse.Namespace, tasks: Sequence[Task]) -> None:
    """Write the settings of each task, or refuse to continue a run of others. Raises ``InputError``."""
    file = args.out / "runs.json"
    runs = json.loads(file.read_text()) if file.exists() else {}
    versions = named(machine()["versions"])
    for t in tasks:
        run = {
            "model": "the shipped model" if args.model == REASONING_MODEL else args.model.name,
            **{name: getattr(args, name) for name in ("temperature", "top_p", "seed", "problems", "server_flags")},
            **{"samples": t.samples, "new_tokens": t.new_tokens, "buffer": t.buffer, "versions": versions},
            **({"lines": args.lines, "spread": args.spread} if t.name == "reasoning" else {}),
        }
        if (before := runs.setdefault(t.name, run)) != run:
            changed = ", ".join(name for name in run if before.get(name) != run[name])
            raise InputError(
                f"--out {args.out}: its {t.name} rows have other settings ({changed}); name another folder"
            )
    file.write_text(json.dumps(runs, indent=1) + "\n")
