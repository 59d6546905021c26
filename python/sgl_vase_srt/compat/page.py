"""The tables of docs/compatibility.md: ``python -m sgl_vase_srt.compat --markdown [FILE]``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from sgl_vase_srt.compat.refusals import ENVIRONMENT, MODEL, REQUEST, SERVER, Refusal
from sgl_vase_srt.compat.works import WORKS

BEGIN, END = "<!-- generated: python -m sgl_vase_srt.compat --markdown -->", "<!-- end of generated -->"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
        "",
    ]


def _refusals(title: str, head: str, table: Iterable[Refusal], quote: str = "`") -> list[str]:
    rows = ((f"{quote}{r.flag}{quote} {r.limit}".rstrip(), r.why, r.fix) for r in table)
    return [f"### {title}", "", *_table((head, "why", "instead"), rows)]


def markdown() -> str:
    """The tables of ``docs/compatibility.md``."""
    lines = [BEGIN, "", "## Refused", ""]
    lines += _refusals("Server flags", "flag", SERVER)
    lines += _refusals("Models", "property", MODEL, quote="")
    lines += _refusals("Environment variables", "variable", ENVIRONMENT)
    lines += _refusals("Requests (HTTP 400)", "field", REQUEST)
    for status, title in (
        ("tested", "Works, tested"),
        ("argued", "Works, for a reason"),
        ("untested", "Allowed, not tested"),
        ("unused", "Without effect: belongs to what is refused"),
    ):
        groups = (w for w in WORKS if w.status == status)
        rows = ((w.what, w.why, " ".join(f"`{name}`" for name in w.fields)) for w in groups)
        lines += [f"## {title}", "", *_table(("what", "why", "server fields"), rows)]
    return "\n".join([*lines, END]) + "\n"


def main(argv: list[str]) -> int:
    match argv:
        case ["--markdown"]:
            print(markdown(), end="")
        case ["--markdown", file]:
            text = Path(file).read_text()
            before, _, rest = text.partition(BEGIN)
            _, _, after = rest.partition(END + "\n")
            Path(file).write_text(before + markdown() + after)
        case _:
            print("usage: python -m sgl_vase_srt.compat --markdown [FILE]", file=sys.stderr)
            return 2
    return 0
