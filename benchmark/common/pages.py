"""The generated parts of the documentation: text between a mark of its own and the next end mark, and plots."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

END = "<!-- end of generated -->"


def add_docs(parser: argparse.ArgumentParser, *, summary: bool = False) -> None:
    """Give a command ``--docs FILE`` for its tables and, if it has a ``summary``, ``--summary FILE`` for that.

    The files must exist: they are written after the work, and found missing before it.
    """

    def page(name: str) -> Path:
        if not Path(name).is_file():
            raise argparse.ArgumentTypeError(f"{name}: no such file; name a Markdown file")
        return Path(name)

    parser.add_argument("--docs", type=page, help="Markdown file whose generated part is rewritten with the tables")
    if summary:
        parser.add_argument("--summary", type=page, help="Markdown file whose generated summary table is rewritten")


def rewrite(page: Path, begin: str, body: str) -> None:
    """Replace what stands between ``begin`` and the next ``END`` of a Markdown file; both are appended if missing."""
    text = page.read_text(encoding="utf-8")
    if begin not in text:
        text = f"{text.rstrip()}\n\n{begin}\n{END}\n"
    start = text.index(begin)
    page.write_text(f"{text[:start]}{begin}\n\n{body}\n{text[text.index(END, start) :]}", encoding="utf-8")


def pictures(page: Path, folder: Path, names: Sequence[str]) -> str:
    """Copy the named PNG files of ``folder`` beside the page; the Markdown that shows them."""
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(folder / name, images / name)
    return "".join(f"![{name}](images/{name})\n" for name in names)
