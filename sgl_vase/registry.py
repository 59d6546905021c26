"""Policies by name. Every module in ``sgl_vase.policies`` is imported once and registers its classes."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_vase.policy import Policy


@cache
def _classes() -> dict[str, type[Policy]]:
    from sgl_vase import policies
    from sgl_vase.policy import Policy

    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(policies.__path__):
        for value in vars(importlib.import_module(f"{policies.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Policy) and "name" in vars(value):
                for name in (value.name, *value.aliases):
                    if found.setdefault(name, value) is not value:
                        raise RuntimeError(f"two policies are called {name!r}")
    return found


def policy_names() -> list[str]:
    """Every name and alias that ``--eviction`` accepts, besides ``none``; the default first."""
    return sorted(_classes(), key=lambda name: (not name.startswith("vase"), name))


def policy_class(name: str) -> type[Policy]:
    """The class called ``name``. Raises ``ValueError`` listing what there is."""
    try:
        return _classes()[name]
    except KeyError:
        raise ValueError(f"--eviction must be one of none, {', '.join(policy_names())}, got {name!r}") from None
