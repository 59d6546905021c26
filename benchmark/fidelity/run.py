"""How far each policy moves a model's next-token distribution: KL to the full cache, and NLL, on a given text.

``python -m benchmark.fidelity --model DIR --text FILE --tokens 3072 --budgets 512,256 --policies vase-attnv,snapkv``
forces the text through the full cache and, in step with it, through one bounded cache a policy and budget. Text is
fed ``B`` tokens at a time; once a cache holds ``T + B`` entries it is cut to ``T`` by the policy's own code, so every
prediction sees exactly what it would see in serving. Nothing is protected: the policy may evict from position 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file
from sgl_vase_kernels import KVPool, QueryWindow, Rows, ops
from tokenizers import Tokenizer
from torch.nn import functional as F

from benchmark.common.arguments import InputError, parse_policy
from benchmark.common.pages import add_docs, rewrite
from sgl_vase import EvictionConfig, Round, policy_class
from sgl_vase.policy import FIRST_POSITIONS
from sgl_vase.randomness import request_key


class Llama:
    """Forward pass of a Hugging Face Llama checkpoint in float32; attention is the cache's business.

    Raises ``InputError`` for another architecture, scaled RoPE or biases, rather than computing something else.
    """

    def __init__(self, directory: Path) -> None:
        try:
            config = json.loads((directory / "config.json").read_text())
            self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            weights: dict[str, torch.Tensor] = {}
            for file in sorted(directory.glob("*.safetensors")):
                weights |= load_file(file)
        except OSError as error:
            raise InputError(f"--model {directory}: {error}") from error
        if config.get("architectures") != ["LlamaForCausalLM"] or config.get("rope_scaling"):
            raise InputError(f"--model {directory}: a LlamaForCausalLM without rope_scaling is needed")
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise InputError(f"--model {directory}: biases are not supported")
        self.layers: int = config["num_hidden_layers"]
        self.q_heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.dim: int = config.get("head_dim") or config["hidden_size"] // self.q_heads
        self.eps: float = config["rms_norm_eps"]
        self.base: float = config["rope_theta"]
        self.weights = {name: tensor.float() for name, tensor in weights.items()}

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = (positions.double().unsqueeze(-1) * frequencies).float().unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def logits(self, tokens: torch.Tensor, start: int, cache: Cache) -> torch.Tensor:
        """``[tokens, vocabulary]`` for tokens at positions ``start`` and on, appended to ``cache``."""
        positions = torch.arange(start, start + len(tokens))
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q = self._linear(h, f"{name}.self_attn.q_proj").view(len(tokens), self.q_heads, self.dim)
            k = self._linear(h, f"{name}.self_attn.k_proj").view(len(tokens), self.kv_heads, self.dim)
            v = self._linear(h, f"{name}.self_attn.v_proj").view(len(tokens), self.kv_heads, self.dim)
            h = cache.attend(layer, positions, self._rope(q, positions), self._rope(k, positions), v)
            x = x + self._linear(h.flatten(1), f"{name}.self_attn.o_proj")
            h = self._norm(x, f"{name}.post_attention_layernorm")
            h = F.silu(self._linear(h, f"{name}.mlp.gate_proj")) * self._linear(h, f"{name}.mlp.up_proj")
            x = x + self._linear(h, f"{name}.mlp.down_proj")
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self._linear(self._norm(x, "model.norm"), head)


class Cache:
    """One request's keys and values; with a ``config`` it is cut whenever it holds ``T + B`` entries."""

    def __init__(self, model: Llama, capacity: int, config: EvictionConfig | None = None) -> None:
        self.config = config
        self.policy = policy_class(config.policy)(config.options) if config else None
        shape = (model.layers, capacity, model.kv_heads, model.dim)
        self.pool = KVPool.from_slots(list(torch.zeros(shape)), list(torch.zeros(shape)))
        self.length = self.carried = self.rounds = 0
        self.seconds = 0.0
        self.queries = self.state = None
        if config and self.policy and self.policy.needs_queries:
            self.queries = torch.zeros(model.layers, 1, config.buffer, model.q_heads, model.dim)
        if self.policy and self.policy.needs_state:
            self.state = torch.zeros(model.layers, model.kv_heads, capacity)

    def attend(
        self, layer: int, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append ``k`` and ``v``, return causal attention ``[tokens, q_heads, dim]`` over all entries."""
        end = self.length + len(q)
        keys, values = self.pool.k[layer][:, 0], self.pool.v[layer][:, 0]
        keys[self.length : end], values[self.length : end] = k, v
        if self.queries is not None:
            ops.store_queries(self.queries[layer], torch.zeros_like(positions), positions, q)
        mask = torch.ones(len(q), end, dtype=torch.bool).tril(end - len(q))
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys[:end], values[:end]))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def grow(self, tokens: int, position: int) -> None:
        """``tokens`` were appended, ``position`` is the next one; evict if due."""
        self.length += tokens
        if self.config is None or self.policy is None:
            return
        plan = self.config.plan_row(self.length, 0)
        if plan is None:
            return
        begin = time.perf_counter()
        buffer = self.config.buffer
        rows = Rows(
            slots=torch.arange(self.length),
            lengths=(self.length,),
            buffer=buffer,
            first=(0,),
            keep=(plan.keep,),
            reserve=(plan.reserve,),
            sinks=(min(FIRST_POSITIONS, self.length - buffer),),
            seed=(request_key(self.config.seed, 0),),
            round=(self.rounds,),
            carried=(self.carried,),
        )
        queries = None
        if self.queries is not None:
            scale = self.queries.shape[-1] ** -0.5
            queries = QueryWindow(self.queries, (0,), (position,), (min(position, buffer),), scale)
        kept = self.policy.select(Round(self.pool, rows, queries, self.state))
        ops.compact(self.pool, rows, kept, keep_order=self.policy.needs_order)
        self.length, self.carried = plan.target, plan.keep
        self.rounds += 1
        self.seconds += time.perf_counter() - begin


@dataclass
class Result:
    """Means in nats over all predictions of the text; ``round_ms``: one eviction round, in milliseconds."""

    policy: str
    budget: int | None
    rounds: int = 0
    kl: float = 0.0
    nll: float = 0.0
    round_ms: float = 0.0


@torch.inference_mode()
def measure(
    model: Llama, text: str, tokens: int, configs: dict[tuple[str, int], EvictionConfig], buffer: int
) -> list[Result]:
    """Force the first ``tokens`` tokens of ``text`` through the full cache and every config; the full cache first."""
    ids = torch.tensor(model.tokenizer.encode(text).ids[:tokens])
    if len(ids) < tokens:
        raise InputError(f"--text has {len(ids)} tokens, --tokens asks for {tokens}")
    results = [Result("full cache", None)]
    caches = [Cache(model, tokens)]
    for (label, budget), config in configs.items():
        results.append(Result(label, budget))
        caches.append(Cache(model, config.footprint() + buffer, config))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(range(0, tokens, buffer)) * len(caches))
        for start in range(0, tokens, buffer):
            chunk, targets = ids[start : start + buffer], ids[start + 1 : start + buffer + 1]
            expected = None
            for result, cache in zip(results, caches, strict=True):
                progress.update(task, description=f"{result.policy} {result.budget or ''}")
                got = F.log_softmax(model.logits(chunk, start, cache), -1)[: len(targets)]
                cache.grow(len(chunk), start + len(chunk))
                expected = got if expected is None else expected
                result.kl += F.kl_div(got, expected, reduction="sum", log_target=True).item() / (tokens - 1)
                result.nll += F.nll_loss(got, targets, reduction="sum").item() / (tokens - 1)
                progress.advance(task)
    for result, cache in zip(results, caches, strict=True):
        result.rounds, result.round_ms = cache.rounds, 1e3 * cache.seconds / max(1, cache.rounds)
    return results


BEGIN = "<!-- generated: python -m benchmark.fidelity -->"


def markdown(results: list[Result], settings: dict[str, Any]) -> str:
    """One row a policy; KL and NLL at each budget."""
    budgets = list(dict.fromkeys(r.budget for r in results if r.budget))
    cells = {(r.policy, r.budget): r for r in results}
    full, head = results[0], ["policy", *(f"KL at {b}" for b in budgets), *(f"NLL at {b}" for b in budgets)]
    lines = [head, ["---"] * len(head), [full.policy, *["0"] * len(budgets), *[f"{full.nll:.3f}"] * len(budgets)]]
    for policy in dict.fromkeys(r.policy for r in results if r.budget):
        row = [cells[policy, b] for b in budgets]
        lines.append([f"`{policy}`", *(f"{r.kl:.4f}" for r in row), *(f"{r.nll:.3f}" for r in row)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\nNats a token; {', '.join(f'{name} {value}' for name, value in settings.items())}.\n"


def show(results: list[Result], console: Console) -> None:
    """Print one line a policy and budget."""
    table = Table("policy", "budget", "rounds", "KL", "NLL", "ms a round")
    for r in results:
        values = (str(r.budget or "-"), str(r.rounds), f"{r.kl:.4f}", f"{r.nll:.4f}", f"{r.round_ms:.0f}")
        table.add_row(r.policy, *values)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.fidelity", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of a Llama checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of the text to use (default: %(default)s)")
    parser.add_argument("--budgets", default="512,256", help="budgets T, comma separated (default: %(default)s)")
    parser.add_argument("--buffer", type=int, default=64, help="buffer B (default: %(default)s)")
    parser.add_argument("--policies", required=True, help="name or name:option=value:..., comma separated")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write every figure to")
    add_docs(parser)
    args = parser.parse_args(argv)
    try:
        if args.tokens < 2:
            raise InputError(f"--tokens must be >= 2, got {args.tokens}")
        if not all(b.isdecimal() for b in args.budgets.split(",")):
            raise InputError(f"--budgets must be whole numbers, comma separated, got {args.budgets!r}")
        configs = {}
        for spec in args.policies.split(","):
            name, options = parse_policy(spec)
            for budget in map(int, args.budgets.split(",")):
                configs[spec, budget] = EvictionConfig(name, budget, args.buffer, seed=args.seed, options=options)
        text = args.text.read_text(encoding="utf-8")
        results = measure(Llama(args.model), text, args.tokens, configs, args.buffer)
    except (ValueError, OSError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    show(results, Console())
    settings = {"tokens": args.tokens, "buffer": args.buffer, "seed": args.seed}
    if args.json:
        args.json.write_text(json.dumps({**settings, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    if args.docs:
        rewrite(args.docs, BEGIN, markdown(results, settings))
    return 0
