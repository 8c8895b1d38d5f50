"""The files that are made from the recipe's schema: `python -m tests.pages` writes them again."""

from __future__ import annotations

from pathlib import Path

import trainer
from trainer.recipe.editor import schema_file, schema_text
from trainer.recipe.keys import reference_page

REFERENCE = Path(trainer.__file__).parent / "guide" / "recipe.md"


def made() -> dict[Path, str]:
    """Each file with what it should hold."""
    return {REFERENCE: reference_page(), schema_file(): schema_text()}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
