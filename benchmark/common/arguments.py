"""What several commands read from their arguments."""

import json
from typing import Any


class InputError(ValueError):
    """An argument cannot be used; the message names it and the way out."""


def parse_policy(spec: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value:…``; values are JSON, or words."""
    name, *options = spec.split(":")
    parsed = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise InputError(f"--policies: option {option!r} of {name} needs a value, as in {name}:{option}=1")
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return name, parsed
