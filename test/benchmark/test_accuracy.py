"""The accuracy and retrieval benchmarks: their statistics, and runs against a server that is only pretended.

The last test is the real thing: the shipped model on real servers.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch

from benchmark.accuracy import report as accuracy_report
from benchmark.accuracy import retrieval
from benchmark.accuracy import run as accuracy
from benchmark.accuracy.processors import ENV, FLAGS, Forced, Seeded
from benchmark.accuracy.reasoning import task as programs
from benchmark.accuracy.report import loops
from benchmark.accuracy.tasks import REASONING_MODEL, InputError, task
from benchmark.common import pages
from benchmark.serving.server import STOCK, Server


def rows_of(shares: dict[str, list[int]], **common: object) -> list[dict]:
    return [{"problem": p, "correct": bool(c), **common} for p, samples in shares.items() for c in samples]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*range(500), *([7] * 128)], True),
        ([*range(500), *([7] * 127)], False),
        ([*range(40), *(list(range(60)) * 3)], True),
        ([*range(40), *(list(range(60)) * 2), *range(59)], False),
        ([*range(40), *(list(range(65)) * 5)], False),  # the n-gram is longer than 64
        ([*(list(range(10)) * 30), 11], False),  # it left the loop
        ([1, 2, 3] * 42, False),  # 126 tokens
        ([1, 2, 3] * 43, True),
        (list(range(1000)), False),
        ([], False),
    ],
)
def test_a_loop_is_a_repeated_ngram_at_the_end(tokens, expected):
    assert loops(tokens) is expected


def test_standard_error_counts_problems_not_samples():
    """Four samples that agree are one observation: the error is that of the four problems."""
    rows = rows_of({"a": [1] * 4, "b": [0] * 4, "c": [1] * 4, "d": [1, 1, 0, 0]})
    mean, error = accuracy_report.pass_at_1(rows)
    assert mean == 0.625
    assert error == pytest.approx(np.std([1, 0, 1, 0.5], ddof=1) / 2)
    assert math.isnan(accuracy_report.pass_at_1(rows_of({"a": [1, 0]}))[1])


def test_difference_is_paired_by_problem():
    """A constant lead over a reference that varies a lot has no spread; problems of one side only do not count."""
    reference = rows_of({str(i): [i % 2, 0] for i in range(40)})
    better = rows_of({**{str(i): [i % 2, 1] for i in range(40)}, "only here": [0]})
    assert accuracy_report.difference(better, reference) == (0.5, 0.5, 0.5)
    assert accuracy_report.difference(rows_of({"a": [1]}), reference) is None


def test_interval_is_that_of_the_mean_difference():
    rng = np.random.default_rng(1)
    ours, theirs = (rows_of({str(i): [v] for i, v in enumerate(rng.random(400) < p)}) for p in (0.6, 0.4))
    mean, low, high = accuracy_report.difference(ours, theirs)
    pairs = [a["correct"] - b["correct"] for a, b in zip(ours, theirs, strict=True)]
    half = 1.96 * np.std(pairs) / 20
    assert mean == pytest.approx(np.mean(pairs))
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.006)
    assert accuracy_report.difference(ours, theirs) == (mean, low, high), "the bootstrap has a seed of its own"


def test_servers_are_shared_by_the_budgets_of_a_variant(tmp_path):
    reasoning = task("reasoning", None, 8, 0, 0.5)
    plain, half = (accuracy.Variant.parse(spec, "protect") for spec in ("vase-attnv", "vase-attnv:reserve=0.5"))
    cells = [accuracy.Cell(reasoning, v, str(c), 400 // c) for v in (plain, half) for c in (2, 4, 8)]
    found = list(accuracy.groups(cells, tmp_path))
    assert [len(members) for *_, members in found] == [3, 1, 1, 1]
    configs = [json.loads(Path(flags[3]).read_text()) for flags, *_ in found]
    assert [c["value_tokens"] for c in configs] == [None, 100, 50, 25]
    behind_prompt = accuracy.Cell(reasoning, half, "2", 200, prompt=120)
    unpinned = replace(behind_prompt, variant=replace(half, prefix="detach"))
    assert (behind_prompt.value_tokens, unpinned.value_tokens) == (50, 100)
    assert [configs[0][name] for name in ("budget", "min_private", "buffer")] == [200, 25, 16]
    with pytest.raises(InputError, match="smaller --buffer"):
        list(accuracy.groups([accuracy.Cell(reasoning, plain, "30", 16)], tmp_path))


@pytest.mark.parametrize("spec", ["vase:reserve=1", "vase:reserve=all", "vase:wings=2", "nobody", "vase:sampling"])
def test_bad_variants_are_named(spec):
    with pytest.raises(InputError, match=f"--policies {spec}"):
        accuracy.Variant.parse(spec, "protect")


def test_sampling_seeds_differ_by_problem_and_sample_but_not_by_policy():
    reasoning = task("reasoning", None, 8, 0, 0.5)
    items = reasoning.load(20)
    variant = accuracy.Variant.parse("vase", "protect")
    cells = [accuracy.Cell(reasoning, None, "1", 0), accuracy.Cell(reasoning, variant, "2", 99)]
    seeds = [[accuracy.Request(c, item, k).seed(5) for item in items for k in range(4)] for c in cells]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 80 and all(0 <= s < 2**31 for s in seeds[0])


class TestTasksOfThePaper:
    """Their problems from ``--data``, prompts and grades from ``sgl-eval``."""

    def test_boxed_answers_are_graded_by_value(self, tmp_path):
        rows = [{"problem": "Half of {1}?", "answer": "\\frac{1}{2}"}, {"problem": "Point?", "answer": "(1, \\pi)"}]
        (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = task("math500", tmp_path, 0, 0, 0.5)
        half, point = found.load(None)
        assert "Half of {1}?" in half.prompt and "\\boxed{}" in half.prompt
        assert found.grade(half, "It is \\boxed{3}, no, \\boxed{0.5}")
        assert not found.grade(half, "It is \\boxed{0.5}, no, \\boxed{3}")
        assert not found.grade(half, "It is 1/2")
        assert found.grade(point, "\\boxed{(1,\\pi)}") and not found.grade(point, "\\boxed{1}")
        assert [item.prompt for item in found.load(1)] == [half.prompt]

    def test_gsm8k_keeps_the_number_of_a_solution(self, tmp_path):
        row = {"question": "How many?", "answer": "She has 1,000 + 234.\n#### 1,234"}
        (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
        found = task("gsm8k", tmp_path, 0, 0, 0.5)
        assert found.grade(found.load(None)[0], "\\boxed{1234}") and not found.grade(
            found.load(None)[0], "\\boxed{234}"
        )
        assert (found.budget, found.reserve) == (512, 0.5)

    def test_choices(self, tmp_path):
        (tmp_path / "gpqa.jsonl").write_text(json.dumps({"problem": "Which?\nA) 1\nB) 2", "answer": "B"}) + "\n")
        found = task("gpqa", tmp_path, 0, 0, 0.5)
        item = found.load(None)[0]
        assert found.grade(item, "Answer: B") and not found.grade(item, "Answer: A")

    def test_aime_comes_with_the_tool(self):
        assert [len(task(name, None, 0, 0, 0).load(None)) for name in ("aime25", "aime26")] == [30, 30]

    def test_a_file_without_answers_is_refused(self, tmp_path):
        (tmp_path / "math.jsonl").write_text('{"problem": "?"}\n')
        with pytest.raises(InputError, match=r"math\.jsonl, row 1: needs problem"):
            task("math500", tmp_path, 0, 0, 0.5).load(None)


def test_tasks_that_cannot_run_say_why(capsys, tmp_path):
    assert accuracy.main(["--task", "livecodebench", "--out", str(tmp_path)]) == 2
    assert "sandbox" in capsys.readouterr().err
    assert accuracy.main(["--task", "chess", "--out", str(tmp_path)]) == 2
    assert "unknown chess; known: reasoning" in capsys.readouterr().err


class Pretended:
    """Stands in for ``Server``: knows every answer of the reasoning task, and forgets half of them when it evicts."""

    started: list[list[str]]

    def __init__(self, model, flags, *, env):
        self.started.append(list(flags))
        config = (
            json.loads(Path(flags[flags.index("--eviction-config") + 1]).read_text())
            if "--eviction-config" in flags
            else None
        )
        known = {p.prompt: p.chain for p in programs.problems("test", 40, 0, 8)}

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                sampling = body["sampling_params"]
                params = sampling["custom_params"]
                budget = params.get("eviction", {"budget": None})["budget"]
                assert (budget is None) == (config is None) and (params["temperature"], params["top_p"]) == (0.6, 0.95)
                right = known[body["text"]]
                wrong = budget is not None and sampling["sampling_seed"] % 2 == 1
                text = "again " * 130 if wrong else right
                meta = {"prompt_tokens": len(body["text"].split()), "completion_tokens": len(text.split())}
                meta["finish_reason"] = {"type": "length" if wrong else "stop"}
                if budget is not None:
                    evicted = {"evictions": 1, "evicted_tokens": 16, "kv_tokens": budget}
                    meta["eviction"] = {"policy": config["policy"], "budget": budget, **evicted}
                ids = [hash(word) for word in text.split()]
                answer = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

        ThreadingHTTPServer.request_queue_size = 128
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def stop(self):
        self._http.shutdown()

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()
        self._http.server_close()


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(Pretended, "started", [], raising=False)
    monkeypatch.setattr(accuracy, "Server", Pretended)
    monkeypatch.setattr(accuracy, "flush", lambda url: None)
    return Pretended


def run(out: Path, *extra: str) -> int:
    sizes = ["--lines", "8", "--spread", "0.5", "--problems", "40", "--samples", "2", "--buffer", "4", "--servers", "2"]
    choice = ["--policies", "vase-dkv,random", "--compression", "2,4", "--prefixes", "protect"]
    return accuracy.main(["--out", str(out), *sizes, *choice, *extra])


def test_a_run_ends_in_rows_tables_and_plots_and_continues(pretended, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{accuracy_report.BEGIN}\nold\n{pages.END}\nafter\n")
    assert run(tmp_path / "out", "--docs", str(page), "--summary", str(page)) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    cells = {name: found for name, found in accuracy_report.grouped(rows)["reasoning"].items()}
    variants = [(v, "protect", c) for v in ("vase-dkv", "random") for c in ("2", "4")]
    assert set(cells) == {accuracy_report.FULL, *variants}
    assert len(rows) == 5 * 80

    trace = accuracy_report.mean_trace(cells[accuracy_report.FULL])
    assert {row["budget"] for row in cells["random", "protect", "4"]} == {round(trace / 4)}
    assert all(row["correct"] for row in cells[accuracy_report.FULL])
    for key in variants:
        assert [row["correct"] for row in cells[key]] == [row["seed"] % 2 == 0 for row in cells[key]]
        assert all(row["at_limit"] == row["loop"] == (not row["correct"]) for row in cells[key])
    text = page.read_text()
    assert text.startswith("before\n") and "\nafter\n" in text and "old" not in text
    assert accuracy_report.BEGIN_SUMMARY in text.partition("\nafter\n")[2]
    assert "| reasoning: parts right, % | 2× compression, protect | 4× compression, protect |" in text
    assert f"| KV tokens held | {round(trace / 2)}–{round(trace / 2)} | {round(trace / 4)}–{round(trace / 4)} |" in text
    assert "| full | – | – | 100.0 ± 0.0 |" in text and "#### 4× compression, prefix protect" in text
    assert "+0.0 [+0.0, +0.0]" in text, "both policies fail on the same problems"
    assert (tmp_path / "images" / "accuracy-reasoning.png").stat().st_size > 1000
    assert len(pretended.started) == 3

    # Half of the rows are lost: only what misses is asked again, and the rest is as it was.
    file = tmp_path / "out" / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:200]))
    assert run(tmp_path / "out") == 0
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(lines)
    assert run(tmp_path / "out") == 0, "nothing left to do"
    assert len(pretended.started) < 3 + 3
    assert run(tmp_path / "out", "--temperature", "1") == 2
    assert "rows have other settings (temperature)" in capsys.readouterr().err


def test_a_broken_server_ends_the_run_with_its_rows_kept(pretended, monkeypatch, tmp_path):
    asked = accuracy.Settings.ask

    def ask(settings, server, request):
        if request.cell.variant is not None and request.item.id == "7":
            raise accuracy.ServerError("gone")
        return asked(settings, server, request)

    monkeypatch.setattr(accuracy.Settings, "ask", ask)
    assert run(tmp_path, "--concurrency", "1") == 2
    kept = len((tmp_path / "rows.jsonl").read_text().splitlines())
    assert 80 + 7 <= kept <= 80 + 2 * 7
    monkeypatch.setattr(accuracy.Settings, "ask", asked)
    assert run(tmp_path) == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 5 * 80


def test_published_figures_stand_beside_ours():
    common = {"task": "aime25", "tokens": 9, "prompt_tokens": 9, "at_limit": False, "loop": False, "kv_tokens": 5}
    full = {"variant": "full", "prefix": "-", "compression": "1", "budget": 0, "evictions": 0}
    ours = {"variant": "vase-attnv", "prefix": "detach", "compression": "paper", "budget": 4096, "evictions": 1}
    rows = rows_of({"a": [1], "b": [0]}, **common, **full) + rows_of({"a": [1], "b": [1]}, **common, **ours)
    other = accuracy_report.table("aime25", "2", "detach", accuracy_report.grouped(rows)["aime25"])
    assert "published" not in other[0]
    names = ("model", "samples", "temperature", "top_p", "new_tokens", "buffer", "seed", "versions")
    text = accuracy_report.tables(rows, {"aime25": dict.fromkeys(names, 1)})
    assert "| full | – | – | 50.0 ± 50.0 | 66.4 |" in text
    assert "| `vase-attnv` | 4096 | 5 | 100.0 ± 0.0 | 59.2 | – | +50.0 [+0.0, +100.0] |" in text
    assert "not measured here: SeerAttention-R 58.6, vase-dkv 57.3" in text.replace("\n", " ")


def asked(chunks: int = 1, **params: object) -> dict[str, object]:
    """A request's parameters as a logit processor gets them; its prompt still has ``chunks`` chunks to go."""
    return {**params, "__req__": SimpleNamespace(extend_end=1, full_untruncated_fill_ids=range(chunks))}


def drawn(logits: list[float], seeds: list[object], temperature: float, top_p: float, steps: int = 1) -> list[int]:
    """Tokens that ``Seeded`` chooses for one request a seed, all with the same logits."""
    params = [asked(seed=seed, temperature=temperature, top_p=top_p) for seed in seeds]
    for _ in range(steps):
        out = Seeded()(torch.tensor([logits] * len(seeds)), params)
        assert (out == 0).sum(-1).tolist() == [1] * len(seeds) and (out.exp().sum(-1) == 1).all()
    return out.argmax(-1).tolist()


def test_seeded_draws_follow_temperature_and_top_p():
    """Against the exact law. Sorted, the weights at temperature 0.5 are 0.73, 0.18, 0.08 and less: 0.9 keeps two."""
    logits = [1.0, 0.3, 1.7, -2.0]
    weights = np.exp(np.array(logits) / 0.5)
    weights /= weights.sum()
    counts = np.bincount(drawn(logits, list(range(4000)), 0.5, 1.0), minlength=4) / 4000
    assert counts == pytest.approx(weights, abs=4 * 0.5 / math.sqrt(4000))
    kept = np.array([weights[0], 0, weights[2], 0]) / (weights[0] + weights[2])
    counts = np.bincount(drawn(logits, list(range(4000)), 0.5, 0.9), minlength=4) / 4000
    assert counts[1] == counts[3] == 0 and counts == pytest.approx(kept, abs=4 * 0.5 / math.sqrt(4000))
    assert set(drawn(logits, list(range(50)), 0.5, 0.01)) == {2}, "the most likely token always stays"


def test_seeded_draws_depend_on_seed_and_step_alone():
    seeds = list(range(30))
    logits = [0.0] * 50
    together = drawn(logits, seeds, 0.6, 0.95)
    assert together == [drawn(logits, [seed], 0.6, 0.95)[0] for seed in seeds]
    assert together == drawn(logits, seeds[::-1], 0.6, 0.95)[::-1]
    assert together != drawn(logits, seeds, 0.6, 0.95, steps=2)
    assert len(set(together)) > 15


def test_forced_tokens_leave_the_rest_to_the_model():
    forced = Forced()
    params = [asked(forced=[2, None, 0]), asked(forced=[None, 1])]
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 1.0, 3.0]])
    assert forced(logits.clone(), params).argmax(-1).tolist() == [2, 2]
    # The second request may run in another batch.
    assert forced(logits[:1].clone(), params[:1]).argmax(-1).tolist() == [1]
    assert forced(logits.clone(), params).argmax(-1).tolist() == [0, 1]


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_chunks_of_a_prompt_do_not_count_as_tokens(chunks):
    params = asked(chunks, forced=[2, 0])
    forced, logits = Forced(), torch.zeros(1, 3)
    for end in range(1, chunks + 1):
        params["__req__"].extend_end = end
        assert forced(logits.clone(), [params]).argmax() == 2
    assert forced(logits.clone(), [params]).argmax() == 0


@pytest.fixture(scope="module")
def words():
    """A tokenizer whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set("".join(map(chr, range(32, 127))) + "\n"))
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(("test", "questions"), [("fact", 1), ("pairs", 4)])
def test_probes_hold_their_answers_once(words, test, questions):
    found = retrieval.probe(test, 3000, 1, 0, words)
    assert found == retrieval.probe(test, 3000, 1, 0, words) != retrieval.probe(test, 3000, 2, 0, words)
    text = words.decode(found.context)
    assert 3000 <= len(text) < 3100 and len(found.questions) == questions
    for question, answer in found.questions:
        assert text.count(words.decode(question).strip() + " " + answer) == 1


def test_retrieval_table_marks_what_was_never_evicted():
    common = {"test": "fact", "mode": "read", "sample": 0, "question": 0, "kv_tokens": 0}
    rows = [
        {**common, "policy": p, "budget": b, "length": n, "right": r, "evictions": e}
        for p, b, n, r, e in [
            *(("full", 0, 256, True, 0), ("full", 0, 512, True, 0)),
            *(("vase", 300, 256, True, 0), ("vase", 300, 512, True, 1), ("vase", 300, 512, False, 1)),
        ]
    ]
    text = retrieval.tables(rows, {"model": "m", "samples": 1, "seed": 0, "versions": "v"})
    assert "| full | 100 | 100 |" in text and "| `vase` | 100* | 50 |" in text


def test_help_names_every_flag():
    flags = {action.dest for action in accuracy.parser()._actions}
    assert {"model", "task", "policies", "compression", "out", "quick", "data", "docs"} <= flags
    assert isinstance(accuracy.parser(), argparse.ArgumentParser)


@pytest.mark.e2e
def test_the_shipped_model_reasons_and_repeats_itself(tmp_path):
    """The CI version of the table: the full cache solves the task, every other request is evicted, and answers asked
    for again are the same bit for bit, whoever else is in the batch."""
    command, file = ["--quick", "--out", str(tmp_path)], tmp_path / "rows.jsonl"
    assert accuracy.main(command) == 0
    lines = file.read_text(encoding="utf-8").splitlines()
    chosen = accuracy_report.grouped([json.loads(line) for line in lines])["reasoning"]
    assert accuracy_report.pass_at_1(chosen.pop(accuracy_report.FULL))[0] >= 0.9
    assert chosen and all(row["evictions"] for found in chosen.values() for row in found)
    kept = [line for index, line in enumerate(lines) if index % 3]
    file.write_text("".join(line + "\n" for line in kept))
    assert accuracy.main(command) == 0
    again = file.read_text(encoding="utf-8").splitlines()
    assert again[: len(kept)] == kept and len(again) == len(lines)
    differ = {*again} ^ {*lines}
    assert not differ, "\n".join(sorted(differ))


@pytest.mark.e2e
def test_forced_tokens_of_a_prompt_in_chunks():
    """Several requests, whose prompts of one to four chunks end in different steps."""
    flags = (*accuracy.SERVER_FLAGS.split(), *FLAGS, "--chunked-prefill-size", "64", "--disable-radix-cache")
    with Server(REASONING_MODEL, flags, env={**ENV, **STOCK}) as server, ThreadPoolExecutor(8) as clients:

        def ask(length: int) -> list[int]:
            forced = [3 + (length + i) % 20 for i in range(12)]
            sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12, "custom_params": {"forced": forced}}
            body = {"input_ids": [5] * length, "sampling_params": sampling, "custom_logit_processor": Forced.to_str()}
            assert requests.post(server.url + "/generate", json=body, timeout=600).json()["output_ids"] == forced
            return forced

        assert len(list(clients.map(ask, (1, 60, 64, 65, 130, 200, 250, 255)))) == 8
