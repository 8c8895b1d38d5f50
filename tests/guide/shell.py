"""The commands of a shell's line, and a check of a command's arguments without training."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

from tests.command_line import PROJECT
from trainer.cli.command_table import COMMANDS
from trainer.cli.grammar import read
from trainer.commands.compare import entries
from trainer.commands.export import SUFFIXES
from trainer.commands.plan import OWN_ARGUMENTS as PLAN
from trainer.commands.prove import OWN_ARGUMENTS as PROVE
from trainer.commands.prove import find_devices
from trainer.commands.sweep.space import OWN_WORDS as SWEEP
from trainer.commands.sweep.space import SearchSpace, parse_dimension
from trainer.devices import cards
from trainer.errors import RecipeError, SetupError
from trainer.launch.topology import Launch, choose_launch
from trainer.processes import resources
from trainer.recipe import Recipe, checks, load
from trainer.recipe.checks import check_names
from trainer.recipe.recipe_files import split_arguments
from trainer.telemetry import readable

OTHERS = {  # Patterns for the command lines of other programs.
    "git": r"clone URL trainer",
    "cd": r"trainer",
    ".venv/bin/python": r"-m pip install [a-z-]+",
    "python": (
        r"-c import signal, torch\.distributed as d; kept = d\.TCPStore\(.*\); "
        r"signal\.pause\(\)"
    ),
    "uv": r"pip install --python \.venv [a-z-]+",
    "pip": r"install (\.|--no-deps \.|'?\.\[\w+\]'?|[a-z-]+( [a-z-]+)*)",
    "source": r"\.venv/bin/activate|~/\.trainer-completion|",
    "tar": r"--sort=name -C photos -cf photos\.tar \.",
    "find": r"photos -name \*\.jpg",
}
CARDS = 8  # Number of cards of the machine that a page describes.
TORCHRUN = "TORCHELASTIC_RUN_ID"  # among the variables of what a torchrun of the user starts
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n[0-1]"}


@dataclass(frozen=True)
class Line:
    """A command: the variables before it, and the arguments of its program."""

    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def split(text: str) -> list[Line]:
    """The commands of a shell's line: between pipes, `&&`, `;` and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    actual: list[list[str]] = [[]]
    to_file = False
    for token in lexer:
        if set(token) <= set("();<>|&"):
            to_file = token.startswith(">")
            actual += [] if to_file else [[]]
        elif not to_file:
            actual[-1].append(token)
    return [_line(words) for words in actual if words]


def _line(words: Sequence[str]) -> Line:
    count = next(
        (n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)),
        len(words),
    )
    return Line(
        tuple(words[count:]),
        dict(word.split("=", 1) for word in words[:count]),
    )


def check(text: str) -> None:
    """Check the arguments of all commands in a shell's line.

    Raises:
        RecipeError: as the command line would.
        AssertionError: another program's words that nobody has looked at.
    """
    for line in split(text):
        actual = ours(line)
        if actual is None:
            _check_other(line.words)
        else:
            _check_ours(*actual)


def ours(line: Line) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments of our command line and the launcher's variables, or None for another
    program.
    """
    words = list(line.words)
    variables = dict(line.variables)
    if words[0] == "srun":
        options = dict(word.lstrip("-").split("=") for word in words[1:] if word.startswith("--"))
        variables |= {**SLURM, "SLURM_STEP_NUM_NODES": options["nodes"]}
        words = words[words.index("./launch.sh") :]
    if words[0] == "mpirun":
        assert words[1:6] == ["-np", words[2], "--map-by", "ppr:1:node", "-x"], words
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE", "RANK", "SIZE")]
        variables |= dict(zip(names, ("0", "1", "0", words[2]), strict=True)) | dict(
            [words[6].split("=")]
        )
        words = words[words.index("./launch.sh") :]
    if words[0] == "torchrun":
        at = words.index("-m")
        options = dict(
            word.lstrip("-").replace("-", "_").partition("=")[::2] for word in words[1:at]
        )
        known_names = {
            "nproc_per_node",
            "nnodes",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_conf",
            "max_restarts",
        }
        known_names |= {"signals_to_handle", "standalone"}
        assert {*options} <= known_names, options.keys() - known_names
        nodes = options.get("nnodes", "1").rpartition(":")[2]
        variables |= {"NPROC": options.get("nproc_per_node", "1"), "NNODES": nodes}
        variables |= {"NODE_RANK": "0", "MASTER_ADDR": "node0", TORCHRUN: "yes"}
        words = ["python", *words[at:]]
    if words[:3] == ["python", "-m", "trainer"]:
        return words[3:], variables
    if words[0] == "trainer":
        return words[1:], variables
    if words[0] == "./launch.sh" and words[1:2] not in (["test"], ["tensorboard"]):
        return words[1:], variables
    return None


def _check_other(words: Sequence[str]) -> None:
    if words[0] == "./launch.sh":
        known_names = ("--slow", "--all", "--versions", "--versions=lowest", "-m", "gpu")
        tested = all(word in known_names or (PROJECT / word).exists() for word in words[2:])
        assert tested or words[1] == "tensorboard", words
    elif words[:2] == ("python", "-m"):
        source = PROJECT / (words[2].replace(".", "/") + ".py")
        assert _knows(source, words[3:]), words
    elif words[0] == "python" and words[1] != "-c":
        assert _knows(PROJECT / words[1], words[2:]), words
    else:
        assert words[0] in OTHERS and re.fullmatch(OTHERS[words[0]], " ".join(words[1:])), words


def _knows(source: object, words: Sequence[str]) -> bool:
    """Return whether a script has these options; their values are not checked."""
    text = (PROJECT / str(source)).read_text()
    options = [
        word.partition("=")[0].replace("--no-", "--") for word in words if word.startswith("--")
    ]
    loose = re.findall(r'^    "(\w+)": \(', text, re.M)  # rows of a table of options
    return all(f'"{option}"' in text or option[2:] in loose for option in options)


def _check_ours(words: Sequence[str], variables: dict[str, str]) -> None:
    if {"--help", "-h"} & {*words}:
        assert words[0] in (*COMMANDS, "--help")
        return
    command, rest = read(words)
    assert command in ("train", "predict", "evaluate") or not {
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
    } & {*variables}
    if command == "train":
        own, rest = split_arguments(rest, COMMANDS["train"].words)
        recipe = load(own.get("recipe"), *rest)
        _check_names(recipe, own)
        count = CARDS if "SLURM_STEP_ID" in variables or variables.get("NNODES", "1") != "1" else 0
        launch = _choose_launch(variables, own.get("nproc"), recipe, cuda=count)
        # The user's torchrun starts its own number of processes in every mode.
        if TORCHRUN in variables:
            launch = Launch(int(variables["NPROC"]), int(variables["NNODES"]))
        checks.check_processes(recipe, launch.size, launch.nnodes)
    elif command == "compare":
        own, rest = split_arguments(rest, entries.OWN_ARGUMENTS)
        modes = entries.parse_modes(own["modes"]) if "modes" in own else None
        listed = entries.build_entries(
            own["recipe"], rest, modes, own.get("nproc"), own.get("plugin")
        )
        assert [entry.problem for entry in listed if entry.problem] == []
    elif command == "sweep":
        own, rest = split_arguments(rest, SWEEP)
        repeats = int(own.get("repeats", 1))
        trials = own.get("trials")
        try:
            assert SearchSpace(
                own["recipe"], rest, repeats, int(trials) if trials else None, own.get("nproc")
            )
        except SetupError as error:
            assert "pip install optuna" in str(error)
    elif command == "plan":
        own, rest = split_arguments(
            [word for word in rest if word != "--json"], ("recipe", "plugin", *PLAN)
        )
        recipe = load(own.get("recipe"), *rest)
        _check_names(recipe, own)
        for key, some in (("memory", "1GiB"), ("bandwidth", "1GB/s")):
            assert readable.parse_amount(key, own.get(key, some))
        checks.check_processes(recipe, _choose_launch({}, own.get("nproc"), recipe, cuda=0).size)
    elif command in ("predict", "evaluate", "export"):
        own, rest = split_arguments(rest, ("checkpoint", "plugin", "format", "preprocess"))
        if own.get("format", "onnx") not in SUFFIXES:
            raise RecipeError(f"format={own['format']} is none of {', '.join(SUFFIXES)}")
        load(
            None,
            *("data.root='-'" if word == "data.root=-" else word for word in rest if "=" in word),
        )
        assert command != "evaluate" or "checkpoint" in own
    elif command == "runs":
        assert not rest or rest[0] in ("show", "delete", "FOLDER"), rest
    elif command == "doctor":
        assert not rest
    elif command == "prove":
        own, rest = split_arguments(rest, PROVE)
        assert not rest
        assert float(own.get("minutes", 10)) > 0
        assert find_devices(own.get("devices"))
    # The remaining commands are quick, so they are run.


def _choose_launch(
    variables: dict[str, str], nproc: str | None, recipe: Recipe, cuda: int
) -> Launch:
    """Choose a launch on a machine with `cuda` cards and two cores."""
    with (
        mock.patch.object(cards, "detect", lambda: cards.Cards(cuda)),
        mock.patch.object(resources, "count_cores", lambda: 2),
    ):
        return choose_launch(variables, nproc, recipe)


def _check_names(recipe: Recipe, own: dict[str, str]) -> None:
    if "plugin" not in own:
        check_names(recipe)


def is_swept(key: str, text: str) -> bool:
    """Whether `key=text` means several values to `sweep`, right or wrong, rather than one."""
    try:
        return parse_dimension(key, text) is not None
    except RecipeError:
        return True
