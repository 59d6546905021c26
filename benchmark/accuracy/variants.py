"""A policy with its options, and the flags of a server that runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmark.common.arguments import InputError, parse_policy
from sgl_vase import EvictionConfig

Prefix = Literal["protect", "detach"]


@dataclass(frozen=True)
class Variant:
    """A policy with its options. ``reserve``: ``N_v`` as a share of ``T_eff - P``, ``None``: the server's default."""

    name: str
    policy: str
    options: str
    prefix: Prefix
    reserve: float | None

    @classmethod
    def parse(cls, spec: str, prefix: Prefix) -> Variant:
        """From ``policy:option=value:...``, where ``reserve`` is an option too. Raises ``InputError``."""
        try:
            policy, options = parse_policy(spec)
            reserve = options.pop("reserve", None)
            if reserve is not None and not (isinstance(reserve, (int, float)) and 0 <= reserve < 1):
                raise ValueError(f"reserve must be a share of the budget in [0, 1), got {reserve}")
            EvictionConfig(policy, prefix=prefix, options=options)
        except ValueError as error:
            raise InputError(f"--policies {spec}: {error}") from None
        return cls(spec, policy, json.dumps(options, sort_keys=True), prefix, reserve)


def private_floor(budget: int, buffer: int) -> int:
    """``M`` of every policy here: half the budget, or what leaves a candidate beside the buffer."""
    return max(budget // 2, buffer + 1)


def eviction_flags(
    variant: Variant, budgets: Sequence[int], buffer: int, value_tokens: int | None, out: Path
) -> tuple[str, ...]:
    """Flags of a server that serves a variant at all ``budgets``, chosen by request; its configuration goes to ``out``.

    Raises ``InputError`` for sizes that the policy cannot have.
    """
    if min(budgets) <= buffer:
        raise InputError(f"a budget of {min(budgets)} tokens needs a smaller --buffer than {buffer}")
    # A request's private floor is half its own budget, but never below its server's.
    floor = private_floor(min(budgets), buffer)
    try:
        config = EvictionConfig(
            *(variant.policy, max(budgets), buffer, value_tokens, floor),
            prefix=variant.prefix,
            options=json.loads(variant.options),
        )
    except ValueError as error:
        raise InputError(f"--policies {variant.name}: {error}") from None
    file = out / "configs" / f"{variant.name.replace(':', '-')}-{variant.prefix}-{value_tokens}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config.as_dict(), indent=1) + "\n")
    return "--eviction", config.policy, "--eviction-config", str(file)
