"""The files, and the parts of pages, that are made from the code: `python -m tests.pages` writes
them again.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import trainer
from tests.options import OPTIONS
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.recipe.checks import SPLIT_BACKWARD, check_processes
from trainer.recipe.key_reference import keys, sections
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS
from trainer.recipe.metric_table import METRICS
from trainer.recipe.mode_table import TRAITS, Traits
from trainer.recipe.recipe_files import shipped_folder, shipped_recipes
from trainer.recipe.schema import EXTENDS, EXTENDS_COMMENT, Recipe

GUIDE = Path(trainer.__file__).parent / "guide"
README = GUIDE.parent.parent / "README.md"
SCHEMA = shipped_folder() / "recipe.schema.json"
REFERENCE = GUIDE / "recipe.md"
USUAL_MODELS = (
    "resnet18",
    "resnet50",
    "vit_b_16",
    "convnext_tiny",
    "efficientnet_b0",
    "swin_t",
    "mobilenet_v3_large",
)
PAGE = """\
# Which keys does a recipe have?

A recipe is a YAML file of these keys. Each line shows an example, the default in parentheses, and
the meaning. On the command line, put quotes around lists. If a recipe leaves out a key, its value
is that of the recipe that it `extends`, or else the default. In a terminal,
`python -m trainer recipes keys NAME` prints a section or a key.
"""
PART = re.compile(r"(<!-- made by python -m tests\.pages: (\w+) -->\n).*?(<!-- end -->)", re.S)
# Number of processes and arguments of each column.
COLUMNS: dict[str, tuple[int, list[str]]] = {}
for _mode, _traits in TRAITS.items():
    if _traits.processes == "either":
        for _ranks, _name, _schedule in ((1, "streams", "streams"), (2, "processes", "1f1b")):
            _words = [f"mode={_mode}", f"pipeline.schedule={_schedule}", "pipeline.microbatches=4"]
            COLUMNS[f"`{_mode}`, {_name}"] = (_ranks, _words)
    elif _traits.processes == "many":
        COLUMNS[f"`{_mode}`"] = (2, [f"mode={_mode}"])
    else:
        _devices = ["devices=[cpu,cpu]"] if _traits.many_devices else []
        COLUMNS[f"`{_mode}`"] = (1, [f"mode={_mode}", *_devices])
PLAIN = "none"


def made() -> dict[Path, Callable[[], str]]:
    """Return the files that are generated from the recipe's schema, each with the function that
    returns its contents.
    """
    return {REFERENCE: reference_page, SCHEMA: schema_text}


def filled(path: Path) -> str:
    """A page with its made parts as they should be."""
    text = path.read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def result_table() -> str:
    """The guide's list of the keys of result.json."""
    from trainer.training.results import Result

    hints = get_type_hints(Result, include_extras=True)
    lines = [
        f"- `{key}`: {hint.__metadata__[0]}"
        for key, hint in hints.items()
        if key in Result.__required_keys__
    ]
    return "\n".join(lines)


def reference_page() -> str:
    """The reference as a Markdown page."""
    parts = [PAGE]
    for section, comment in sections().items():
        parts += [f"## {section}\n\n{comment}\n" if section else ""]
        rows = []
        for key in (key for key in keys().values() if key.section == section):
            values = f" [{key.values}]" if key.values else ""
            rows.append(f"- `{key.example}` (`{key.default}`): {key.comment}{values}")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(part for part in parts if part)


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file, without references, as draft 7, which all editors read."""
    created = Recipe.model_json_schema()
    plain = _inlined(
        {name: created[name] for name in ("type", "additionalProperties", "properties")},
        created["$defs"],
    )
    names = {"model": (*SMALL_MODELS, *USUAL_MODELS), "data": DATASETS, "task": TASKS}
    for section, known_names in names.items():
        plain["properties"][section]["properties"]["name"] |= _usually(known_names)
    for section, content in plain["properties"].items():
        name = content.get("properties", {}).get("name")
        if name is not None:
            # `optimizer: adam` is short for `optimizer: {name: adam}`.
            kinds = [content, name]
            plain["properties"][section] = {
                "description": content.get("description", section),
                "anyOf": kinds,
            }
    extends = {"description": EXTENDS_COMMENT, **_usually(tuple(shipped_recipes()))}
    plain["properties"] = {EXTENDS: extends, **plain["properties"]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A recipe of trainer"}
    return {
        **head,
        "description": "What a run does. Missing keys come from `extends`, or have their default.",
        **plain,
    }


def schema_text() -> str:
    """The text of the shipped file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _usually(names: tuple[str, ...]) -> dict[str, Any]:
    """Any text; an editor offers these."""
    return {
        "type": "string",
        "minLength": 1,
        "examples": [*names],
        "anyOf": [{"enum": [*names]}, {"type": "string"}],
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Return the schema without references, next to which old readers ignore everything else, and
    without titles that repeat names.
    """
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    named = {
        key: {name: _inlined(each, definitions) for name, each in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in node.items()
        if key != "title"
    }
    return named


def modes_table() -> str:
    """The table of modes in the guide."""
    lines = [
        "| mode | processes | devices | same maths as `single` | when |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mode, traits in TRAITS.items():
        lines += [
            f"| {' | '.join((*cells, _same(traits), when))} |"
            for *cells, when in _ways(mode, traits)
        ]
    return "\n".join(lines)


def short_table() -> str:
    """Return the table of modes in README: one row per mode, with the first sentence of when to use
    it.
    """
    lines = ["| mode | equals `single` | when |", "| --- | --- | --- |"]
    for mode, traits in TRAITS.items():
        lines.append(f"| `{mode}` | {_same(traits)} | {traits.when[-1].partition('. ')[0]} |")
    return "\n".join(lines)


def _same(traits: Traits) -> str:
    return "-" if traits.reference else "yes" if traits.same_maths else "no"


def _ways(
    mode: str,
    traits: Traits,
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the variants of a mode: its name, processes and devices in the table's letters, and
    when to use it.
    """
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


def turned_on(option):
    """Return the arguments that turn on an option of `OPTIONS`."""
    if option == PLAIN:
        return []
    key, value = OPTIONS[option]
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}"]


def refusal(option, column):
    """Return the line that refuses a pair before anything starts, or None."""
    count, words = COLUMNS[column]
    try:
        check_processes(
            load("digits", "batch_size=64", "augment.crop=none", *words, *turned_on(option)), count
        )
    except RecipeError as error:
        return str(error)
    return None


def options_table():
    """Return the guide's table of options and modes with the reason of each refusal, after a
    sentence about the options that all modes support.
    """
    lines = [f"| option | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    everywhere = []
    reasons = {}
    for option in OPTIONS:
        cells = []
        for column in COLUMNS:
            line = refusal(option, column)
            why = line.partition(": ")[2] if line else None
            if option == "compile" and column == "`pipeline`, processes":
                *others, last = SPLIT_BACKWARD
                why = (
                    f"not with {', '.join(others)} and {last}, which separate the gradients "
                    "of inputs and weights"
                )
            number = reasons.setdefault(why, len(reasons) + 1) if why else 0
            cells.append(("no" if line else "yes") + f" ({number})" * bool(why))
        if {*cells} == {"yes"}:
            everywhere.append(f"`{option}`")
        else:
            lines.append(f"| `{option}` | {' | '.join(cells)} |")
    *others, last = everywhere
    sentence = textwrap.fill(f"{', '.join(others)} and {last} work in every mode. The others:", 120)
    return "\n".join(
        [sentence, "", *lines, "", *(f"{number}. {why}" for why, number in reasons.items())]
    )


def tasks_table() -> str:
    """The table of tasks in the guide."""
    lines = [
        "| `task.name` | label of an image | loss "
        "| metrics; the first one selects the best epoch |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in TASKS.items():
        lines.append(f"| `{name}` | {row.labels} | {row.loss} | {row.metrics} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """Return the guide's table of metrics."""
    marks = {True: "larger", False: "smaller"}
    lines = ["| metric | tasks | better | meaning |", "| --- | --- | --- | --- |"]
    for name, row in METRICS.items():
        tasks = "all" if len(row.tasks) == len(TASKS) else ", ".join(row.tasks)
        lines.append(f"| `{name}` | {tasks} | {marks[row.larger_is_better]} | {row.meaning} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "modes": modes_table,
    "tasks": tasks_table,
    "metrics": metrics_table,
    "short": short_table,
    "options": options_table,
    "result": result_table,
}


if __name__ == "__main__":
    for path, make in made().items():
        path.write_text(make(), encoding="utf-8")
    for path in (README, *GUIDE.glob("*.md")):
        if (text := filled(path)) != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
