"""Logit processors that the benchmarks send along with a request; a server unpickles them from this module.

The server needs ``--enable-custom-logit-processor`` and this project's root on its path: ``FLAGS`` and ``ENV``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

FLAGS = ("--enable-custom-logit-processor",)
ENV = {"PYTHONPATH": str(Path(__file__).parents[2])}


def _step(params: dict[str, Any]) -> int:
    """How many tokens of the request were decided here before; the dictionary lives as long as the request.

    The logits of a prompt's chunks decide nothing until the last: SGLang drops their token.
    """
    request, step = params["__req__"], params.get("step", 0)
    params["step"] = step + (request.extend_end >= len(request.full_untruncated_fill_ids))
    return int(step)


class Seeded(CustomLogitProcessor):  # type: ignore[misc]
    """Draws the token itself, from ``custom_params``' ``seed``, ``temperature`` and ``top_p``; the rest becomes -inf.

    SGLang honours a request's seed only with ``--enable-deterministic-inference``, which needs a GPU. Here token ``n``
    of a request depends on its logits, its seed and ``n`` alone: the point of the cumulative distribution, most
    likely tokens first, that a uniform number hits. Send it with temperature 0.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        rows = custom_param_list or []
        draws = [(random.Random(f"{p['seed']} {_step(p)}").random(), p["temperature"], p["top_p"]) for p in rows]
        uniform, temperature, top_p = torch.tensor(draws, dtype=torch.float64, device=logits.device).T.unsqueeze(-1)
        weights, tokens = (logits / temperature.float()).softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights[weights.cumsum(-1) - weights > top_p] = 0
        cumulative = weights.double().cumsum(-1)
        chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        return logits.fill_(float("-inf")).scatter_(1, tokens.gather(1, chosen), 0)


class Forced(CustomLogitProcessor):  # type: ignore[misc]
    """Makes a request generate ``custom_params["forced"]``: token ids, ``None`` where the model is free."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or (), strict=True):
            token = params["forced"][_step(params)]
            if token is not None:
                row.fill_(float("-inf"))
                row[token] = 0
        return logits
