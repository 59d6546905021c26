"""The checks that read the tables of refusals. Each raises one sentence with every reason and remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl_vase_srt.compat import refusals


class Unsupported(ValueError):
    """A combination that eviction refuses; the message is one sentence."""


def _refuse(table: Iterable[refusals.Refusal], view: Any) -> None:
    if found := [str(refusal) for refusal in table if refusal.when(view)]:
        raise Unsupported(f"--eviction does not support {'; '.join(found)}")


def check_server_args(cfg: Any) -> None:
    """Check resolved server args (``resolving_view(server_args)`` after ``resolve_once``).

    Raises ``Unsupported`` with one sentence that names every refused flag, its reason and what to do.
    """
    _refuse(refusals.SERVER, cfg)


def check_model(model_config: Any) -> None:
    """Check SGLang's ``ModelConfig`` the same way; needs no weights."""
    _refuse(refusals.MODEL, model_config)


def check_environment() -> None:
    """Check SGLang's environment variables the same way."""
    from sglang.srt.environ import envs

    _refuse(refusals.ENVIRONMENT, envs)


def check_request(request: Any) -> None:
    """Check one request (``GenerateReqInput`` of a single prompt, or its tokenized form) the same way."""
    _refuse(refusals.REQUEST, request)
