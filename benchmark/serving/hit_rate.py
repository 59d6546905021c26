"""Radix-cache hits of serving with eviction against stock SGLang, token by token.

    python -m benchmark.hit_rate --model DIR --out DIR [--docs docs/prefix-sharing.md]

Eight workloads on one real server after the other. Every request is held against the rule of its server: the tree
holds every prompt, and the output of every request that was never evicted (of every request on stock SGLang). So
each row has what the server hit, and what SGLang's own rule would have hit on the same requests and answers. They
may differ only where an evicted answer is sent again. Raw rows go to ``rows.jsonl`` as they are measured; a second
call continues where the first stopped. The exit status is 1 if a hit differs from its rule, or from stock's where
the workload says it must not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import requests
import sglang as sgl
from sglang.benchmark.datasets.generated_shared_prefix import sample_generated_shared_prefix_requests
from sglang.lang.backend import runtime_endpoint
from transformers import AutoTokenizer

from benchmark.common.machine import machine, named
from benchmark.common.pages import add_docs, rewrite
from benchmark.common.progress import bar
from benchmark.common.rows import Row, append, markdown_table, read
from benchmark.serving.metrics import counters
from benchmark.serving.server import Server, flush
from benchmark.serving.variants import PRODUCTION, Variant, evicting
from docs.examples import tree_of_thought as example

SHARED_FLAGS = ("--enable-metrics", "--random-seed", "1", "--page-size", "1", "--max-total-tokens", "16384")
METRICS_LAG = 10  # seconds
BEGIN = "<!-- generated: python -m benchmark.hit_rate -->"


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Client:
    """Sends requests to a server and keeps, for each, its hit beside the hits that the rules predict.

    Requests that run at once must share no more than earlier requests have left in the tree: which of them is
    first is chance, and the prediction knows only what has been answered.
    """

    def __init__(self, server: Server, tokenizer: Any) -> None:
        self.url = server.url
        self.tokenizer = tokenizer
        self.rows: list[Row] = []
        self._by_stock: list[list[int]] = []  # what the tree would hold by stock's rule,
        self._by_rule: list[list[int]] = []  # and by that of this server
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def ask(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Exactly ``new_tokens`` greedy tokens after ``prompt``."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        response = self._watch(body, lambda: requests.post(self.url + "/generate", json=body, timeout=900))
        output: list[int] = response.json()["output_ids"]
        return output

    def ask_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """All at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, new_tokens), prompts))

    def frontend(self) -> contextlib.AbstractContextManager[Any]:
        """Watch what SGLang's frontend language sends."""
        send = runtime_endpoint.http_request

        def watched(url: str, json: Any = None, **rest: Any) -> Any:
            post = functools.partial(send, url, json=json, **rest)
            return self._watch(json, post) if url.endswith("/generate") else post()

        return mock.patch.object(runtime_endpoint, "http_request", watched)

    def _watch(self, body: dict[str, Any], post: Callable[[], Any]) -> Any:
        """The response of ``post()``, which sends ``body``: one prompt, or a list of texts."""
        texts = [body["text"]] if isinstance(body.get("text"), str) else body.get("text", ())
        prompts = [self.ids(text) for text in texts] or [body["input_ids"]]
        # At least the last token is computed, and all whose log-probabilities are asked for.
        most = body["logprob_start_len"] if body.get("return_logprob") else sys.maxsize
        with self._lock:
            hits = [
                [
                    min(max((shared(prompt, held) for held in tree), default=0), len(prompt) - 1, most)
                    for tree in (self._by_stock, self._by_rule)
                ]
                for prompt in prompts
            ]
        response = post()
        if response.status_code != 200:
            raise RuntimeError(f"the server answered {response.status_code}: {response.text}")
        answers = response.json()
        with self._lock:
            for prompt, answer, (by_stock, by_rule) in zip(
                prompts, answers if isinstance(answers, list) else [answers], hits, strict=True
            ):
                meta = answer["meta_info"]
                evictions = meta.get("eviction", {}).get("evictions", 0)
                # The last token of an answer was never an input.
                whole = prompt + answer["output_ids"][:-1]
                self._by_stock.append(whole)
                self._by_rule.append(prompt if evictions else whole)
                self.rows.append(
                    {
                        **{key: meta[key] for key in ("prompt_tokens", "cached_tokens", "completion_tokens")},
                        "stock_rule": by_stock,
                        "rule": by_rule,
                        "evictions": evictions,
                    }
                )
        return response


@dataclass(frozen=True)
class Workload:
    """``run(client, *args)`` sends the requests.

    ``equal``: the protected tree must hit what stock's hits, to the token. ``evicts``: some answer outgrows the
    budget; otherwise none does.
    """

    run: Callable[..., None]
    args: tuple[Any, ...]
    equal: bool
    evicts: bool


def generated_shared_prefix(client: Client, groups: int, prompts: int, new_tokens: int) -> None:
    """SGLang's own prompts. The first of each group alone, then all others at once."""
    random.seed(1)
    np.random.seed(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = sample_generated_shared_prefix_requests(
            num_groups=groups,
            prompts_per_group=prompts,
            system_prompt_len=512,
            question_len=64,
            output_len=new_tokens,
            range_ratio=1.0,
            tokenizer=client.tokenizer,
            seed=1,
            send_routing_key=True,  # or it would reuse a file in the home folder, whichever model that was for
            ordered=True,
            input_ids=True,
        )
    ids = [row.prompt for row in found]
    for leader in ids[::prompts]:
        client.ask(leader, new_tokens)
    client.ask_all([prompt for i, prompt in enumerate(ids) if i % prompts], new_tokens)


def few_shot(client: Client, questions: int, new_tokens: int) -> None:
    """Solved sums, prefilled once, then one to solve: all questions at once."""
    rng = random.Random(1)
    sums = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(20)]
    shots = "".join(f"Question: What is {a} plus {b}?\nAnswer: {a} plus {b} is {a + b}.\n\n" for a, b in sums)
    head = client.ids(f"{shots}Question: What is ")
    client.ask(head, 1)
    # The first digit is where the questions part.
    client.ask_all([head + client.ids(f"{111 * i} plus 28?\nAnswer:") for i in range(1, 1 + questions)], new_tokens)


SYSTEM = """\
You are the guide of a small museum by the sea. Visitors come with questions about the harbour, the boats, the work \
and the food of the people who lived here a hundred years ago. Answer in full sentences and in some detail. Name the \
tools that were used, the hours that were kept and the weather that was feared. When a visitor asks for a letter, a \
list or a table, write one. When you are not certain, say what is known and what is only told. Never mention prices, \
never send a visitor away, and end with something that can still be seen in the house today: an oar, a net, a stove, \
a logbook, a photograph, a lamp."""
TALKS = (
    ("Describe a harbour at dawn.", "Who works there?", "What do they eat?", "Write it as a letter."),
    ("How is bread made?", "Which step fails most often?", "What about rye?", "Put it in a table."),
)


def chat(client: Client, turns: int, reasoning: int, answer: int, resend: bool) -> None:
    """Conversations that run at once and send their history again, with the reasoning part or without.

    The template opens the reasoning for the model, and drops that opening with it. The last answers are cut short:
    nobody sends them again.
    """
    head = client.ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    speak, think = client.ids("<|im_end|>\n<|im_start|>assistant\n"), client.ids("<think>\n")
    end = client.ids("<|im_end|>\n<|im_start|>user\n")
    histories = [list(head) for _ in TALKS]
    client.ask(head, 1)
    for turn in range(turns):
        prompts = [[*past, *client.ids(talk[turn]), *speak] for past, talk in zip(histories, TALKS, strict=True)]
        new_tokens = reasoning + answer if turn < turns - 1 else 1
        outputs = client.ask_all([[*prompt, *think] for prompt in prompts], new_tokens)
        said = [[*think, *output] if resend else output[reasoning:] for output in outputs]
        histories = [[*prompt, *words, *end] for prompt, words in zip(prompts, said, strict=True)]


def tree_of_thought(client: Client, tokens: int, keep: int) -> None:
    """The example of the docs, unchanged."""
    with client.frontend():
        example.tree_of_thought.run(
            question=example.QUESTION,
            approaches=example.APPROACHES,
            tokens=tokens,
            keep=keep,
            temperature=0,
            backend=sgl.RuntimeEndpoint(client.url, chat_template_name="chatml"),
        )


def workloads(budget: int, quick: bool) -> dict[str, Workload]:
    """Every workload by name. With a buffer of a quarter of the budget, the long answers outgrow any footprint."""
    groups, questions, turns = ((1, 3), 3, 2) if quick else ((2, 4), 8, 4)
    long, short, answer = budget + budget // 4, budget // 4, budget // 8
    return {
        "generated-shared-prefix": Workload(generated_shared_prefix, (*groups, long), True, True),
        "few-shot": Workload(few_shot, (questions, long), True, True),
        "chat-reasoning-dropped": Workload(chat, (turns, long - answer, answer, False), True, True),
        "chat-resent-short": Workload(chat, (turns, short - answer, answer, True), True, False),
        "chat-resent-evicted": Workload(chat, (turns, long - answer, answer, True), False, True),
        "tree-of-thought-short": Workload(tree_of_thought, (short, 0), True, False),
        "tree-of-thought-dropped": Workload(tree_of_thought, (long, 40), True, True),
        "tree-of-thought-evicted": Workload(tree_of_thought, (long, 0), False, True),
    }


def measure(server: Server, workload: Workload, tokenizer: Any) -> Row:
    """One workload on an empty tree."""
    flush(server.url)
    before = counters(server)
    client = Client(server, tokenizer)
    workload.run(client, *workload.args)
    until = time.monotonic() + METRICS_LAG
    # The last request may be counted a moment after it was answered.
    while (after := counters(server))["prompt_tokens"] - before["prompt_tokens"] < sum(
        row["prompt_tokens"] for row in client.rows
    ) and time.monotonic() < until:
        time.sleep(0.2)
    sums = ("prompt_tokens", "cached_tokens", "stock_rule", "rule", "evictions", "completion_tokens")
    return {
        "requests": len(client.rows),
        **{key: sum(row[key] for row in client.rows) for key in sums},
        "evicted_requests": sum(bool(row["evictions"]) for row in client.rows),
        **{f"counted_{key}": after[key] - before[key] for key in ("prompt_tokens", "cached_tokens")},
        "equal": workload.equal,
        "evicts": workload.evicts,
        "each": client.rows,
    }


def violations(row: Row, stock: Row) -> list[str]:
    """What is wrong with a row of a server with a protected tree, or of stock itself."""
    found = []
    if row["cached_tokens"] != row["counted_cached_tokens"] or row["prompt_tokens"] != row["counted_prompt_tokens"]:
        found.append("the answers and /metrics count other tokens")
    if wrong := [i for i, request in enumerate(row["each"]) if request["cached_tokens"] != request["rule"]]:
        found.append(f"requests {wrong} did not hit what the rule says")
    if row["equal"] and row["cached_tokens"] != row["stock_rule"]:
        found.append(f"hit {row['cached_tokens']} tokens, stock would hit {row['stock_rule']}")
    # Lengths differ only where texts are sent, and the two servers wrote other texts.
    same = row["prompt_tokens"] == stock["prompt_tokens"]
    if row["equal"] and same and row["cached_tokens"] != stock["cached_tokens"]:
        found.append(f"hit {row['cached_tokens']} tokens, stock {stock['cached_tokens']}")
    if row is not stock and row["evicts"] != bool(row["evicted_requests"]):
        found.append(f"{row['evicted_requests']} requests were evicted")
    if not row["cached_tokens"]:
        found.append("nothing was hit")
    return found


def markdown(rows: Sequence[Row]) -> str:
    """The section of the docs: one line a workload and server."""
    some = rows[0]
    cells = [
        {
            "workload": name,
            "server": row["server"],
            "requests (evicted)": f"{row['requests']} ({row['evicted_requests']})",
            "evictions": row["evictions"],
            "prompt tokens": f"{row['prompt_tokens']:,}",
            "cached tokens": f"{row['cached_tokens']:,}",
            "hit rate": f"{row['cached_tokens'] / row['prompt_tokens']:.1%}",
            "tree of every prompt and output": f"{row['stock_rule']:,}",
        }
        for name in dict.fromkeys(row["workload"] for row in rows)
        for row in rows
        if row["workload"] == name
    ]
    lines = [
        "## Hit rates",
        "",
        f"Model {some['model']}; budget {some['budget']}; {some['machine']}; {some['date']}; "
        f"{named(some['versions'])}.",
        "",
        *markdown_table(cells),
        "",
        "The last column is SGLang's rule: what a tree that holds every prompt and every output would have hit on the",
        "same requests and answers. `-dropped`: the history is sent without its reasoning. `-short`: no answer",
        "outgrows the budget. `-evicted`: evicted answers are sent again; their prompts are hit, they are not.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl and table.md")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument(
        "--policies", default="vase,vase-dkv", help="the first is also run with --eviction-prefix detach"
    )
    parser.add_argument("--workloads", default="all", help="names, comma separated, or all")
    parser.add_argument("--quick", action="store_true", help="a few requests: the plumbing")
    parser.add_argument("--server-flags", default="--device cpu --sleep-on-idle --dtype float32")
    add_docs(parser)
    args = parser.parse_args(argv)

    table = workloads(args.budget, args.quick)
    names = list(table) if args.workloads == "all" else args.workloads.split(",")
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--workloads: unknown {', '.join(unknown)}; known: {', '.join(table)}")
    policies = args.policies.split(",")
    variants = [PRODUCTION]
    for policy, prefix in (*((policy, "protect") for policy in policies), (policies[0], "detach")):
        more = ("--eviction-buffer", str(args.budget // 4), "--eviction-prefix", prefix)
        variants.append(Variant(f"{policy}, {prefix}", (*evicting(policy, args.budget).flags, *more)))
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rows.jsonl"

    def saved() -> dict[tuple[str, str], Row]:
        return {(row["workload"], row["server"]): row for row in (read(file) if file.exists() else [])}

    flags = (*args.server_flags.split(), *SHARED_FLAGS)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with bar() as progress:
        task = progress.add_task("hit rates", total=len(names) * len(variants))
        for variant in variants:
            todo = [name for name in names if (name, variant.name) not in saved()]
            progress.advance(task, len(names) - len(todo))
            if not todo:
                continue
            progress.update(task, description=f"starting {variant.name}")
            with Server(args.model, (*flags, *variant.flags), env=variant.env) as server:
                for name in todo:
                    progress.update(task, description=f"{variant.name}: {name}")
                    row = {
                        "workload": name,
                        "server": variant.name,
                        "model": args.model.name,
                        "budget": args.budget,
                        "flags": [*flags, *variant.flags],
                        **machine(),
                        **measure(server, table[name], tokenizer),
                    }
                    append(file, row)
                    progress.advance(task)

    rows = saved()
    text = markdown(list(rows.values()))
    (args.out / "table.md").write_text(text)
    if args.docs is not None:
        rewrite(args.docs, BEGIN, text)
    print(text)
    wrong = [
        f"{name}, {server}: {sentence}"
        for (name, server), row in rows.items()
        if not server.endswith("detach")
        for sentence in violations(row, rows[name, "stock"])
    ]
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return bool(wrong)
