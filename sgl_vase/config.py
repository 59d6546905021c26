"""What is kept: the configuration of an eviction policy, and the arithmetic of budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sgl_vase.registry import policy_class

PREFIX_MODES = ("protect", "detach")
PREFILL_MODES = ("off", "on")


def _whole(flag: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{flag} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{flag} must be {bound}, got {value}")
    return value


@dataclass(frozen=True)
class RowPlan:
    """How one row is cut: ``length`` entries become ``target = protected + keep + buffer``."""

    protected: int
    length: int
    target: int
    keep: int
    reserve: int


@dataclass(frozen=True)
class EvictionConfig:
    """A policy's name and sizes, all in tokens. Raises ``ValueError`` naming the flag.

    ``budget``: ``T``, slots a request keeps after a round, buffer included.
    ``buffer``: ``B``, newest tokens always kept = decode steps between rounds = query window.
    ``value_tokens``: ``N_v``, reserved by value range; ``None``: a quarter of the private budget.
    ``min_private``: ``M``, private slots beside a protected prefix however long it is;
    ``None``: ``min(T, max(T // 2, 2 B))``.
    ``prefill``: ``on`` gives the radix tree the first ``T - M`` tokens of a prompt only, the rest is evictable.
    ``options``: switches of the policy itself, see its ``Options`` class.
    """

    policy: str = "vase-attnv"
    budget: int = 4096
    buffer: int = 64
    value_tokens: int | None = None
    min_private: int | None = None
    prefix: Literal["protect", "detach"] = "protect"
    prefill: Literal["off", "on"] = "off"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cls = policy_class(self.policy)
        object.__setattr__(self, "policy", cls.name)
        _whole("--eviction-buffer", self.buffer, 1)
        _whole("--eviction-budget", self.budget, self.buffer + 1)
        for flag, value, modes in (("prefix", self.prefix, PREFIX_MODES), ("prefill", self.prefill, PREFILL_MODES)):
            if value not in modes:
                raise ValueError(f"--eviction-{flag} must be one of {', '.join(modes)}, got {value!r}")
        if self.value_tokens is not None:
            _whole("--eviction-value-tokens", self.value_tokens, 0, self.budget - self.buffer)
        if self.min_private is not None:
            _whole("--eviction-min-private", self.min_private, self.buffer + 1, self.budget)
        _whole("--eviction-seed", self.seed, 0, 2**64 - 1)
        cls.parse_options(self.options)
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> EvictionConfig:
        """Read a JSON object of fields; ``overrides`` that are not ``None`` win."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"--eviction-config {path}: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"--eviction-config {path}: a JSON object is needed, got {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(
                f"--eviction-config {path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        asked, named = overrides.get("policy"), data.get("policy")
        if asked and named and policy_class(asked) is not policy_class(named):
            raise ValueError(f"--eviction-config {path} is for {named}, --eviction says {asked}: change one of them")
        return cls(**{**data, **{k: v for k, v in overrides.items() if v is not None}})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for logs and ``/server_info``."""
        return {f.name: dict(v) if isinstance(v := getattr(self, f.name), Mapping) else v for f in fields(self)}

    def resolved(self) -> dict[str, Any]:
        """``as_dict`` with the defaults that depend on other sizes as they are for an unshared row."""
        plan = self.plan_row(self.footprint(), 0)
        assert plan is not None
        return {**self.as_dict(), "value_tokens": plan.reserve, "min_private": self.private_floor}

    def for_request(self, asked: object) -> EvictionConfig | None:
        """What one request is served with if it asks for ``"none"`` or ``{"budget": T}``.

        A request may ask for any budget from this server's private floor on: the query ring is sized for
        that. Raises ``ValueError`` with the allowed range.
        """
        allowed = f'"none" or {{"budget": a whole number >= {self.private_floor}}}'
        if asked == "none":
            return None
        if not isinstance(asked, Mapping) or set(asked) != {"budget"}:
            raise ValueError(f"eviction of a request must be {allowed}, got {asked!r}")
        try:
            budget = _whole("budget", asked["budget"], self.private_floor)
        except ValueError as error:
            raise ValueError(f"eviction of a request must be {allowed}: {error}") from None
        floor = min(budget, max(self.private_floor, budget // 2))
        value_tokens = None if self.value_tokens is None else min(self.value_tokens, budget - self.buffer)
        return replace(self, budget=budget, min_private=floor, value_tokens=value_tokens)

    @property
    def private_floor(self) -> int:
        """``M``: private slots that a request keeps beside its protected prefix."""
        if self.min_private is not None:
            return self.min_private
        return min(self.budget, max(self.budget // 2, 2 * self.buffer))

    def shared(self, prompt: int) -> int:
        """How many leading tokens of a prompt the radix tree may be given, page rounding aside.

        With ``prefill`` on, no more than leave ``T_eff = T``.
        """
        return prompt if self.prefill == "off" else min(prompt, self.budget - self.private_floor)

    def target(self, protected: int) -> int:
        """``T_eff = max(T, P + M)``: entries of a row after a round."""
        return max(self.budget, protected + self.private_floor)

    def footprint(self, protected: int = 0) -> int:
        """Most entries that a decoding row ever has: ``T_eff + B``."""
        return self.target(protected) + self.buffer

    def plan_row(self, length: int, protected: int) -> RowPlan | None:
        """The cut of a row of ``length`` entries, or ``None`` while it is within its footprint.

        Rounds are due on the *physical* length reaching ``T_eff + B``; between rounds it
        grows by one a step, so this is METHOD's ``(L - T) % B == 0`` without its cold start.
        """
        target = self.target(protected)
        if length < target + self.buffer:
            return None
        keep = target - protected - self.buffer
        auto = (target - protected) // 4
        reserve = min(keep, auto if self.value_tokens is None else self.value_tokens)
        return RowPlan(protected, length, target, keep, reserve)
