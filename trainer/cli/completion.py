"""Command `completion bash|zsh`: a shell script that completes commands, keys and recipes.

The script contains all names, so that pressing Tab does not start Python; the shell itself
completes files and folders. The templates are next to this file, and both shells share
`completion.sh`.
"""

from collections.abc import Sequence
from pathlib import Path

from trainer.cli.command_table import COMMANDS
from trainer.cli.grammar import format_program
from trainer.cli.guide import list_topics
from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes
from trainer.recipe.checks import list_refused_schedules
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS, torchvision_classifiers
from trainer.recipe.reflection import choices, defaults

SHELLS = ("bash", "zsh")


def command(words: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise RecipeError(
            f"completion knows two shells: type {format_program()} completion bash, or zsh"
        )
    print(build_script(words[0]), end="")
    return 0


def build_script(shell: str) -> str:
    """Return the script for bash or zsh, which completes the names that this version knows."""
    cases = []
    for name, entry in COMMANDS.items():
        if entry.words:
            options = " ".join(f"{word}=" for word in entry.words)
            cases.append(f"{name}) _trainer_match {options} $_trainer_keys ;;")
    lists = {
        "COMMANDS": COMMANDS,
        "RECIPES": shipped_recipes(),
        "KEYS": [f"{key}=" for key in defaults()],
        "VALUES": _list_values(),
        "TOPICS": list_topics(),
        "SHELLS": SHELLS,
    }
    text = _read_template("sh").removesuffix("\n")
    for mark, names in lists.items():
        text = text.replace(f"@{mark}@", " ".join(names))
    text = text.replace("@OWN@", "\n        ".join(cases))
    return _read_template(shell).replace("@FOUND@", text).replace("@PROGRAM@", format_program())


def _read_template(shell: str) -> str:
    return Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")


def _list_values() -> list[str]:
    """List `key=value` for every key whose values can be enumerated."""
    values_by_key = {key: [*values] for key, values in choices().items()}
    schedules = values_by_key["pipeline.schedule"]
    # A schedule that the installed torch lacks is left out, because training would refuse it.
    refused = list_refused_schedules()
    values_by_key["pipeline.schedule"] = [name for name in schedules if name not in refused]
    values_by_key["model.name"] = [*SMALL_MODELS, *torchvision_classifiers()]
    values_by_key["data.name"] = [*DATASETS]
    values_by_key["task.name"] = [*TASKS]
    values_by_key["recipe"] = [*shipped_recipes()]
    pairs = []
    for key, values in values_by_key.items():
        for value in values:
            pairs.append(f"{key}={value}")
    return pairs
