"""Every command of README and the guide is parsed, and with --all typed into a shell.

The first is quick and trains nothing. For the second each page is a story of its own in an empty
folder, in which the commands follow one another as a reader types them. What cannot run here is in
`NOT_RUN`, by reason; of these the runs are planned.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import PROJECT, environment, ok
from tests.data.photo_folders import coloured
from tests.guide import shell
from tests.guide.documents import PAGES, Typed, blocks, commands, name, settings, spans
from tests.guide.shell import is_swept
from trainer import __main__ as cli
from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.recipe import load
from trainer.recipe.reflection import defaults
from trainer.recipe.text import ARGUMENT_KEYS

PICTURES = PROJECT / ".readme"
RUNS = ("first", "second")  # Runs that pages mention, below runs/.
# Arguments of commands, with a placeholder for any value.
WORDS = ("key", "format", "preprocess", "yes", "minutes")
# Commands that are run at once.
QUICK = (
    "recipes",
    "guide",
    "completion",
    "version",
    "help",
    "submit",
)

# Patterns of commands that are not run, by reason. Commands that train are planned instead.
NOT_RUN = {
    "installs software": r"pip install|git clone|source \.venv",
    "is these tests, or hours of them": r"launch\.sh test\b|-m tests\.",
    "takes the minutes that it is given": r"(launch\.sh|trainer) prove\b",
    "is a figure's, whose row tells how long it takes": r"=FOLDER\b|python tests/benchmarks/",
    "waits until it is stopped": r"signal\.pause|tensorboard",
    "needs several machines": r"\b(NNODES|nnodes|mpirun|srun)\b",
    "needs ImageNet and its GPUs": r"/data/imagenet",
    "needs GPUs": r"\bcuda:|data\.name=synthetic data\.image_size",
    "takes hours without a GPU": r"\brecipe=resnet50",
    "downloads weights": r"(?<!build )recipe=(finetune|probe)\b(?!.*init_from)"
    r"|model\.weights=DEFAULT",
    "needs zsh": r"completion zsh",
    "needs a server, an account or a package": r"logging\.(wandb|mlflow)=|format=onnx|\btrials=",
}
PLANNED = (
    "needs ImageNet and its GPUs",
    "needs several machines",
    "needs GPUs",
    "takes hours without a GPU",
)


def why_not(line: str) -> str | None:
    """Return why a line is not run, or None.

    Plans and submissions train nothing, so they are run for any machine.
    """
    if re.search(r" (plan|submit) ", line):
        return None
    return next(
        (reason for reason, kept in NOT_RUN.items() if re.search(kept, line)),
        None,
    )


EVERY = [typed for page in PAGES for typed in commands(page)]
PLANS = [typed.text for typed in EVERY if why_not(typed.text) in PLANNED]
PLANS = [text for text in PLANS if not re.search(" (predict|compare) ", text)]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, as one types there."""
    for variable in ("RANK", "WORLD_SIZE", "NPROC", "NNODES", "SLURM_STEP_ID", family.PARENT):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    monkeypatch.setattr(family, "die_with_parent", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def at_once(typed: Typed, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Return what is wrong with a line of a page, or None.

    A model of timm is not checked without timm.
    """
    if "=timm:" in typed.text and find_spec("timm") is None:
        return None
    try:
        if not typed.wrong:
            shell.check(typed.text)
        for line in shell.split(typed.text):
            words, _ = shell.ours(line) or ([], {})
            if words and (words[0] in QUICK or typed.wrong):
                code = cli.answer(words)
                message = capsys.readouterr()
                if code != (2 if typed.wrong else 0):
                    return f"{typed}: exit {code}: {message.err}"
                if typed.wrong and message.err not in "".join(
                    f"{block.text}" for block in blocks(typed.page)
                ):
                    return f"{typed}: the page does not show {message.err}"
    except (RecipeError, AssertionError) as error:
        return f"{typed}: {error}"
    return None


@pytest.mark.slow(cases=["sweep"])
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_mean_something(
    page: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "runs" / "first").mkdir(parents=True)
    (empty / "runs" / "first" / "recipe.yaml").write_text(load("digits").to_yaml())
    (empty / "runs" / "rates").mkdir()
    (empty / "photos").mkdir()
    (empty / "photo.jpg").touch()
    (empty / ".readme").symlink_to(PICTURES)
    wrong = [problem for typed in commands(page) if (problem := at_once(typed, capsys))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("./launch.sh recipe=digits epoch=3", "epoch"),
        ("./launch.sh recipe=digits mode=local_sgd nproc=5", "batch_size="),
        ("./launch.sh plan recipe=digits memory=24", "memory"),
        ("./launch.sh compare recipe=digits 'modes=[singel]'", "singel"),
        ("cd trainer && ./launch.sh recipe=digits seed=x", "seed"),
        ("torchrun --nproc_per_nod=2 -m trainer recipe=digits", "nproc_per_nod"),
        (
            "torchrun --standalone --nproc_per_node=2 -m trainer recipe=digits mode=single",
            "1 process",
        ),
        ("python tests/benchmarks/workers.py ddp --bach 384", "workers.py"),
        ("rm -rf /", "rm"),
    ],
)
def test_wrong_commands_are_detected(
    text: str, why: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = Typed(text, PAGES[0], 1)
    problem = at_once(typed, capsys)
    assert problem is not None and why in problem.removeprefix(f"{typed}: ")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_words_in_the_text_exist(page: Path, empty: Path) -> None:
    for word in settings(page):
        key = word.partition("=")[0]
        # `optimizer=adam` is short for `optimizer.name=adam`.
        if f"{key}.name" in defaults():
            key += ".name"
        # The arguments of a class or function are no keys.
        is_argument = key.rpartition(".")[0] in ARGUMENT_KEYS
        assert is_argument or key in defaults() or key in WORDS or key in OWN_WORDS, word
        if key in defaults() and not is_swept(*word.split("=", 1)):
            load(None, word)
    sections = {key.partition(".")[0] for key in defaults() if "." in key}
    for span in spans(page):
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", span) and span.partition(".")[0] in sections:
            assert span in defaults() or span == "model.onnx", span


def test_examples_of_yaml_are_recipes(empty: Path) -> None:
    actual = [block.text for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert actual
    for number, text in enumerate(actual):
        Path(f"{number}.yaml").write_text(text)
        load(f"{number}.yaml")


def test_examples_of_python_can_be_read() -> None:
    actual = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert len(actual) >= 4
    for block in actual:
        compile(block.text, f"line {block.line}", "exec")


def test_all_excluded_commands_exist() -> None:
    reasons = {why_not(typed.text) for typed in EVERY}
    assert {*NOT_RUN} <= reasons, {*NOT_RUN} - reasons


# --- with --all: as typed
# ---------------------------------------------------------------------------------------------


def prepare(page: Path, folder: Path) -> dict[str, str]:
    """Prepare the files that a reader of the page has before its first line.

    Return the shell's environment.
    """
    for colour, (label, pixels) in enumerate({"cat": (200, 60, 60), "dog": (60, 60, 200)}.items()):
        for number in range(25):
            coloured(folder / "photos" / label / f"{number}.jpg", pixels, seed=colour * 10 + number)
    coloured(folder / "photo.jpg", (200, 60, 60), seed=1)
    for block in blocks(page):
        if block.language == "python" and (named := re.match(r"# (\w+\.py)\n", block.text)):
            (folder / named[1]).write_text(block.text)
    (folder / ".readme").symlink_to(PICTURES)
    text = " ".join(typed.text for typed in commands(page) if not why_not(typed.text))
    if "weights.safetensors" in text:
        script = (
            "import torchvision, safetensors.torch as s; m = "
            "torchvision.models.resnet18(num_classes=10); "
        )
        script += f"s.save_file(m.state_dict(), {str(folder / 'weights.safetensors')!r})"
        subprocess.run([sys.executable, "-c", script], check=True, env=environment())
    for run in RUNS:
        begun = re.search(rf"output=runs/{run}\b", text)
        used = re.search(rf"(runs/|show |compare .*){run}\b", text)
        if used and (not begun or used.start() < begun.start()):
            ok("recipe=digits", "mode=single", "epochs=1", f"output={folder / 'runs' / run}")
    programs = folder / "bin"
    programs.mkdir()
    modules = {"launch.sh": "trainer", "trainer": "trainer", "torchrun": "torch.distributed.run"}
    for program, command in {
        "python": "",
        **{key: f" -m {module}" for key, module in modules.items()},
    }.items():
        home = folder if program == "launch.sh" else programs
        message = "export TRAINER_COMMAND=./launch.sh; " if program == "launch.sh" else ""
        (home / program).write_text(
            f'#!/bin/bash\n{message}exec {shlex.quote(sys.executable)}{command} "$@"\n'
        )
        (home / program).chmod(0o755)
    return environment(PATH=f"{programs}:{os.environ['PATH']}", HOME=str(folder))


def lines_to_run(page: Path) -> list[Typed]:
    return [typed for typed in commands(page) if not why_not(typed.text) and not typed.wrong]


@pytest.mark.full("an hour: each command as it is typed")
@pytest.mark.parametrize("page", [page for page in PAGES if any(lines_to_run(page))], ids=name)
def test_commands_run_as_typed(page: Path, tmp_path: Path) -> None:
    variables = prepare(page, tmp_path)
    for typed in lines_to_run(page):
        # The command repeats an earlier one.
        shorter = " repeats=1 steps=3" * ("compare recipe=" in typed.text)
        line = typed.text + shorter
        shell_line = ["bash", "-o", "pipefail", "-c", line]
        completed = subprocess.run(
            shell_line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1800
        )
        # The command may find something wrong with the machine.
        allowed = (0, 3) if line.endswith(" doctor") else (0,)
        assert completed.returncode in allowed, (
            f"{typed}\n{completed.stdout[-3000:]}\n{completed.stderr[-3000:]}"
        )
        assert "Traceback" not in completed.stderr, f"{typed}\n{completed.stderr[-3000:]}"


@pytest.mark.full("minutes: a plan for each run that this machine cannot have")
@pytest.mark.parametrize("text", PLANS)
def test_commands_that_cannot_run_here_are_planned(text: str, tmp_path: Path) -> None:
    words, variables = shell.ours(shell.split(text)[0]) or ([], {})
    count = int(
        variables.get("NPROC", 8 if "NNODES" in variables or "SLURM_STEP_ID" in variables else 1)
    )
    nodes = int(variables.get("NNODES", variables.get("SLURM_STEP_NUM_NODES", 1)))
    more = [f"nproc={count * nodes}"] if count * nodes > 1 else []
    mode = (
        []
        if any(word.startswith("mode=") for word in words)
        else [f"mode={load(_recipe(words, tmp_path)).mode}"]
    )
    output = ok(
        "plan",
        *words,
        *more,
        *mode,
        "memory=80GiB",
        "--json",
        cwd=tmp_path,
    ).stdout
    assert json.loads(output)


def _recipe(words: list[str], folder: Path) -> str:
    chosen = next(word.partition("=")[2] for word in words if word.startswith("recipe="))
    return str(folder / chosen) if chosen.endswith(".yaml") else chosen


@pytest.mark.full("trains")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if name(page) in ("README.md", "python", "predict")], ids=name
)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    ok(
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "epochs=1",
        "output=runs/first",
        cwd=tmp_path,
    )
    for stem in ("photo", "other"):
        Image.new("L", (8, 8)).save(tmp_path / f"{stem}.png")
    (tmp_path / ".readme").symlink_to(PICTURES)
    for number, block in enumerate(block for block in blocks(page) if block.language == "python"):
        command = [sys.executable, str(tmp_path / f"{number}.py")]
        Path(command[1]).write_text(block.text)
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600
        )
        assert completed.returncode == 0, completed.stderr


def test_every_command_is_shown_somewhere() -> None:
    shown = [shell.ours(line) for typed in EVERY for line in shell.split(typed.text)]
    assert {*COMMANDS} - {"train", "version", "help"} <= {
        word for candidate in shown if candidate for word in candidate[0][:1]
    }
