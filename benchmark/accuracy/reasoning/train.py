"""Train the reasoning model from scratch on one CPU core, or evaluate it.

    python -m benchmark.accuracy.reasoning.train --out DIR [--minutes N] [--resume]
    python -m benchmark.accuracy.reasoning.train --out DIR --check

``DIR`` becomes a model directory that SGLang serves, with a card saying how it was made. Training stops after its plan
or after ``--minutes``, whichever comes first, and on Ctrl-C; ``--resume`` goes on from ``DIR/training.pt`` as if it had
never stopped. ``--check`` measures greedy accuracy on held-out problems with transformers and renews the card.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from benchmark.accuracy.reasoning import task, tokenizer

CHECKPOINT = "training.pt"
FACTS = "training.json"
SPREADS = (0.0, 0.5, 1.0)
QUERIES = 4
SAVE_EVERY = 100


@dataclass(frozen=True)
class Stage:
    """``steps`` optimizer steps on batches of about ``tokens`` tokens, each of programs of one length in a range.

    The range matters: with a few fixed lengths the model learns at which distance to copy instead of what to look for.
    """

    steps: int
    shortest: int  # lines
    longest: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights."""

    stages: tuple[Stage, ...] = (
        Stage(450, 8, 24, 4096),
        Stage(450, 4, 48, 4096),
        Stage(450, 16, 96, 6144),
        Stage(150, 48, 128, 8192),
    )
    hidden: int = 192
    feed_forward: int = 512
    layers: int = 4
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warm_up: int = 50
    decay: float = 0.4  # the last part of the steps, over which both rates fall linearly to zero
    seed: int = 0
    compile: bool = True

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage of step ``step``, counted from 0."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError("the plan has no such step")

    def rate(self, step: int) -> float:
        """The factor on both learning rates at step ``step``."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / (self.decay * self.steps))


@dataclass(frozen=True)
class Batch:
    """Traces of equal shape: ``ids`` (n, length) int64, of which the first ``prompt`` columns are the prompt."""

    ids: torch.Tensor
    prompt: int
    lines: int


def batch(plan: Plan, step: int) -> Batch:
    """The training batch of one step; a function of the plan's seed and the step alone, so there is no data state."""
    rng = random.Random(f"{plan.seed} {step}")
    stage = plan.stage(step)
    lines = rng.randint(stage.shortest, stage.longest)
    rows: list[list[int]] = []
    prompt = 0
    while not rows or (len(rows) + 0.5) * len(rows[0]) < stage.tokens:
        problem = task.draw(rng, lines, min(QUERIES, lines), rng.choice(SPREADS))
        if task.split_of(problem.prompt) == "train":
            ids = tokenizer.encode(problem.prompt)
            prompt = len(ids)
            rows.append(ids + tokenizer.encode(problem.chain))
    return Batch(torch.tensor(rows), prompt, lines)


def accuracies(right: torch.Tensor, lines: int) -> dict[str, float]:
    """Mean accuracy by kind of token from ``right`` (n, chain length) bool; the answer's values are look-ups."""
    steps = lines * task.STEP
    kinds = task.kinds() * lines + ["format", *["format", "lookup"] * ((right.shape[1] - steps - 2) // 2), "format"]
    return {
        kind: right[:, [index for index, each in enumerate(kinds) if each == kind]].float().mean().item()
        for kind in ("lookup", "result", "format")
    }


@dataclass
class Trainer:
    """The model, its optimizers and the number of steps taken. Muon moves the matrices, AdamW the rest."""

    plan: Plan = field(default_factory=Plan)
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        config = Qwen3Config(
            vocab_size=len(task.VOCABULARY),
            hidden_size=plan.hidden,
            intermediate_size=plan.feed_forward,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.query_heads,
            num_key_value_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            max_position_embeddings=4096,
            # A slow rotation leaves half of a head's dimensions to match tokens at any distance.
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            initializer_range=0.04,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.IDS[task.PAD],
            eos_token_id=tokenizer.IDS[task.EOS],
            bos_token_id=None,
        )
        # Plain matrix products: PyTorch's fused attention is several times slower at these sizes on a CPU.
        config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            self.model = Qwen3ForCausalLM(config)
        for layer in self.model.model.layers:
            torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.5)  # sharper attention to start with
        matrices = [each for each in self.model.model.layers.parameters() if each.ndim == 2]
        known = {id(each) for each in matrices}
        rest = [each for each in self.model.parameters() if id(each) not in known]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=plan.muon_rate, weight_decay=0.0), plan.muon_rate),
            (torch.optim.AdamW(rest, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0), plan.adam_rate),
        ]
        if plan.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=True)

    def advance(self) -> dict[str, float]:
        """Take one step; returns the loss (nats a token) and the accuracies on its batch, which is fresh data."""
        begin = time.monotonic()
        data = batch(self.plan, self.step)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(data.ids[:, :-1], use_cache=False).last_hidden_state[:, data.prompt - 1 :]
            logits = (hidden @ self.model.model.embed_tokens.weight.T).float()
        target = data.ids[:, data.prompt :]
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.plan.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += data.ids.numel()
        self.seconds += time.monotonic() - begin
        return {"loss": loss.item(), **accuracies(logits.argmax(-1) == target, data.lines)}

    def save(self, path: Path) -> None:
        """Write the whole state, leaving either the old or the new file whatever happens."""
        state = {
            "plan": asdict(self.plan),
            "counts": {"step": self.step, "seconds": self.seconds, "tokens": self.tokens},
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, plan: Plan) -> Trainer:
        """The trainer that ``save`` wrote. Raises ``ValueError`` if it followed another plan."""
        state = torch.load(path, weights_only=True)
        if state["plan"] != asdict(plan):
            raise ValueError(f"{path} was made by another training plan; train into a new --out")
        trainer = cls(plan, **state["counts"])
        trainer.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return trainer

    def export(self, out: Path) -> None:
        """Write the model (bf16), its tokenizer and the facts for its card into ``out``."""
        model = Qwen3ForCausalLM(self.model.config)
        model.load_state_dict(self.model.state_dict())
        model.to(torch.bfloat16).save_pretrained(out)
        config = self.model.config
        GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id).save_pretrained(out)
        tokenizer.build().save_pretrained(out)
        facts = {
            "plan": asdict(self.plan),
            "steps": self.step,
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
            "finished": _today(),
        }
        (out / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        write_card(out)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


@torch.inference_mode()
def check(out: Path, lines: int, n: int = 64, seed: int = 1) -> dict[str, Any]:
    """Greedy accuracy of the model in ``out`` on ``n`` held-out problems, its whole cache kept."""
    model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    words = tokenizer.build()
    problems = task.problems("test", n, seed, lines, min(QUERIES, lines))
    # Programs of one shape have prompts of one length: no padding.
    ids = torch.tensor([tokenizer.encode(problem.prompt) for problem in problems])
    longest = len(problems[0].chain.split())
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=longest)
    texts = [words.decode(row[ids.shape[1] :]) for row in made]
    pairs = list(zip(problems, texts, strict=True))
    return {
        "lines": lines,
        "prompt_tokens": ids.shape[1],
        "chain_tokens": longest,
        "problems": n,
        "accuracy": sum(task.grade(*pair) for pair in pairs) / n,
        "chains_without_error": sum(task.first_error(*pair) is None for pair in pairs) / n,
    }


def write_card(out: Path) -> None:
    """Write ``out/README.md`` from the facts in ``out/training.json``."""
    facts = json.loads((out / FACTS).read_text())
    plan = facts["plan"]
    stages = "\n".join(
        f"| {each['steps']} | {each['shortest']} to {each['longest']} | {each['tokens']} |" for each in plan["stages"]
    )
    planned = sum(each["steps"] for each in plan["stages"])
    checks = "\n".join(
        f"| {each['lines']} | {each['prompt_tokens']} | {each['chain_tokens']} | {each['problems']} "
        f"| {each['accuracy']:.1%} | {each['chains_without_error']:.1%} | {each['date']} |"
        for each in facts.get("checks", [])
    )
    (out / "README.md").write_text(
        f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# A small model that reasons in long chains

A Qwen3-architecture model of {facts["parameters"]:,} parameters ({plan["layers"]} layers, hidden size {plan["hidden"]},
{plan["query_heads"]} query and {plan["kv_heads"]} KV heads of {plan["head_dim"]} dimensions), bf16. It works out
straight-line programs step by step, and each step needs a value computed at an earlier step, so it measures what a
policy that evicts generated tokens loses. It can do nothing else. The task is described in
`benchmark/accuracy/reasoning/task.py`; its data are made by a program, no other data was used.

## How it was made

`python -m benchmark.accuracy.reasoning.train --out DIR`: {facts["steps"]} of the plan's {planned} steps,
{facts["tokens"]:,} tokens (prompts included) in {facts["minutes"]} minutes on a CPU ({facts["machine"]}), seed
{plan["seed"]}, torch {facts["versions"]["torch"]}, transformers {facts["versions"]["transformers"]}, finished
{facts["finished"]}. Muon (rate {plan["muon_rate"]}) for the matrices, AdamW (rate {plan["adam_rate"]}) for the rest.
Loss on the chain only.

| steps | lines of the programs | tokens a step |
|---|---|---|
{stages}

## Held-out accuracy

Full cache, greedy, by `python -m benchmark.accuracy.reasoning.train --out DIR --check`. Test programs are told from
training programs by a hash of their text.

| lines | prompt tokens | generated tokens | problems | right answers | chains without any error | date |
|---|---|---|---|---|---|---|
{checks}
"""
    )


def keep_memory() -> None:
    """Ask glibc not to return freed memory: mapping it anew each step costs about as much as the arithmetic."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def run(trainer: Trainer, out: Path, minutes: float, console: Console) -> None:
    """Train to the end of the plan or for ``minutes``, saving as it goes; Ctrl-C saves and returns."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    begin = time.monotonic()
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("compiling", total=trainer.plan.steps, completed=trainer.step)
        try:
            while trainer.step < trainer.plan.steps and time.monotonic() - begin < minutes * 60:
                report = trainer.advance()
                text = " ".join(f"{name} {value:.4f}" for name, value in report.items())
                progress.update(bar, completed=trainer.step, description=text)
                if trainer.step % SAVE_EVERY == 0:
                    trainer.save(out / CHECKPOINT)
                    progress.console.print(f"step {trainer.step} {trainer.seconds / 60:.1f} min {text}")
        except KeyboardInterrupt:
            progress.console.print("stopped; go on with --resume")
    trainer.save(out / CHECKPOINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model directory")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long (default: never)")
    parser.add_argument("--resume", action="store_true", help=f"go on from {CHECKPOINT} in --out")
    parser.add_argument("--check", action="store_true", help="measure the model in --out instead of training")
    parser.add_argument("--lines", default="24,48,84,96", help="the program lengths of --check")
    arguments = parser.parse_args()
    out: Path = arguments.out
    console = Console()
    keep_memory()
    if arguments.check:
        if not (out / FACTS).exists():
            parser.error(f"--out {out} holds no trained model; train one first, without --check")
        facts = json.loads((out / FACTS).read_text())
        facts["checks"] = []
        for lines in map(int, arguments.lines.split(",")):
            facts["checks"].append({**check(out, lines), "date": _today()})
            console.print(facts["checks"][-1])
        (out / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        write_card(out)
        return
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.resume and (out / CHECKPOINT).exists():
        parser.error(f"{out / CHECKPOINT} exists: add --resume to go on from it, or choose another --out")
    if arguments.resume and not (out / CHECKPOINT).exists():
        parser.error(f"there is no {out / CHECKPOINT} to go on from: leave out --resume")
    trainer = Trainer.load(out / CHECKPOINT, Plan()) if arguments.resume else Trainer()
    run(trainer, out, arguments.minutes, console)
    trainer.export(out)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
