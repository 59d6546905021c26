"""Does a fact that was read or generated long ago come back? Retrieval through a served model with eviction.

``python -m benchmark.retrieval --model DIR --policies a,b,... --budgets 256,512 --lengths 256,...,4096 --out DIR``

Two tests, in two modes. ``fact``: one sentence with a number at the start, then unrelated sentences up to the length,
then a question for the number. ``pairs``: lines ``word: number`` up to the length, then some of the words, the numbers
to be filled in. ``read``: the context is the prompt (``--eviction-prefix detach``, or it would never be evicted).
``generated``: the model is made to generate it (``protect``). The questions are always generated: a policy chooses
before it sees them, but for the rounds that fall among them. Rows go to ``rows.jsonl``; a second call continues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmark.accuracy.processors import ENV, FLAGS, Forced
from benchmark.accuracy.variants import Prefix, Variant, eviction_flags
from benchmark.common.arguments import InputError
from benchmark.common.machine import machine, named
from benchmark.common.pages import add_docs, rewrite
from benchmark.common.progress import bar
from benchmark.common.rows import Row, append, read
from benchmark.serving.server import REPEATABLE, STOCK, Server, ServerError, flush, generate

POLICIES = "vase-attnv,vase-dkv,r-kv,snapkv,curdkv,random,streaming,value-range"
PREFIX: dict[str, Prefix] = {"read": "detach", "generated": "protect"}
ANSWER_TOKENS = 8
BUFFER = 32
BEGIN = "<!-- generated: python -m benchmark.retrieval -->"
FULL = "full"

NOUNS = ["baker", "sailor", "teacher", "farmer", "painter", "doctor", "singer", "miller", "tailor", "gardener"]
VERBS = ["walked to", "looked at", "talked about", "thought of", "passed by", "waited near", "wrote about", "came from"]
PLACES = ["market", "river", "castle", "garden", "bridge", "forest", "station", "library", "tower", "field"]
TIMES = ["in the morning", "after lunch", "on Sunday", "in the rain", "last winter", "before sunset", "at noon"]
WORDS = [
    "apple", "bread", "candle", "desk", "eagle", "flute", "glove", "horse", "island", "jacket", "kettle", "lemon",
    "mirror", "needle", "onion", "pencil", "quilt", "ribbon", "saddle", "table", "umbrella", "violin", "wagon",
    "yarn", "zebra", "anchor", "basket", "camera", "drum", "engine", "feather", "guitar", "hammer",
]  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """A context of about ``length`` tokens and, in order, questions with their answers."""

    test: str
    length: int
    sample: int
    context: list[int]
    questions: list[tuple[list[int], str]]


def probe(test: str, length: int, sample: int, seed: int, tokenizer: Tokenizer) -> Probe:
    """The same probe for the same arguments; ``seed`` and ``sample`` choose words and numbers."""
    rng = random.Random(f"{seed} {test} {length} {sample}")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def number() -> str:
        return str(rng.randrange(1000, 10000))

    if test == "fact":
        place, code = rng.choice(PLACES), number()
        context = ids(f"The secret number of the {place} is {code}.")
        while len(context) < length:
            words = (rng.choice(NOUNS), rng.choice(VERBS), rng.choice(PLACES), rng.choice(TIMES))
            context += ids(" The {} {} the {} {}.".format(*words))
        return Probe(test, length, sample, context, [(ids(f" The secret number of the {place} is"), code)])
    pairs: dict[str, str] = {}
    context = ids("A list of words and numbers.\n")
    while len(context) < length:
        word = f"{rng.choice(WORDS)} {rng.choice(WORDS)}"
        if word not in pairs:
            pairs[word] = number()
            context += ids(f"{word}: {pairs[word]}\n")
    asked = rng.sample(sorted(pairs), 4)
    questions = [(ids(f"\n{word}:"), pairs[word]) for word in asked]
    return Probe(test, length, sample, [*context, *ids("\nThe same words again.")], questions)


def ask(server: Server, found: Probe, mode: str, budget: int | None, tokenizer: Tokenizer) -> list[Row]:
    """One request; a row for each question, without the policy's name."""
    prompt = list(tokenizer.encode("Notes.\n", add_special_tokens=False).ids)
    forced: list[int | None] = []
    (prompt if mode == "read" else forced).extend(found.context)
    starts = []
    for question, _ in found.questions:
        forced += question
        starts.append(len(forced))
        forced += [None] * ANSWER_TOKENS
    params: dict[str, Any] = {"forced": forced}
    if budget is not None:
        params["eviction"] = {"budget": budget}
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": len(forced), "custom_params": params}
    body = {"input_ids": prompt, "sampling_params": sampling, "custom_logit_processor": Forced.to_str()}
    answer = generate(server.url, body, f"{found.test}, {mode}")
    out = answer["output_ids"]
    if any(want is not None and want != got for want, got in zip(forced, out, strict=True)):
        raise ServerError(f"{found.test}, {mode}: the server did not generate the tokens it was given")
    eviction = answer["meta_info"].get("eviction") or {}
    rows = []
    for index, (start, (_, right)) in enumerate(zip(starts, found.questions, strict=True)):
        text = tokenizer.decode(out[start : start + ANSWER_TOKENS])
        row = {"test": found.test, "mode": mode, "length": found.length, "sample": found.sample, "question": index}
        row |= {"budget": budget or 0, "answer": right, "text": text, "right": text.strip().startswith(right)}
        rows.append(row | {name: eviction.get(name, 0) for name in ("evictions", "kv_tokens")})
    return rows


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("policy", "mode", "budget", "test", "length", "sample"))


def tables(rows: Sequence[Row], run: dict[str, Any]) -> str:
    """Share of right answers, a table for each test, mode and budget; an asterisk where nothing was evicted."""
    lines = [
        f"Model: {run['model']}, greedy decoding, buffer: {BUFFER} tokens, seed: {run['seed']}. Columns are lengths of "
        f"the context in tokens. A cell is the percentage of right answers over {run['samples']} contexts. An asterisk "
        f"marks a cell in which no request was evicted. Versions: {run['versions']}.",
        "",
    ]
    found: dict[tuple[Any, ...], dict[tuple[str, int], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["test"], row["mode"], row["budget"]][row["policy"], row["length"]].append(row)
    for (test, mode, budget), cells in found.items():
        if not budget:
            continue
        whole = found[test, mode, 0]
        lengths = sorted({length for _, length in cells})
        lines += [f"#### {test}, {mode}, T {budget}", "", f"| policy | {' | '.join(f'{n:,}' for n in lengths)} |"]
        lines.append("|" + "---|" * (len(lengths) + 1))
        for policy in dict.fromkeys([FULL, *(policy for policy, _ in cells)]):
            source = whole if policy == FULL else cells
            values = [_percent(source.get((policy, length), [])) for length in lengths]
            lines.append(f"| {policy if policy == FULL else f'`{policy}`'} | {' | '.join(values)} |")
        lines.append("")
    return "\n".join(lines)


def _percent(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    mark = "" if any(row["evictions"] for row in rows) or not rows[0]["budget"] else "*"
    return f"{100 * np.mean([row['right'] for row in rows]):.0f}{mark}"


def report(out: Path, docs: Path | None = None) -> Path:
    """Redraw the tables from ``rows.jsonl`` and ``run.json``; the file that holds them."""
    rows = read(out / "rows.jsonl")
    body = tables(rows, json.loads((out / "run.json").read_text(encoding="utf-8")))
    target = out / "table.md"
    target.write_text(body, encoding="utf-8")
    if docs is not None:
        rewrite(docs, BEGIN, body)
        target = docs
    return target


def servers(args: argparse.Namespace) -> Iterator[tuple[str, str, tuple[str, ...], dict[str, str], list[int | None]]]:
    """Policy, mode, flags, environment and budgets of each server."""
    budgets = [int(text) for text in args.budgets.split(",")]
    for mode in args.modes.split(","):
        yield FULL, mode, (), STOCK, [None]
        for spec in args.policies.split(","):
            variant = Variant.parse(spec, PREFIX[mode])
            yield spec, mode, eviction_flags(variant, budgets, BUFFER, None, args.out), {}, list(budgets)


def measure(args: argparse.Namespace) -> None:
    """Run what the arguments ask for and the rows do not hold yet."""
    if args.quick:
        args.policies, args.budgets, args.lengths, args.samples = "vase-attnv,random", "128", "256,512", 2
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    versions = named(machine()["versions"])
    run = {"model": args.model.name, "samples": args.samples, "seed": args.seed, "versions": versions}
    settings, file = args.out / "run.json", args.out / "rows.jsonl"
    if settings.exists() and json.loads(settings.read_text()) != run:
        raise InputError(f"--out {args.out}: its rows have other settings; name another folder")
    settings.write_text(json.dumps(run) + "\n")
    done = {key(row) for row in read(file)} if file.exists() else set()
    probes = [
        probe(test, int(length), sample, args.seed, tokenizer)
        for test in args.tests.split(",")
        for length in args.lengths.split(",")
        for sample in range(args.samples)
    ]
    flags = (*args.server_flags.split(), *FLAGS, "--chunked-prefill-size", "8192")
    with bar() as progress:
        plans = list(servers(args))
        task = progress.add_task("", total=sum(len(budgets) for *_, budgets in plans) * len(probes))
        for policy, mode, extra, env, budgets in plans:
            todo = [
                (found, budget)
                for budget in budgets
                for found in probes
                if (policy, mode, budget or 0, found.test, found.length, found.sample) not in done
            ]
            progress.update(task, description=f"{policy} {mode}", advance=len(budgets) * len(probes) - len(todo))
            if not todo:
                continue
            server = Server(args.model, (*flags, *extra), env={**ENV, **REPEATABLE, **env})
            with server, ThreadPoolExecutor(args.concurrency) as clients:
                # A prompt that the tree has leaves no queries to choose by.
                for together in [budgets] if mode == "generated" else [[budget] for budget in budgets]:
                    flush(server.url)
                    chosen = [asked for asked in todo if asked[1] in together]
                    for rows in clients.map(lambda asked: ask(server, asked[0], mode, asked[1], tokenizer), chosen):  # noqa: B023
                        append(file, *({"policy": policy, **row} for row in rows))
                        progress.advance(task)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory")
    add("--policies", default=POLICIES, help="name or name:option=value:..., comma separated")
    add("--budgets", default="256,512", help="T, comma separated (default: %(default)s)")
    add("--lengths", default="256,512,1024,2048,4096", help="tokens of a context (default: %(default)s)")
    add("--tests", default="fact,pairs", help="(default: %(default)s)")
    add("--modes", default="read,generated", help="(default: %(default)s)")
    add("--samples", type=int, default=8, help="contexts of each length (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder of rows.jsonl and tables")
    add("--seed", type=int, default=0)
    add("--concurrency", type=int, default=16, help="requests at a time (default: %(default)s)")
    add("--server-flags", default="--device cpu --dtype float32 --sleep-on-idle", help="(default: %(default)s)")
    add("--quick", action="store_true", help="two policies, two short lengths: the plumbing")
    add("--redraw", action="store_true", help="tables of --out only")
    add_docs(parser)
    args = parser.parse_args(argv)
    try:
        if not args.redraw:
            measure(args)
        print(report(args.out, args.docs))
    except (InputError, ServerError, OSError) as error:
        print(f"retrieval: {error}", file=sys.stderr)
        return 2
    return 0
