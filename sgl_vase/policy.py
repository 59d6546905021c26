"""The one interface that every eviction policy implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows

FIRST_POSITIONS = 4
"""Attention sinks: a request's first positions, kept by the policies that know them."""


@dataclass(frozen=True)
class Round:
    """Everything one eviction round may look at; ``None`` is what the policy did not ask for.

    ``state``: float32 ``[layers, kv_heads, slots]``, one number a token that the policy reads for
    the first ``carried`` candidates of a row and writes for its survivors' new places.
    """

    pool: KVPool
    rows: Rows
    queries: QueryWindow | None = None
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class NoOptions:
    """A policy without switches."""


class Policy(ABC):
    """Chooses, for each layer, KV head and request, the ``keep`` candidates that stay.

    A subclass in ``sgl_vase/policies/`` is found by its ``name``; nothing else is edited.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    needs_queries: ClassVar[bool] = False
    """Ask the runtime to keep the last ``buffer`` post-RoPE queries of every layer."""
    needs_order: ClassVar[bool] = False
    """Candidates must lie in time order: compaction then keeps it."""
    needs_state: ClassVar[bool] = False
    """One float32 a token, layer and KV head that lives as long as the token (``Round.state``)."""
    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = self.parse_options(options or {})

    @classmethod
    def parse_options(cls, options: Mapping[str, Any]) -> Any:
        """The policy's ``Options``; raises ``ValueError`` naming an unknown or bad switch."""
        known = {f.name for f in fields(cls.Options)}
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"--eviction {cls.name} has no option {', '.join(unknown)}; known: {', '.join(sorted(known)) or 'none'}"
            )
        return cls.Options(**options)

    def state_bytes(self, *, layers: int, q_heads: int, dim: int, window: int, itemsize: int) -> int:
        """Bytes of side state a request needs: the query window, or nothing."""
        return layers * window * q_heads * dim * itemsize if self.needs_queries else 0

    @abstractmethod
    def select(self, round: Round) -> torch.Tensor:
        """Survivors, int64 ``[layers, kv_heads, sum(keep)]``: candidate indices, ascending in each row."""


def switch(name: str, value: object) -> None:
    """Raise ``ValueError`` unless the option is a boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"option {name} must be true or false, got {value!r}")


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless the option is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"option {name} must be one of {', '.join(allowed)}, got {value!r}")


def positive(name: str, value: object) -> None:
    """Raise ``ValueError`` unless the option is a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"option {name} must be a whole number >= 1, got {value!r}")


def odd(name: str, value: object) -> None:
    """Raise ``ValueError`` unless the option is an odd whole number >= 1."""
    positive(name, value)
    if not value % 2:  # type: ignore[operator]
        raise ValueError(f"option {name} must be odd, got {value!r}")
