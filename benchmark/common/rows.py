"""Rows of a measurement: their file, ``rows.jsonl``, to which each is added as it is measured, and Markdown tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """All rows. Raises ``OSError`` if there is no such file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def append(file: Path, *rows: Row) -> None:
    """One JSON object a line."""
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The lines of a table with a column for each key, which all rows have in the same order. At least one row."""
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (rows[0], *(row.values() for row in rows)))
    return [head, "|" + "---|" * len(rows[0]), *lines]
