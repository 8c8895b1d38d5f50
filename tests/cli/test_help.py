"""Help: a page for each command with its arguments; its examples are commands of the guide."""

import re

import pytest

from tests.command_line import ok
from trainer.cli.command_table import COMMANDS
from trainer.cli.guide import format_command_page as page
from trainer.cli.guide import format_overview, parse_command_pages
from trainer.commands.compare import entries
from trainer.commands.plan import OWN_ARGUMENTS as PLAN_WORDS
from trainer.commands.sweep.space import OWN_WORDS as SWEEP_WORDS
from trainer.recipe.reflection import defaults

COMMAND_WORDS = {name: command.words for name, command in COMMANDS.items() if command.words}


def test_every_command_has_a_page() -> None:
    assert [*parse_command_pages()] == [*COMMANDS]
    assert all(
        f"\n  {about.usage.partition(' [')[0]} " in format_overview("")
        for about in parse_command_pages().values()
    )


def test_the_words_of_commands_are_those_that_they_read() -> None:
    assert {*COMMAND_WORDS["compare"]} == {*entries.OWN_ARGUMENTS}
    assert {*COMMAND_WORDS["sweep"]} == {*SWEEP_WORDS}
    assert {*COMMAND_WORDS["plan"]} == {"recipe", "plugin", *PLAN_WORDS}


@pytest.mark.parametrize("command", COMMAND_WORDS)
def test_words_and_keys_of_a_page_exist(command: str) -> None:
    shown = {word.partition("=")[0] for word in parse_command_pages()[command].words} - {
        "key",
        "--json",
        "--go",
    }
    assert shown <= {*COMMAND_WORDS[command], *defaults()}
    assert {*COMMAND_WORDS[command]} <= shown | {"output", "resume"}


@pytest.mark.parametrize(
    "words", [("plan", "--help"), ("--help", "plan"), ("help", "plan"), ("-h", "plan", "nproc=2")]
)
def test_help_of_a_command_however_it_is_asked_for(words: tuple[str, ...]) -> None:
    completed = ok(*words)
    assert completed.stdout == page("plan") and completed.stderr == ""


def test_pages_are_as_wide_as_a_terminal() -> None:
    assert all(
        len(line) <= 120
        for text in (format_overview(""), *map(page, COMMANDS))
        for line in text.splitlines()
    )


def test_pages_say_the_program_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    assert page("plan").startswith("usage: ./launch.sh plan ")
    assert "torchrun --standalone --nproc_per_node=4 -m trainer recipe=resnet50" in page("train")


def test_version() -> None:
    assert re.fullmatch(
        r"trainer \d+\.\d+\.\d+, torch \d+\.\d+\S*, Python 3\.\d+\.\d+\n", ok("--version").stdout
    )
