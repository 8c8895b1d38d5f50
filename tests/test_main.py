"""The command line: usage, recipes, and one-line errors that are printed once, before anything
heavy is imported.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.command_line import QUIET, environment, ok, suggested, suggested_commands
from tests.guide import shell
from trainer import __main__ as cli
from trainer.cli.command_table import COMMANDS
from trainer.errors import (
    LIBRARIES,
    CheckpointError,
    DeviceMemoryError,
    PeerError,
    RecipeError,
    explain,
    is_out_of_memory,
)
from trainer.launch import endings, launching
from trainer.processes import family
from trainer.recipe import load, shipped_recipes

ROOT = Path(__file__).parent.parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "NPROC", "NNODES", "SLURM_STEP_ID", "TORCHELASTIC_ERROR_FILE")
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RANK_0 = {**RANK_1, "RANK": "0", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, whatever runs these tests."""
    for name in (*LAUNCHERS, "TRAINER_COMMAND", family.PARENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(family, "die_with_parent", lambda: None)


def outcome(
    capsys: pytest.CaptureFixture[str],
    *words: str,
) -> tuple[int, str, str]:
    code = cli.answer(words)
    output, errors = capsys.readouterr()
    return code, output, errors


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_usage_lists_the_recipes(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = outcome(capsys, *words)
    assert (code, errors) == (0, "")
    assert output.startswith("usage: python -m trainer COMMAND")
    for name in shipped_recipes():
        assert f"\n  {name} " in output


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output, _ = outcome(capsys, "recipes")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(shipped_recipes())
    code, output, _ = outcome(capsys, "recipes", "resnet50", "epochs=3")
    assert code == 0
    (tmp_path / "printed.yaml").write_text(output)
    assert load(tmp_path / "printed.yaml").to_dict() == load("resnet50", "epochs=3").to_dict()


@pytest.mark.slow(cases=["torch"])
@pytest.mark.parametrize("module", ["pydantic", "torch"])
def test_ctrl_c_during_imports_ends_without_a_word(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), 2)\ntime.sleep(20)"
    )
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [
        sys.executable,
        "-m",
        "trainer",
        "recipe=digits",
        "mode=single",
        f"output={tmp_path / 'run'}",
    ]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "", "")


def test_recipes_into_a_reader_that_leaves() -> None:
    script = f"{sys.executable} -m trainer recipes resnet50 | true; echo ${{PIPESTATUS[0]}}"
    answer = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (answer.stdout, answer.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["recips"], f"'recips' recipes? {' '.join(COMMANDS)}"),
        (["doctor", "now"], "doctor"),
        (["train", "epochs"], "'epochs' key=value"),
        (["recipe=digts"], "recipe=digits?"),
        (["recipe=digits", "optimzer.lr=1"], "optimzer optimizer?"),
        (["recipe=digits", "recipe=mnist"], "recipe=digits recipe=mnist"),
        (["recipe=digits", "nproc=x"], "nproc=x"),
        (["recipe=digits", "mode=local_sgd", "nproc=3", "batch_size=64"], "3 batch_size=63 66"),
        (["recipe=digits", "mode=single", "nproc=2"], "mode=single 2"),
        (["recipe=digits", "model.name=resnet5O"], "model.name=resnet50?"),
        (["recipe=digits", "data.name=digit"], "data.name=digits?"),
        (["recipe=digits", "checkpoint=runs/x"], "checkpoint= evaluate"),
        (
            ["recipe=digits", "plugin=trainer_test_absent", "mode=single"],
            "plugin=trainer_test_absent",
        ),
        (["evaluate"], "RUN"),
        (["recipes", "schema", "digits"], "recipes schema digits"),
        (["recipes", "key"], "recipe=key"),
        (["recipes", "diff", "digits", "mnist"], "recipe=diff"),
        (["recipes", "keys", "optimizer", "lr"], "recipes keys optimizer"),
        (["evaluate", "checkpoint=x", "nproc=2"], "nproc= torchrun"),
    ],
)
def test_an_error_is_one_line_and_exit_2(
    words: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = outcome(capsys, *words)
    assert (code, output) == (2, "")
    assert errors.startswith("trainer: error: ") and errors.count("\n") == 1
    assert not [name for name in names.split() if name not in errors], errors
    for setting in suggested(errors):
        key, _, value = setting.partition("=")
        assert load(value) if key == "recipe" else load("digits", setting)
    for command in suggested_commands(errors):
        shell.check(command)


def test_among_ranks_it_is_printed_once_and_left_for_torchrun(capsys, monkeypatch, tmp_path):
    def as_rank(environment: dict[str, str]) -> str:
        file = tmp_path / f"{environment['RANK']}.json"
        for name, value in {**environment, "TORCHELASTIC_ERROR_FILE": str(file)}.items():
            monkeypatch.setenv(name, value)
        code, output, errors = outcome(capsys, "recipe=digts")
        assert (code, output) == (2, "")
        message = json.loads(file.read_text())["message"]
        assert "recipe=digits" in suggested(message["message"])
        assert message["message"] == message["extraInfo"]["py_callstack"]
        assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 5
        return errors

    monkeypatch.setattr(endings, "START_SECONDS", 0.0)
    assert as_rank(RANK_0).count("recipe=digits?") == 1
    assert as_rank(RANK_1) == ""
    # Under our own launcher, which prints for all.
    monkeypatch.setenv(family.PARENT, str(os.getppid()))
    assert as_rank(RANK_0) == ""


def test_a_rank_that_woke_another_has_failed_before_it(tmp_path, monkeypatch, capsys):
    """The other rank fails when it is woken, and may write first."""
    woken: list[float] = []

    def wake(line: str, code: int, error: BaseException) -> str:
        woken.append(time.time())
        time.sleep(0.01)
        return "rank 1 was silent"

    monkeypatch.setattr(endings, "name_stopped_ranks", wake)
    for name, value in {**RANK_0, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}.items():
        monkeypatch.setenv(name, value)
    outcome(capsys, "recipe=digts")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "rank 1 was silent" and message["extraInfo"]["time"] <= woken[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipe=digts"], r"recipe=digts: .*recipe=digits\?"),
        (["recipe=digits", "data.name=imagefolder", "data.root=/nowhere"], "data.root=/nowhere"),
    ],
)
def test_torchrun_shows_our_line(tmp_path: Path, words: list[str], line: str) -> None:
    """Another rank may fail first: torchrun ends rank 0, which prints the line, as soon as one has
    failed.
    """
    late = (
        "import os, runpy, time\ntime.sleep(os.environ['RANK'] == "
        "'0')\nrunpy.run_module('trainer', None, '__main__')"
    )
    (tmp_path / "late.py").write_text(late)
    arguments = ["--nproc_per_node=2", f"--log_dir={tmp_path}", str(tmp_path / "late.py"), *words]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    answer = warm.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 1  # torchrun's own, whatever the rank's
    assert len(re.findall(f"trainer: error: {line}", answer.stderr)) == 1
    assert re.search(f"traceback : {line}", answer.stderr)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (RecipeError("a\nb"), 2, "a b"),
        (CheckpointError("none"), 4, "none"),
        (PeerError("gone"), 7, "gone"),
        (DeviceMemoryError("too big"), 6, "too big"),
        (KeyboardInterrupt(), 130, ".*Ctrl-C$"),
        (
            OutOfMemoryError("CUDA: tried to allocate 3 GiB"),
            6,
            r".*\bbatch_size\b.*\baccumulate\b.*\(CUDA: tried",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            6,
            r".*\bbatch_size\b.*\baccumulate\b.*\(DefaultCPUAllocator",
        ),
        (RuntimeError("CUDA driver error: out of memory"), 6, r".*\baccumulate\b.*\(CUDA driver"),
        (
            RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
            6,
            r".*\baccumulate\b.*\(NCCL",
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), 6, r".*\baccumulate\b.*\(CUBLAS"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 6, r".*\baccumulate\b.*\(\[Errno"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            28,
            r".* /data/x: .*output=",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            28,
            r".*\(\[Errno 2\] .*\['/tmp'\]\): .*output=",
        ),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            3,
            r"torch .*\(operator torchvision::nms .*--force-reinstall",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            3,
            r".*\btorch; .*install torch$",
        ),
        (
            ModuleNotFoundError("No module named 'mine'", name="mine"),
            1,
            "ModuleNotFoundError: .*'mine'",
        ),
        (
            ImportError("/home/me/lib/mine.so: file too short"),
            1,
            r"ImportError: /home/me/lib/mine\.so: ",
        ),
        (
            RuntimeError(
                "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, "
                "but you set"
            ),
            2,
            "adaptive_avg_pool2d_backward_cuda .*: use deterministic=false",
        ),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_explain(error: BaseException, code: int, expected: str) -> None:
    line, actual = cli.explain(error)
    assert actual == code
    assert re.match(expected, line)
    assert code == 1 or "\n" not in line


HIDING = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = {names}
def find_unless_hidden(cls, name, *rest):
    return None if name in hidden else find(name, *rest)
PathFinder.find_spec = classmethod(find_unless_hidden)
"""


@pytest.mark.parametrize(
    ("names", "words", "packages"),
    [
        ({"omegaconf", "yaml"}, ["version"], "omegaconf pyyaml"),
        ({"pydantic", "xxhash"}, ["recipe=digits", "mode=ddp", "nproc=2"], "pydantic xxhash"),
        ({"torch"}, ["recipe=digits", "mode=single", "max_steps=1"], "torch"),
        (
            {"matplotlib", "scipy"},
            ["compare", "recipe=digits", "modes=[single]", "max_steps=2"],
            "matplotlib scipy",
        ),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else None,
)
def test_a_missing_package_is_named_at_once(names, words, packages, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(names=names))
    command = [sys.executable, "-B", "-m", "trainer", *words]
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    completed = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
    )
    message = (
        f"trainer: error: not installed: {packages.replace(' ', ', ')}; type "
        f"pip install {packages}\n"
    )
    assert (completed.returncode, completed.stderr) == (3, message), (
        completed.stdout + completed.stderr
    )


def test_every_declared_library_can_be_named_as_missing() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = [line for line in declared if ";" not in line]  # others are not for every machine
    assert sorted(LIBRARIES.values()) == sorted(re.match(r"[\w-]+", line)[0] for line in needed)


def test_several_ranks_are_started_with_the_same_words(monkeypatch, capsys):
    started: list[object] = []
    monkeypatch.setattr(launching, "start", lambda recipe, *given: started.append(given) or 5)
    words = ["recipe=digits", "nproc=2", "devices=[cpu]", "epochs=3"]
    assert outcome(capsys, *words) == outcome(capsys, *words, "max_restarts=3") == (5, "", "")
    kept = ["recipe=digits", "devices=[cpu]", "epochs=3"]
    assert started == [(kept, launching.Launch(2), 0), (kept, launching.Launch(2), 3)]
    code, _, line = outcome(capsys, *words, "max_restarts=often")
    assert code == 2 and "max_restarts=often" in line


@pytest.mark.parametrize(
    "words", [("recipe=digits", "mode=single"), ("predict", "checkpoint=x"), ("runs",)]
)
def test_every_command_reports_a_deleted_working_directory(words, capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, output, errors = outcome(capsys, *words)
    assert (code, output) == (3, "")
    assert re.fullmatch(r"trainer: error: .*folder .*deleted.* cd .*\n", errors)


def test_rejecting_imports_nothing_heavy() -> None:
    """Torch alone takes seconds; without it a rejection takes 0.2 s (timed by hand, not here)."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM")
    }
    environment["NPROC"] = "3"
    words = [
        "-X",
        "importtime",
        "-m",
        "trainer",
        "recipe=digits",
        "mode=local_sgd",
        "batch_size=64",
        "devices=[cpu]",
    ]
    answer = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "trainer.recipe" in imported
    assert not {"torch", "torchvision", "numpy"} & imported
    assert "3 processes" in answer.stderr


@pytest.mark.parametrize(
    "text",
    [
        "GET was unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ],
)
def test_a_library_that_fails_on_a_full_card_is_out_of_memory(monkeypatch, text):
    free = {0: 2**30, 1: 2**20, 2: 0}  # nobody computes on the last
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda index: (free[index], 80 * 2**30),
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: int(index < 2))
    assert is_out_of_memory(RuntimeError(text)) and explain(RuntimeError(text))[1] == 6
    assert not is_out_of_memory(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    free[1] = 2**30
    assert not is_out_of_memory(RuntimeError(text)), "there is room: it is broken"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    free[1] = 0
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.slow
def test_files_called_like_libraries_are_not_run(tmp_path):
    """Neither by a launcher nor by its ranks; and what does lie there is found."""
    for name in ("yaml", "random", "json", "numpy", "omegaconf", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('SHADOW')\n")
    words = ["recipe=digits", "max_steps=2", *QUIET]
    completed = ok(*words, "mode=ddp", "nproc=2", cwd=tmp_path, python=["-u"])
    assert "SHADOW" not in completed.stdout + completed.stderr
    for name in ("yaml", "random", "json", "numpy", "omegaconf", "tempfile"):
        (tmp_path / f"{name}.py").unlink()
    (tmp_path / "mine.py").write_text("print('PLUGIN FOUND', flush=True)\n")
    assert "PLUGIN FOUND" in ok(*words, "mode=single", "plugin=mine", cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_run_of_one_process_does_not_load_what_it_does_not_use(tmp_path):
    """Importing any of these takes a tenth of a second to seconds, which every run would spend
    before its first step.
    """
    code = (
        "import sys; from trainer.__main__ import answer; code = "
        "answer(sys.argv[1:]); print('loaded', *sys.modules)"
    )
    words = ["recipe=digits", "mode=single", "epochs=1", f"output={tmp_path / 'run'}"]
    completed = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    *_, last = completed.stdout.splitlines()
    loaded = {*last.split()[1:]}
    assert last.startswith("loaded ") and "trainer.training.loop" in loaded, completed.stderr
    others = (
        "sklearn scipy matplotlib pandas networkx IPython timm onnx wandb "
        "mlflow optuna pyarrow grpc requests"
    )
    ours = "trainer.commands trainer.pool"
    torchs = (
        "torch.distributed.run torch.distributed.checkpoint "
        "torch._inductor.compile_fx torch._inductor.codecache"
    )
    assert loaded & {*others.split(), *ours.split(), *torchs.split()} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "shown"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_idle_threads_do_not_keep_the_cores_for_long(
    env: dict[str, str], shown: str, tmp_path: Path
) -> None:
    """OpenMP prints its settings when torch loads it.

    Another one than GNU's has another line.
    """
    command = [
        sys.executable,
        "-m",
        "trainer",
        "recipe=digits",
        "mode=single",
        "batch_size=100000",
        f"output={tmp_path / 'x'}",
    ]
    variables = environment(OMP_DISPLAY_ENV="VERBOSE", **env)
    completed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=180)
    if "GOMP_SPINCOUNT" not in completed.stderr:
        pytest.skip("torch is built with another OpenMP")
    assert f"GOMP_SPINCOUNT = '{shown}'" in completed.stderr
