"""The files, and the parts of pages, that are made from the code: `python -m tests.pages` writes them again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_type_hints

import trainer
from trainer.recipe.key_reference import keys, schema_text, sections
from trainer.recipe.mode_table import TRAITS, Traits
from trainer.recipe.recipe_files import shipped_folder

GUIDE = Path(trainer.__file__).parent / "guide"
README = GUIDE.parent.parent / "README.md"
SCHEMA = shipped_folder() / "recipe.schema.json"
REFERENCE = GUIDE / "recipe.md"
PAGE = """\
# Every key of a recipe

A recipe is a YAML file of these keys. On the command line, write them as in the first column, and put quotes around
lists. A key that a recipe leaves out has the value of the recipe that it `extends`, or else its default. In a terminal,
`python -m trainer recipes keys NAME` shows a section or a key.
"""
PART = re.compile(r"(<!-- made by python -m tests\.pages: (\w+) -->\n).*?(<!-- end -->)", re.S)


def made() -> dict[Path, Callable[[], str]]:
    """Each file that is made from the recipe's schema, with what makes what it should hold."""
    return {REFERENCE: reference_page, SCHEMA: schema_text}


def filled(path: Path) -> str:
    """A page with its made parts as they should be."""
    text = path.read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def _options() -> str:
    from tests.modes.test_modes import table

    return table()


def result_table() -> str:
    """The guide's table of the keys of result.json."""
    from trainer.training.results import Result

    hints = get_type_hints(Result, include_extras=True)
    lines = ["| key | meaning |", "| --- | --- |"]
    lines += [f"| `{key}` | {hint.__metadata__[0]} |" for key, hint in hints.items() if key in Result.__required_keys__]
    return "\n".join(lines)


def reference_page() -> str:
    """The reference as a Markdown page."""
    parts = [PAGE]
    for section, comment in sections().items():
        parts += [f"## {section}\n\n{comment}\n" if section else ""]
        rows = ["| key and example | default | meaning |", "| --- | --- | --- |"]
        for key in (key for key in keys().values() if key.section == section):
            cells = (f"`{key.example}`", f"`{key.default}`", key.comment + f" [{key.values}]" * bool(key.values))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(part for part in parts if part)


def modes_table() -> str:
    """The table of modes in the guide."""
    lines = ["| mode | processes | devices | same maths as `single` | when |", "| --- | --- | --- | --- | --- |"]
    for mode, traits in TRAITS.items():
        lines += [f"| {' | '.join((*cells, _same(traits), when))} |" for *cells, when in _ways(mode, traits)]
    return "\n".join(lines)


def short_table() -> str:
    """The table of modes in README: one row a mode, with the first sentence of when to take it."""
    lines = ["| mode | equals `single` | when |", "| --- | --- | --- |"]
    for mode, traits in TRAITS.items():
        lines.append(f"| `{mode}` | {_same(traits)} | {traits.when[-1].partition('. ')[0]} |")
    return "\n".join(lines)


def _same(traits: Traits) -> str:
    return "-" if traits.reference else "yes" if traits.same_maths else "no"


def _ways(mode: str, traits: Traits) -> Iterator[tuple[str, str, str, str]]:
    """How a mode runs: its name, processes and devices in the table's letters, and when to take it."""
    when, *over_processes = traits.when
    each = "1 each, or all on one card" if traits.shares_devices else "1 each"
    each = "shared CPU memory" if traits.shared_memory else each
    several = "P" if traits.staged else "N"
    if traits.processes == "many":
        yield f"`{mode}`", "N", each, when
    elif traits.processes == "one":
        yield f"`{mode}`", "1", "1" if traits.single_device else several, when
    else:
        yield f"`{mode}` in one process", "1", several, when
        yield f"`{mode}` over processes", "P x R", each, over_processes[0]


PARTS: dict[str, Callable[[], str]] = {
    "modes": modes_table,
    "short": short_table,
    "options": _options,
    "result": result_table,
}


if __name__ == "__main__":
    for path, make in made().items():
        path.write_text(make(), encoding="utf-8")
    for path in (README, *GUIDE.glob("*.md")):
        if (text := filled(path)) != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
