"""The command `guide`: topics, pages for a terminal, and the answer to an unknown topic."""

import re
import sys

import pytest

from tests.command_line import suggested_commands, trainer
from trainer.cli import guide
from trainer.errors import RecipeError
from trainer.telemetry.readable import LONG_WORD


def test_alone_it_lists_every_topic_with_a_line() -> None:
    lines = guide.command([]).splitlines()
    assert lines[0] == "usage: python -m trainer guide TOPIC"
    assert {line.split()[0] for line in lines if line.startswith("  ")} == {*guide.list_topics()}
    assert max(map(len, lines)) <= 80
    assert guide.command(["README"]) == guide.command(["readme.md"]) == guide.command([])


@pytest.mark.parametrize("topic", guide.list_topics())
def test_every_page_is_printed_as_it_is(topic: str) -> None:
    assert (
        guide.command([f"{topic}.md"]) == guide.command([topic.upper()]) == guide.command([topic])
    )
    assert guide.command([topic]).splitlines()[0] == guide.read_page(topic).splitlines()[0]


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("topic", guide.list_topics())
def test_on_a_terminal_a_page_is_as_wide_as_the_terminal(
    topic: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word is lost, and code stays as it is. Only very long words in tables are broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    pieces = re.split(
        r"^( *```.*?^ *```)$",
        guide.command([topic]),
        flags=re.S | re.M,
    )
    code = re.findall(r"^ *```sh.*?^ *```$", guide.read_page(topic), re.S | re.M)
    assert len([piece for piece in pieces[1::2] if "```sh" in piece]) == len(code)
    for line in "\n".join(pieces[::2]).splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
    rows = re.findall(r"^\|(?! ---)(.*)\|$", guide.read_page(topic), re.M)
    words = (
        guide.LINK.sub(r"\1", " ".join(rows))
        .replace("\\|", "\0")
        .replace(
            "|",
            " ",
        )
    )
    printed = {*" ".join(pieces).split()}
    lost = {*words.replace("\0", "\\|").split()} - printed
    assert not [word for word in lost if "launch.sh" not in word and len(word) <= LONG_WORD]


def test_through_the_command_line() -> None:
    completed = trainer("guide", "modes", env={"TRAINER_COMMAND": "./launch.sh"})
    assert completed.returncode == 0 and completed.stderr == ""
    assert "\n./launch.sh " in completed.stdout
    completed = trainer("guide", "modse")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith("trainer: error: 'modse' ")
    assert suggested_commands(completed.stderr) == ["python -m trainer guide modes"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("memroy", "nearest: .*memory"),
        ("heic", "nearest: .*photos"),
        ("hogwild", "nearest: .*modes"),
        ("slow", r"nearest: speed, .*type .* guide speed$"),  # the page whose question has the word
        ("xyzzy", ": type python -m trainer guide$"),
    ],
)
def test_another_word_finds_the_nearest_topics(asked: str, says: str) -> None:
    with pytest.raises(RecipeError, match=f"^'{asked}' .*{says}") as raised:
        guide.command([asked])
    assert len(str(raised.value)) < 160


def test_the_program_is_called_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\npython -m trainer doctor\n" in guide.command(["errors"])
    assert "\n./launch.sh test\n" in guide.command(["tested"])  # launch.sh alone knows it
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    assert "\n./launch.sh doctor\n" in guide.command(["errors"])
    assert "python -m trainer" not in guide.command(["commands"])
    assert "python -m trainer" in guide.command(["start"])
    assert f"{sys.executable}" in guide.command(["photos"])  # pip may be another Python's
