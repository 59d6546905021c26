"""The tasks of ``benchmark.accuracy``: problems, how they are put to the model, and who grades the answers.

``reasoning`` is this project's own task, for the model shipped with it. The others are those of the VaSE paper: their
prompts are written and their answers graded by SGLang's evaluation tool, ``sgl-eval``, through its ``EvalSpec.run``.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from benchmark.common.arguments import InputError

REASONING_MODEL = Path(__file__).parent / "reasoning" / "model"


@dataclass(frozen=True)
class Item:
    """One problem. ``prompt`` is sent as it is, or as the user's message of a chat; ``source`` is the grader's."""

    id: str
    prompt: str
    source: Any


@dataclass(frozen=True)
class Task:
    """A task and its defaults.

    ``chat``: the prompt goes through the model's chat template. ``samples`` per problem; ``new_tokens``: most tokens
    of an answer, prompt not included; ``buffer``: ``--eviction-buffer``. ``budget``: ``T`` of the paper's runs, if it
    has any; ``reserve``: their ``N_v`` as a share of ``T``, where it is not a quarter.
    ``partial(item, text)``: share of the answer that is right, where an answer has parts.
    ``load(n)``: the first ``n`` problems (``None``: all); ``grade(item, text)``: main thread only, graders use signals.
    """

    name: str
    chat: bool
    samples: int
    new_tokens: int
    buffer: int
    load: Callable[[int | None], list[Item]]
    grade: Callable[[Item, str], bool]
    budget: int | None = None
    reserve: float | None = None
    partial: Callable[[Item, str], float] | None = None

    def grades(self, item: Item, text: str) -> dict[str, Any]:
        """``correct``, and ``partial`` where answers have parts."""
        parts = {} if self.partial is None else {"partial": self.partial(item, text)}
        return {"correct": self.grade(item, text), **parts}


@dataclass(frozen=True)
class Paper:
    """Where a task of the paper comes from: its ``sgl-eval`` name, a file of ``--data``, pinned Hub datasets."""

    spec: str
    file: str
    budget: int
    samples: int
    hub: tuple[tuple[str, str | None, str, str], ...] = ()
    """Hub name, configuration, split, revision; empty: ``sgl-eval`` brings or fetches the problems itself."""
    reserve: float | None = None


PAPER_TOKENS = 32768
"""Prompt and answer together, in all runs of the paper."""

PAPER = {
    "aime25": Paper("aime25", "aime25.jsonl", 4096, 16),
    "aime26": Paper("aime26", "aime26.jsonl", 4096, 16),
    "hmmt25": Paper(
        *("gsm8k", "hmmt.jsonl", 4096, 16),
        (
            ("MathArena/hmmt_feb_2025", None, "train", "6fdc4277120810ff75aa22d2d5489b91f7a262a1"),
            ("MathArena/hmmt_nov_2025", None, "train", "118dbfb45c4c9467c672268ed55166642897aa46"),
        ),
    ),
    "math500": Paper(
        *("gsm8k", "math.jsonl", 1024, 4),
        (("HuggingFaceH4/MATH-500", None, "test", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),),
    ),
    "gpqa": Paper("gpqa", "gpqa.jsonl", 2048, 8),
    "gsm8k": Paper(
        *("gsm8k", "gsm8k.jsonl", 512, 1),
        (("openai/gsm8k", "main", "test", "740312add88f781978c0658806c59bc2815b9866"),),
        reserve=0.5,
    ),
}
"""HMMT25 is February and November 2025 together. ``gsm8k`` stands for ``sgl-eval``'s general mathematics prompt."""

GPQA = ("Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd")
TASKS = ("reasoning", *PAPER, "livecodebench")


def task(name: str, data: Path | None, lines: int, seed: int, spread: float) -> Task:
    """The task called ``name``. Raises ``InputError`` when it is unknown or cannot be run here."""
    if name == "reasoning":
        return reasoning(lines, seed, spread)
    if name == "livecodebench":
        raise InputError(
            "--task livecodebench: its answers are programs that a grader must run in a sandbox; sgl-eval 0.1.3 has no "
            "such grader. Serve the model with --eviction and use LiveCodeBench's own runner (release_v6)"
        )
    if name not in PAPER:
        raise InputError(f"--task: unknown {name}; known: {', '.join(TASKS)}")
    graded = Graded(name, PAPER[name], data)
    paper = PAPER[name]
    return Task(
        *(name, True, paper.samples, PAPER_TOKENS, 64, graded.load, graded.grade),
        budget=paper.budget,
        reserve=paper.reserve,
    )


def reasoning(lines: int, seed: int, spread: float) -> Task:
    """The shipped task: straight-line programs, the answer must be right to the last value."""
    from benchmark.accuracy.reasoning import task as programs

    def load(n: int | None) -> list[Item]:
        found = programs.problems("test", n or 100, seed, lines, spread=spread)
        return [Item(str(index), problem.prompt, problem) for index, problem in enumerate(found)]

    # Half as long again as the chain: what has not answered by then has lost its way.
    limit = programs.STEP * lines * 3 // 2
    return Task(
        *("reasoning", False, 1, limit, 16, load, lambda item, text: programs.grade(item.source, text)),
        partial=lambda item, text: programs.values_right(item.source, text),
    )


@dataclass(frozen=True)
class Graded:
    """A task of the paper, with the prompt and the grader of ``sgl-eval``."""

    name: str
    paper: Paper
    data: Path | None

    @cached_property
    def _tool(self) -> tuple[Any, Any]:
        try:
            from sgl_eval import registry, types

            return registry.get(self.paper.spec), types
        except (ImportError, KeyError) as error:  # without its own dependencies it knows no task
            raise InputError(f"--task {self.name}: pip install 'sgl-eval==0.1.3' ({error})") from error

    def _run(self, answer: Callable[[list[dict[str, str]]], str], examples: list[Any] | None, n: int | None) -> Any:
        spec, types = self._tool
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            return spec.run(
                sampler=lambda messages, gen: types.Sample(text=answer(messages)),
                gen=types.GenConfig(),
                n_repeats=1,
                num_examples=n,
                num_threads=1,
                load_examples=None if examples is None else lambda _: examples,
            )

    def load(self, n: int | None) -> list[Item]:
        rows = self._rows(n)
        _, types = self._tool
        examples = None
        if rows is not None:
            examples = [types.Example(row["id"], {"problem": row["problem"]}, row["answer"]) for row in rows]
        prompts: list[str] = []

        def ask(messages: list[dict[str, str]]) -> str:
            prompts.append(messages[-1]["content"])
            return ""

        try:
            results = self._run(ask, examples, n).per_example
        except OSError as error:
            raise self._missing(error) from error
        return [Item(r.example.id, prompt, r.example) for r, prompt in zip(results, prompts, strict=True)]

    def grade(self, item: Item, text: str) -> bool:
        return bool(self._run(lambda _: text, [item.source], None).per_example[0].scores[0])

    def _rows(self, n: int | None) -> list[dict[str, str]] | None:
        """``id``, ``problem`` and ``answer`` of each problem; ``None``: ``sgl-eval`` has them."""
        if self.data is not None and (file := self.data / self.paper.file).exists():
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            where = str(file)
        elif self.paper.hub:
            rows = [row for source in self.paper.hub for row in self._hub(*source)]
            where = self.paper.hub[0][0]
        else:
            if self.name == "gpqa":
                self._check_gpqa()
            return None
        return [_row(row, index, where) for index, row in enumerate(rows[:n])]

    def _hub(self, name: str, config: str | None, split: str, revision: str) -> list[dict[str, Any]]:
        from datasets import load_dataset

        try:
            return list(load_dataset(name, config, split=split, revision=revision))
        except Exception as error:  # the Hub's client has no common base of its errors
            raise self._missing(error) from error

    def _check_gpqa(self) -> None:
        """``sgl-eval`` fetches the newest revision: refuse another one than the pinned."""
        from huggingface_hub import HfApi

        name, revision = GPQA
        try:
            found = HfApi().dataset_info(name).sha
        except Exception as error:
            raise self._missing(error) from error
        if found != revision:
            raise InputError(
                f"--task gpqa: {name} is at {found}, pinned is {revision}; give --data DIR with gpqa.jsonl"
            )

    def _missing(self, error: Exception) -> InputError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return InputError(
            f"--task {self.name}: its problems could not be fetched ({reason}); give --data DIR with {self.paper.file}"
        )


def _row(row: dict[str, Any], index: int, where: str) -> dict[str, str]:
    problem = row.get("problem", row.get("question"))
    answer = row.get("answer", row.get("expected_answer"))
    if problem is None or answer is None:
        raise InputError(f"{where}, row {index + 1}: needs problem (or question) and answer (or expected_answer)")
    _, mark, final = str(answer).rpartition("#### ")  # GSM8K's answers end in "#### 1,234"
    return {"id": str(index), "problem": problem, "answer": final.replace(",", "") if mark else final}


@cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def chat_ids(model: Path, prompt: str) -> list[int]:
    """Token ids of a chat with one user message, ready for the answer. Raises ``InputError`` without a template."""
    tokenizer = _tokenizer(model)
    if not tokenizer.chat_template:
        raise InputError(f"--model {model}: its tokenizer has no chat template, which this task needs")
    messages = [{"role": "user", "content": prompt}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids
