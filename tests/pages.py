"""The files, and the parts of pages, that are made from the code: `python -m tests.pages` writes them again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import trainer
from trainer.recipe.key_reference import reference_page, schema_file, schema_text
from trainer.recipe.traits import modes_table, short_table

GUIDE = Path(trainer.__file__).parent / "guide"
README = GUIDE.parent.parent / "README.md"
REFERENCE = GUIDE / "recipe.md"
PART = re.compile(r"(<!-- made by python -m tests\.pages: (\w+) -->\n).*?(<!-- end -->)", re.S)


def made() -> dict[Path, Callable[[], str]]:
    """Each file that is made from the recipe's schema, with what makes what it should hold."""
    return {REFERENCE: reference_page, schema_file(): schema_text}


def filled(path: Path) -> str:
    """A page with its made parts as they should be."""
    text = path.read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def _options() -> str:
    from tests.modes.test_modes import table

    return table()


def _result() -> str:
    from trainer.training.results import table

    return table()


PARTS: dict[str, Callable[[], str]] = {
    "modes": modes_table,
    "short": short_table,
    "options": _options,
    "result": _result,
}


if __name__ == "__main__":
    for path, make in made().items():
        path.write_text(make(), encoding="utf-8")
    for path in (README, *GUIDE.glob("*.md")):
        if (text := filled(path)) != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
