"""The words of a command line -> a command and its words in our spelling, or the one line that says what to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import RecipeError
from trainer.processes import family
from trainer.processes.rank import place
from trainer.recipe import MODES, nearest, shipped_recipes
from trainer.recipe.text import shown
from trainer.words.commands import COMMANDS, FLAG_COMMANDS, LAUNCHING, OTHER_COMMANDS, PROGRAMS, SENTENCES
from trainer.words.keys import OWN, is_name, keys
from trainer.words.meanings import WEIGHTS, Around, Meaning, meaning
from trainer.words.spelling import DASHES, Word, spelled

WANTS: dict[str, tuple[str, ...]] = {
    "train": ("recipe=digits",),
    "plan": ("recipe=digits",),
    "compare": ("recipe=digits",),
    "predict": ("checkpoint=RUN", "data.root=FOLDER"),
    "evaluate": ("checkpoint=RUN",),
}  # what each needs at least


@dataclass(frozen=True)
class Fix:
    """What was typed, what to type instead, and what else there is to say."""

    typed: str
    words: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        if not self.words:
            return f"'{self.typed[:80]}': {self.note}"
        return f"'{self.typed[:80]}' is {shlex.join(self.words)}" + f" ({self.note})" * bool(self.note)


def program(environment: Mapping[str, str] = os.environ) -> str:
    """How this program was started: by torchrun, by launch.sh, or as a module."""
    me = place(environment)
    if me.launched and family.PARENT not in environment:
        return f"torchrun --nproc_per_node={me.local_size} -m trainer"
    return environment.get("TRAINER_COMMAND") or "python -m trainer"


def read(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words name, and the words that it takes.

    Blanks around "=", dashes in front of a key and within are taken as they are. Everything else that is another
    program's, or a slip, is answered by the corrected words.

    Raises:
        RecipeError: with what to type.
    """
    if not words:
        return "help", []
    command, rest, fixes = _command(words)
    if command not in OWN:
        if fixes:
            raise _to_type(fixes, command, rest)
        if command == "recipes":  # has keys among its words
            rest = [word.text if word.fine else word.typed for word in spelled(rest)]
        return command, rest
    if not rest:
        raise _to_type(fixes or [f"{command} what"], command, WANTS[command])
    listed = spelled(rest)
    around = Around(command, OWN[command], {word.key: word.value for word in listed if word.key})
    kept: list[str] = []
    for word in listed:
        switch = FLAG_COMMANDS.get(word.key, "") if word.typed[0] in DASHES and not word.fine else ""
        if switch:
            command = switch
            fixes.append(Fix(word.typed, (command,)))
            continue
        fix = _fix(word, around) if word.key else _bare_fix(word.typed, around, listed)
        if fix is not None:
            fixes.append(fix)
        kept += fix.words if fix is not None else [word.text]
    if not fixes:
        return command, kept
    if command not in OWN:
        kept = []
    elif command in ("evaluate", "predict"):
        kept = [word for word in kept if not word.startswith(("recipe=", "nproc="))]
        given = {word.partition("=")[0] for word in kept}
        kept = [*(word for word in WANTS[command] if word.partition("=")[0] not in given), *kept]
    raise _to_type(fixes, command, list(dict.fromkeys(kept)) or WANTS.get(command, ()))


def _to_type(fixes: Sequence[Fix | str], command: str, words: Sequence[str]) -> RecipeError:
    shown = [] if command == "train" and words and "=" in words[0] else [command]
    told = "; ".join(dict.fromkeys(map(str, fixes)))
    mark = "?" if told == f"{command} what" else ":"
    return RecipeError(f"{told}{mark} type {shlex.join([*shlex.split(program()), *shown, *words])}")


def _command(words: Sequence[str]) -> tuple[str, list[str], list[Fix | str]]:
    """The command, its words, and what was wrong with how it was named."""
    first, rest = words[0], list(words[1:])
    plain = first.lower().lstrip(DASHES)
    if first in COMMANDS:
        return first, rest, []
    if first in ("--version", "-V"):
        return "version", [], []
    if spelled(words)[0].key:
        return "train", list(words), []
    if plain in COMMANDS:
        return plain, rest, [Fix(first, (plain,))]
    if Path(first).name in PROGRAMS or first.endswith(".py") or first == "-m":
        dropped = [word for word in words if word in LAUNCHING or Path(word).name in PROGRAMS or word.endswith(".py")]
        rest = [word for word in words if word not in dropped]
        command = rest.pop(0) if rest and rest[0] in COMMANDS else "train"
        return command, rest or [*WANTS.get(command, ())], [Fix(shlex.join(dropped), (), f"the program is {program()}")]
    if plain in SENTENCES:
        raise RecipeError(f"'{first}' is not a command: {SENTENCES[plain]}")
    if plain in OTHER_COMMANDS:
        target = shlex.split(OTHER_COMMANDS[plain])
        command, own = ("train", target) if "=" in target[0] else (target[0], target[1:])
        return command, rest or own, [Fix(first, (command,) if own is not target else tuple(target))]
    if _bare_fix(first, Around("train", OWN["train"]), []) is not None:
        return "train", list(words), []
    guess = nearest(first, [*COMMANDS, *shipped_recipes()])
    hint = f"did you mean {guess if guess in COMMANDS else f'recipe={guess}'}? " if guess else ""
    raise RecipeError(f"'{first[:80]}' is not a command; {hint}there are: {', '.join(COMMANDS)}")


def _fix(word: Word, around: Around) -> Fix | None:
    """What to type for a word that sets something; None where it is right, or the recipe has to say what is wrong."""
    found = meaning(word.key, word.value, around)
    if found is not None:
        return Fix(word.typed, found.words, found.note)
    return None if word.fine or not is_name(word.key) else Fix(word.typed, (word.text,))


def _bare_fix(typed: str, around: Around, listed: Sequence[Word]) -> Fix | None:
    """What to type for a word that sets nothing: a recipe's name, a run, a folder, a mode, an option's name."""
    name = typed.lstrip(DASHES).replace("-", "_")
    if typed[:1] in DASHES:
        found = meaning(name, "true", around)
        if found is not None or name not in keys():
            return Fix(typed, found.words, found.note) if found is not None else None
        return Fix(typed, (f"{name}={shown(keys()[name])}",), "with its value")
    path, own = Path(typed).expanduser(), around.own
    if typed in MODES and around.command == "compare":
        modes = [word.typed for word in listed if word.typed in MODES]
        return Fix(" ".join(modes), (f"modes=[{','.join(modes)}]",))
    if "checkpoint" in own:
        images = "checkpoint" in around.values or (path.exists() and not _is_run(path) and not typed.endswith(WEIGHTS))
        return Fix(typed, (f"{'data.root' if images else 'checkpoint'}={typed}",))
    if typed in shipped_recipes() or path.suffix in (".yaml", ".yml") or _is_run(path):
        return Fix(typed, (meaning("recipe", typed, around) or Meaning((f"recipe={typed}",))).words)
    if typed in MODES:
        return Fix(typed, (f"mode={typed}",))
    return Fix(typed, ("recipe=finetune", f"data.root={typed}")) if path.is_dir() else None


def _is_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()
