"""Everything that the program asks people to type works: each `key=value` in a message is accepted,
and each command is parsed.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest

from tests.command_line import PROJECT
from tests.guide import shell
from tests.guide.shell import is_swept
from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.cli.guide import list_topics
from trainer.commands.recipes import shown_keys
from trainer.errors import RecipeError, TrainerError
from trainer.recipe import MODES, load
from trainer.recipe.reflection import defaults
from trainer.recipe.removed import REMOVED
from trainer.recipe.schema import readers

OPEN = "{}"  # stands for what a message fills in
# Texts that look like arguments and are none, by their meaning.
OTHERS = {
    "words of one command": "checkpoint format yes minutes extends measured array preprocess",
    "arguments of "
    "Python's": "data model on_epoch on_step on_evaluation item_timeout num_classes in_chans "
    "img_size requires_grad reduction "
    "value init_from on_error track_running_stats use_reentrant",
    "a shell's, in the script of a job": "folder code",
    "of other programs": "size timeout",
    "what stands for any": "key w object_type",
}
WORDS = {
    *defaults(),
    *(key.partition(".")[0] for key in defaults()),
    *OWN_WORDS,
    *" ".join(OTHERS.values()).split(),
}
WORD = re.compile(r"(?<![\w.{(\[/$<'-])'?([a-z_]+(?:\.[a-z_]+)*)=(\[[^]]*\]?|[^\s,;:)'\"]*)")
# Some keys are accepted only together with another one.
BESIDE = [
    [],
    *([f"mode={mode}"] for mode in MODES),
    ["data.name=imagefolder", "data.root=x"],
    ["epochs=9"],
]
BESIDE += [
    [f"{key.partition('.')[0]}.name={reader}"] for key in defaults() for reader in readers(key)
]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module except its docstrings; `OPEN` replaces the values that are filled
    in.
    """
    tree = ast.parse(source)
    within = {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    messages = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else OPEN for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in within | messages
        ):
            yield node.lineno, node.value


def faults(text: str) -> Iterator[str]:
    """List the parts of a message that ask for something which is not accepted."""
    for key, value in WORD.findall(text):
        if key not in WORDS and OPEN not in key:
            yield f"{key}= is no key"
        elif key in defaults() and not re.search(
            r"^$|[{}<>]|[A-Z]{4}|\.\.\.|^'?x", value := value.rstrip(".")
        ):
            yield from [] if taken(f"{key}={value}") else [f"{key}={value} is not taken"]
    for command in re.findall(r"python -m trainer ([a-z]+)(?![\w=.])", text):
        if command not in COMMANDS:
            yield f"{command} is no command"
    for command in commands(text):
        try:
            shell.check(command)
        except (TrainerError, AssertionError) as error:
            yield f"{command}: {error!r}"
    for page in re.findall(r"(?:see|python -m trainer) guide ([a-z]+)", text):
        if page not in (*list_topics(), "answers"):
            yield f"guide {page} is no page"
    keys = {*re.findall(r"recipes keys ([a-z_]+(?:\.[a-z_]+)*)", text)}
    for section in keys - {"explains", "lists", "shows", "takes"}:
        try:
            shown_keys(section)
        except RecipeError as error:
            yield str(error)


@cache
def taken(word: str) -> bool:
    """Return whether a recipe accepts an argument, with a second one if it needs one."""
    key, _, value = word.partition("=")
    if value.count("[") != value.count("]") or is_swept(key, value):
        return True
    for beside in BESIDE:
        with suppress(RecipeError):
            load(
                "digits",
                *(other for other in beside if other.partition("=")[0] != key),
                word,
            )
            return True
    return False


def commands(text: str) -> Iterator[str]:
    """Return the commands of training, planning and so on in a text, with examples for the values
    that are filled in.
    """
    typed = (
        r"python -m trainer ((?:train|plan|compare|sweep|evaluate|export|submit "
        r"\w+)? ?\S*=[^,;:(]*)"
    )
    for candidate in re.findall(typed, text):
        words = [word.strip("'.`") for word in candidate.split()]
        count = next(
            (
                n
                for n, word in enumerate(words)
                if "=" not in word and word not in (*COMMANDS, "slurm")
            ),
            None,
        )
        filled = [
            re.sub(
                r"=.*(\{\}|NAME|RUN).*", "=digits" if word.startswith("recipe=") else "=RUN", word
            )
            for word in words[:count]
        ]
        if filled:
            yield shlex.join(["python", "-m", "trainer", *filled])


ROOMS = sorted(
    {path.relative_to(PROJECT / "trainer").parts[0] for path in (PROJECT / "trainer").rglob("*.py")}
)


@pytest.mark.slow(cases=["recipe"])
@pytest.mark.parametrize("room", ROOMS)
def test_suggestions_in_messages_are_accepted(room: str) -> None:
    place = PROJECT / "trainer" / room
    actual = [
        f"{path.relative_to(PROJECT)}:{line}: {fault}"
        for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
        for line, text in texts(path.read_text())
        for fault in faults(text)
        # The command has keys of its own.
        if re.split(" is not taken|= is no key", fault)[0] not in REMOVED
    ]
    assert actual == []


@pytest.mark.parametrize(
    "text",
    [
        "the loss grows: try optimizer.rate=0.1",
        "use precision=bf17",
        "set {} or mode=dpp",
        "type python -m trainer trian recipe=digits",
        "type python -m trainer recipe=digits epochs=many",
        "see guide speeed",
        "see recipes keys optimizzer",
    ],
)
def test_a_hint_that_does_not_work_is_found(text: str) -> None:
    assert [*faults(text)] and not [*faults("use precision=bf16, or mode=ddp nproc=2")]
