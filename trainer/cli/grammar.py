"""The words of a command line -> a command and its words in our spelling, or the one line that says what to type."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.cli import predict_words
from trainer.cli.dialects.interpreter import bare_meaning, meaning
from trainer.cli.dialects.meaning import CommandLine, Meaning
from trainer.cli.known_keys import (
    AFTERWARDS,
    COMMAND_WORDS,
    COMMANDS,
    FLAG_COMMANDS,
    LAUNCHING,
    OTHER_COMMANDS,
    PROGRAMS,
    SENTENCES,
    WANTS,
    is_name,
)
from trainer.cli.spelling import DASHES, FLAGS, Word, spelled, tidied
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.processes.rank import place
from trainer.recipe import flatten, load, shipped_recipes
from trainer.recipe.known_names import check_names
from trainer.recipe.near_names import advice_on, said_of
from trainer.recipe.recipe_files import split_words
from trainer.recipe.reflection import READERS, choices, unread
from trainer.recipe.schema import comments
from trainer.recipe.search_space import is_swept
from trainer.recipe.text import misspelt


def program(environment: Mapping[str, str] = os.environ) -> str:
    """How this program was started: by torchrun, by launch.sh, or as a module."""
    if _under_torchrun(environment):
        return f"torchrun --nproc_per_node={place(environment).local_size} -m trainer"
    return environment.get("TRAINER_COMMAND") or "python -m trainer"


def _under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether the user's own torchrun started this."""
    return place(environment).launched and family.PARENT not in environment


def read(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words name, and the words that it takes.

    Blanks line "=", dashes in front of a key and within are taken as they are. Everything else that is another
    program's, or a slip, is answered by the corrected words.

    Raises:
        RecipeError: with what to type.
    """
    words = tidied(words)
    if not words and _under_torchrun(os.environ):
        raise _to_type("train what?", "train", WANTS["train"])
    if not words:
        return "help", []
    command, rest, renamed = _command(words)
    if rest == ["help"]:
        return "help", [command]
    if command == "submit" and len(rest) > 1 and "=" not in rest[0]:  # slurm
        command, words = _read(command, spelled(rest[1:]), renamed, rest[:1])
        return command, [rest[0], *words]
    if command == "submit" and rest:
        return command, list(rest)
    if command in COMMAND_WORDS and rest:
        return _read(command, spelled(rest), renamed)
    if renamed or command in COMMAND_WORDS:
        raise _to_type(str(*renamed) + ":" if renamed else f"{command} what?", command, rest or WANTS.get(command, ()))
    if command == "export" and not rest:
        raise _to_type("export what?", "export", ["RUN", "format=onnx"])
    if command == "recipes":  # has keys among its words
        rest = [word.text if word.fine else word.typed for word in spelled(rest)]
    if command in ("export", "cache", "prove"):
        rest = [word.text for word in spelled(rest)]
    return command, rest


def _read(
    command: str, words: Sequence[Word], answers: list[Meaning], first: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """The command and the words as they are taken, where there is nothing to answer. Raises RecipeError.

    `first`: words that stand before them.
    """
    if command == "predict":
        words = predict_words.sorted_out(words)
    values = {word.key: word.value for word in words if word.key}
    multirun = any(FLAG_COMMANDS.get(word.key) == "sweep" and not word.fine for word in words)
    meant = "sweep" if multirun else command
    line = CommandLine(meant, COMMAND_WORDS[meant], values, tuple(word.typed for word in words))
    named = ""  # what a command is given of which an option was typed
    kept: list[str] = []
    odd: dict[str, Meaning] = {}
    roots: list[str] = []  # of several folders and files, wherever the others stand
    trains = any(FLAG_COMMANDS.get(word.key) == "train" and not word.fine for word in words)
    for word in words:
        if command == "predict" and predict_words.is_photos(word):
            kept.append(word.text)
            continue
        switch = FLAG_COMMANDS.get(word.key, "") if word.typed.startswith(tuple(DASHES)) and not word.fine else ""
        if switch and trains and switch != "train":
            why = AFTERWARDS.get(switch, "a command of its own")
            answers.append(Meaning((), f"{why}: leave it out", word.typed))
        elif switch:
            command, _, named = switch.partition(" ")
            answers.append(Meaning((command,), typed=word.typed))
        elif (answer := _answer(word, line)) is not None:
            answers.append(answer)
            kept += answer.words
            roots += [] if word.key else [root for root in answer.words if root.startswith("data.root=")]
        else:
            kept.append(word.text)
            swept = meant == "sweep" and is_swept(word.key, word.value)
            if not swept and (reason := _unknown(word)) is not None:
                odd[word.text] = Meaning((), reason, word.typed)
    if not answers:
        return command, [word for place, word in enumerate(kept) if "=" not in word or word not in kept[:place]]
    kept = [word for word in kept if word not in odd]
    if command not in COMMAND_WORDS:
        kept = [values.get("recipe", named)] if named else []
    elif command in ("evaluate", "predict"):
        kept = [word for word in kept if not word.startswith(("recipe=", "nproc="))]
        given = {word.partition("=")[0] if "=" in word else "data.root" for word in kept}
        wanted = "checkpoint" if command == "evaluate" else "data.root"
        kept = [*(WANTS[command] if not {wanted, "predict.split"} & given else ()), *kept]
    answers += [*odd.values(), *_contradictions(kept, roots)]
    kept = list({word.partition("=")[0]: word for word in [*kept, *(root for root in roots if root in kept)]}.values())
    idle = dict(_unread(kept, line)) if command in ("train", "compare", "sweep", "plan", "submit") else {}
    answers += [Meaning((), f"does nothing with {why}: leave it out", word) for word, why in idle.items()]
    kept = [word for word in kept if word not in idle]
    kept = _without_faults(_begun(kept, command), answers, command)
    texts = "; ".join(dict.fromkeys(map(str, answers)))
    raise _to_type(f"{texts}:", command, [*first, *kept] if kept else WANTS.get(command, ()))


def _to_type(reason: str, command: str, words: Sequence[str]) -> RecipeError:
    variables = [word for word in words if "=" in word and word.partition("=")[0].isupper()]
    if any(word.startswith("NNODES=") for word in variables):
        missing = {"NODE_RANK": "0", "MASTER_ADDR": "HOST"}.items()
        typed = " ".join(variables)
        variables += [f"{name}={value}" for name, value in missing if f"{name}=" not in typed]
    words = [word for word in words if word not in variables]
    shown = [] if command == "train" and words and "=" in words[0] else [command]
    return RecipeError(f"{reason} type {shlex.join([*variables, *shlex.split(program()), *shown, *words])}")


def _command(words: Sequence[str]) -> tuple[str, list[str], list[Meaning]]:
    """The command, its words, and what was wrong with how it was named."""
    first, rest = words[0], list(words[1:])
    plain = first.lower().lstrip(DASHES)
    if first in COMMANDS:
        return first, rest, []
    if first in ("--version", "-V"):
        return "version", [], []
    if spelled(words)[0].key and list(words[:2]) != ["-m", "trainer"]:
        return "train", list(words), []
    if plain in COMMANDS:
        return plain, rest, [Meaning((plain,), typed=first)]
    if Path(first.replace("\\", "/")).name in PROGRAMS or _is_script(first) or first == "-m":
        again = (word for word in rest if word in LAUNCHING or Path(word).name in PROGRAMS or _is_script(word))
        dropped = [first, *again]
        rest = [word for word in rest if word not in dropped]
        command = rest.pop(0) if rest and rest[0] in COMMANDS else "train"
        answer = Meaning((), f"the program is {program()}", shlex.join(dropped))
        return command, rest or [*WANTS.get(command, ())], [answer]
    if plain in SENTENCES:
        raise RecipeError(f"'{first}' is not a command: {SENTENCES[plain]}")
    if plain in OTHER_COMMANDS:
        target = shlex.split(OTHER_COMMANDS[plain])
        command, options = ("train", target) if "=" in target[0] else (target[0], target[1:])
        options = options if not rest else [*rest, *options[1:]] if command == "export" else rest
        return command, options, [Meaning((command,) if options is not target else tuple(target), typed=first)]
    if bare_meaning(first, CommandLine("train", COMMAND_WORDS["train"])) is not None:
        return "train", list(words), []
    guess = misspelt(first, [*COMMANDS, *shipped_recipes()])
    hint = f"did you mean {guess if guess in COMMANDS else f'recipe={guess}'}? " if guess else ""
    raise RecipeError(f"'{first[:80]}' is not a command; {hint}there are: {', '.join(COMMANDS)}")


def _is_script(word: str) -> bool:
    """Whether a word is a program in Python, and not settings in it."""
    return word.endswith(".py") and "config" not in word


def _begun(words: Sequence[str], command: str) -> list[str]:
    """The words with a recipe, where what other programs' words say needs one: photos, or a model that has its own."""
    values = {key: value for key, _, value in (word.partition("=") for word in words)}
    if command not in ("train", "plan", "compare", "sweep") or "recipe" in values or "data.root" not in values:
        return [*words]
    if (model := values.get("model.name", "")) in shipped_recipes():
        return [f"recipe={model}", *(word for word in words if not word.startswith("model.name="))]
    return ["recipe=finetune", *words] if "data.name" not in values else [*words]


def _without_faults(words: Sequence[str], answers: list[Meaning], command: str) -> list[str]:
    """The words without those that the recipe refuses; why is told in place of what they were said to mean."""
    kept = [*words]
    if command not in ("train", "plan") or any(word.startswith("plugin=") for word in kept):
        return kept
    while True:
        options, rest = split_words([word for word in kept if "=" in word], COMMAND_WORDS[command])
        rest = [word for word in rest if not word.partition("=")[0].isupper()]
        try:
            check_names(load(options.get("recipe"), *rest))
            return kept
        except RecipeError as error:
            reason = str(error)
        faulty = next((word for word in rest if word.partition("=")[0] in reason), None)
        if faulty is None or "pip install" in reason:
            return kept
        typed = next((answer.typed for answer in answers if faulty in answer.words), faulty)
        answers[:] = [answer for answer in answers if faulty not in answer.words or len(answer.words) > 1]
        answers.append(Meaning((), re.sub(r"^[\w./-]+: ", "", reason), typed))
        kept.remove(faulty)


def _unread(words: Sequence[str], line: CommandLine) -> Iterator[tuple[str, str]]:
    """Words that the optimizer or the schedule of a command does not read, each with whose choice that is."""
    typed = {key: value for key, _, value in (word.partition("=") for word in words)}
    if typed.get("recipe") != line.values.get("recipe"):
        line = CommandLine(line.command, line.options, typed)
    if typed.keys() & READERS.keys() and line.recipe is not None:
        values = flatten(line.recipe.to_dict()) | typed
        for key, chooser in unread(values, sorted(typed)):
            if values[chooser] in choices()[chooser]:
                yield f"{key}={typed[key]}", f"{chooser}={values[chooser]}"


def _contradictions(words: Sequence[str], roots: Sequence[str]) -> Iterator[Meaning]:
    """Keys that two words set to different values; the suggested line can have only one."""
    values: dict[str, list[str]] = {}
    for key, equals, value in (word.partition("=") for word in words):
        if equals and value not in values.setdefault(key, []):
            values[key].append(value)
    for key, different in values.items():
        if len(different) > 1 and not (key == "data.root" and roots):
            yield Meaning((), f"given as {' and as '.join(different)}: keep the one you mean", key)


def _answer(word: Word, line: CommandLine) -> Meaning | None:
    """What to type for a word; None where it is right, or the recipe has to say what is wrong."""
    answer = meaning(word.key, word.value, line) if word.key else bare_meaning(word.typed, line)
    if answer is None and word.key and not word.fine and is_name(word.key):
        answer = Meaning((word.text,))
    if answer is None and word.key and not is_name(word.key) and (known := said_of(word.key, comments())):
        answer = Meaning((), f"{known}: leave it out")
    return answer and replace(answer, typed=answer.typed or word.typed)


def _unknown(word: Word) -> str | None:
    """Why a word is left out of the suggested line; None where only loading the recipe can say what is wrong."""
    if not word.key:
        return None if word.typed in FLAGS else "not key=value, as in epochs=10"
    return None if is_name(word.key) else f"no key; {advice_on(word.key, comments())}"
