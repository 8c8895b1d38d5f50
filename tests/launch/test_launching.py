"""Ranks that start, fail, are stopped and lose their launcher; the exit code and the error line of
each case.

Ranks here run a plugin that puts a small stand-in for `trainer.training.loop` in place: only
launching is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import warm
from tests.command_line import PROJECT, alive, free_port, python, within
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.launch import launching
from trainer.launch.topology import Launch
from trainer.processes import early, family, fork_server, interrupts
from trainer.recipe import load

MPIRUN = {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_SIZE": "3"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "3",
}


def command(*words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "trainer",
        "recipe=digits",
        "plugin=stand_in",
        "devices=[cpu]",
        *words,
    ]


def start(
    *words: str,
    case: str = "",
    **environment: str,
) -> subprocess.Popen[str]:
    variables = {**os.environ, "CASE": case, **environment}
    pipe = subprocess.PIPE
    return warm.Popen(
        command(*words),
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=variables,
    )


def wait_until_ready(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """The ranks' process ids, once all of them run."""
    assert process.stdout is not None
    text = ""
    while text.count("ready") < ranks:
        line = process.stdout.readline()
        assert line, process.communicate()
        text += line
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def finished(
    process: subprocess.Popen[str],
    code: int = 0,
) -> tuple[str, str]:
    """Return the output and errors of a launch that ended with this exit code."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    return output, errors


def test_a_launch_under_torchrun_uses_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    recipe = load(None, "devices=[cpu]")
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(SetupError, match=r"RANK=1 WORLD_SIZE=4 .*MASTER_ADDR.*MASTER_PORT"):
        launching.launch_to_start(recipe)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launching.launch_to_start(recipe) is None
    assert launching.launch_to_start(recipe, "2") is None
    with pytest.raises(RecipeError, match=r"torchrun.s --max-restarts=5"):
        launching.launch_to_start(recipe, max_restarts=5)
    with pytest.raises(RecipeError, match=r"nproc=3 .*torchrun.*\b2\b"):
        launching.launch_to_start(recipe, "3")
    with pytest.raises(RecipeError, match=r"mode=single .*\b4\b"):
        launching.launch_to_start(load(None, "mode=single", "devices=[cpu]"))
    with pytest.raises(RecipeError, match=r"batch_size=3 .*\b4 processes.*batch_size=4\b"):
        launching.launch_to_start(load(None, "batch_size=3", "devices=[cpu]"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    single = load(None, "mode=single", "devices=[cpu]")
    assert launching.launch_to_start(single) is None
    assert launching.launch_to_start(single, max_restarts=1) == Launch(1)


def test_torchs_wrappers_for_debugging_are_refused_where_they_end_ddp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(SetupError, match="set TORCH_DISTRIBUTED_DEBUG=INFO"):
        launching.launch_to_start(load("digits", "mode=ddp"), "2")
    assert launching.launch_to_start(load("digits", "mode=local_sgd"), "2") is not None
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert launching.launch_to_start(load("digits", "mode=ddp"), "2") is not None


def test_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "trainer_test_good.py").write_text("x = 1\n")
    (tmp_path / "trainer_test_needy.py").write_text("import trainer_test_absent\n")
    launching.load_plugin(None)
    launching.load_plugin("trainer_test_good")
    assert sys.modules.pop("trainer_test_good").x == 1
    for name, expected in (
        ("trainer_test_nowhere", "no module of that name"),
        ("trainer_test_good.py", "write plugin=trainer_test_good, without .py"),
        ("trainer_test_needy", "imports trainer_test_absent, which is not installed"),
        ("..", "plugin=.."),
    ):
        with pytest.raises(RecipeError, match=expected):
            launching.load_plugin(name)
        sys.modules.pop("trainer_test_good", None)


def test_two_launches_at_once_do_not_collide(work: Path) -> None:
    both = [start("nproc=2"), start("nproc=2")]
    for process in both:
        output, errors = finished(process)
        assert errors == ""
        assert sorted(re.findall(r"rank \d of 2", output)) == ["rank 0 of 2", "rank 1 of 2"]
        assert "at 127.0.0.1" in output
    assert list((work / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (MPIRUN, ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK")),
        (STEP, ("SLURM_LOCALID", "SLURM_PROCID")),
    ],
    ids=["mpirun", "srun"],
)
def test_the_first_of_several_tasks_on_a_node_starts_all_ranks(
    work: Path, job: dict[str, str], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        start(
            "batch_size=96",
            **job,
            **dict.fromkeys(names, str(task)),
        )
        for task in range(3)
    ]
    answers = [finished(task) for task in tasks]
    assert sorted(re.findall(r"rank \d of 3", answers[0][0])) == [
        "rank 0 of 3",
        "rank 1 of 3",
        "rank 2 of 3",
    ]
    assert re.fullmatch(r"trainer: task 2 .*task 0 .*\b3 ranks.*\n", answers[2][1])
    assert not answers[2][0]
    for name, value in {**job, **dict.fromkeys(names, "1")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=r"task 1 .*task 0 "):
        launching.wants_children(load(None, "batch_size=96", "devices=[cpu]"), None)
    with pytest.raises(RecipeError, match="mode=single"):
        launching.wants_children(load(None, "mode=single", "devices=[cpu]"), None)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["recipe=digits", "mode=single", "output=x"], "mode=ddp"),
        (
            ["evaluate", "checkpoint=x"],
            "torchrun --standalone --nproc_per_node=2 -m trainer evaluate",
        ),
        (["predict", "checkpoint=x", "data.root=x"], r"predict .*\b1 process\b"),
        (["prove", "minutes=1", "output=x"], r"prove .*\b1 process\b"),
    ],
)
def test_commands_of_one_process_do_not_run_once_per_task(
    work: Path, words: list[str], instead: str
) -> None:
    names = ("LOCAL_RANK", "LOCAL_SIZE", "RANK", "SIZE")
    task = dict(zip((f"OMPI_COMM_WORLD_{name}" for name in names), "1212", strict=True))
    completed = python(
        "-m",
        "trainer",
        *words,
        start=warm.run,
        env={**os.environ, **task},
        cwd=work,
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert len(completed.stderr.splitlines()) == 1
    assert re.search(instead, completed.stderr)
    assert "started 2" in completed.stderr
    assert not (work / "x").exists()


@pytest.mark.parametrize(
    ("case", "code", "expected"),
    [
        ("nan", 5, "trainer: error: nan 3\n"),
        (
            "early",
            2,
            "trainer: error: rank 1 refuses\n",
        ),  # rank 0 is stopped by torchrun's SIGTERM
        (
            "kill",
            7,
            r"trainer: error: rank 1 .*SIGKILL \(.*memory\)\n",
        ),
    ],
)
def test_the_failing_rank_is_named_once_and_its_code_returned(
    work: Path, case: str, code: int, expected: str
) -> None:
    _, errors = finished(start("nproc=2", case=case), code)
    assert re.fullmatch(expected, errors)
    assert list((work / "tmp").iterdir()) == []


def test_a_bug_is_a_sentence_first_and_its_traceback_once(work: Path) -> None:
    _, errors = finished(start("nproc=2", case="bug"), 1)
    assert errors.startswith("trainer: error: ZeroDivisionError: a bug (")
    assert errors.count("Traceback") == 1
    assert errors.endswith("\nZeroDivisionError: a bug\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR2, 143)]
)
def test_a_signal_reaches_the_ranks_and_their_word_the_user(
    work: Path, number: int, code: int
) -> None:
    process = start("nproc=2", case="save")
    ranks = wait_until_ready(process, 2)
    process.send_signal(number)
    assert re.fullmatch(r"trainer: .*step 3\b.*\n", finished(process, code)[1])
    assert not any(map(alive, ranks))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_torchs_code_swallows_comes_again(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    monkeypatch.setattr(launching, "RERAISE_SECONDS", 0.1)
    monkeypatch.setenv(family.PARENT, "1")
    monkeypatch.setattr(early, "is_unused", lambda number: False)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SignalException) as caught, launching.passing_signals_on():
            with suppress(Exception):
                signal.raise_signal(number)
            time.sleep(5)
        assert caught.value.sigval == number
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "it does not come a third time"
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for each in (signal.SIGALRM, interrupts.SECOND_CTRL_C):
            signal.signal(each, signal.SIG_DFL)


@pytest.mark.parametrize("number", early.SAVE_AND_GO)
def test_before_there_is_anything_to_save_a_signal_has_the_same_code(
    work: Path, number: int
) -> None:
    (work / "hears.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(number)})\nsum(range(10**5))\n"
    )
    words = [*command(), "mode=single", "plugin=hears"]
    completed = warm.run(
        [word for word in words if word != "plugin=stand_in"], timeout=60, capture_output=True
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (143, b"", b"")


def test_ctrl_c_before_a_rank_is_python_shows_nothing(work: Path) -> None:
    """The whole terminal gets the signal, including the process that forks ranks, in its very first
    moments.
    """
    struck = "    os.kill(0, signal.SIGINT)\n    sum(range(10**5))\n"
    (work / "sitecustomize.py").write_text(
        f"import os, signal\nif {fork_server.SERVED_PID!r} in os.environ:\n{struck}"
    )
    variables = {**os.environ, "PYTHONPATH": f"{work}:{PROJECT}"}
    completed = python(
        *command("nproc=2")[1:],
        env=variables,
        cwd=work,
        start_new_session=True,
    )
    assert (
        completed.returncode == 130
        and "Traceback" not in completed.stderr
        and "Fatal" not in completed.stderr
    ), completed.stderr


def test_no_rank_outlives_its_launcher(work: Path, full: bool) -> None:
    for _ in range(10 if full else 1):
        process = start("nproc=2", case="sleep")
        ranks = wait_until_ready(process, 2)
        process.kill()
        process.communicate(timeout=20)
        assert within(5, lambda ranks=ranks: not any(map(alive, ranks)))


def test_a_rank_whose_launcher_died_before_it_started_leaves(work: Path) -> None:
    environment = {**os.environ, family.PARENT: "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert warm.run(command(), env=environment, timeout=60).returncode == PeerError.code


def test_two_nodes_on_one_host(work: Path) -> None:
    port = free_port()
    nodes = [
        start("nproc=1", NNODES="2", NODE_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in ("0", "1")
    ]
    for rank, process in enumerate(nodes):
        assert f"rank {rank} of 2" in finished(process)[0]


@pytest.mark.slow
def test_nodes_that_do_not_meet_say_where(work: Path) -> None:
    port = free_port()
    process = start(
        "nproc=1", "timeout=2", NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    _, errors = finished(process, 3)
    assert re.fullmatch(rf"trainer: error: .*127\.0\.0\.1:{port}\b.*\n", errors)


def test_a_fork_server_that_is_killed_as_it_forks_a_rank_is_lost(tmp_path: Path) -> None:
    def killed() -> None:
        raise EOFError("unexpected EOF")

    ending = launching._ending(killed, tmp_path, Launch(2))
    assert ending is not None and ending.code == PeerError.code


def test_a_rank_that_is_forked_as_a_signal_comes_is_ended(tmp_path: Path) -> None:
    """Python would wait for the rank when the launcher exits, and the rank would wait for its peers
    for ever.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def interrupted() -> None:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
        raise SignalException("", signal.SIGINT)

    ending = launching._ending(interrupted, tmp_path, Launch(2))
    assert ending is not None and ending.code == 130 and not multiprocessing.active_children()
