"""Signals that reach several processes of a run, by several routes; `tests.signals` has
the table.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import signals, warm
from tests.command_line import PROJECT, environment, latest, ok, trainer, wait_for
from tests.data.photo_folders import photo_set
from tests.signals import (
    APART,
    COMBINATIONS,
    LAUNCHERS,
    LIMIT,
    MOMENTS,
    RUNS,
    WORDS,
    Combination,
    check_ended,
    chosen,
    held_job,
    held_program,
    let_go,
    send,
)
from tests.storms import Job, slack
from trainer.processes.early import COPY_SECONDS


def name(combination: Combination) -> str:
    return " ".join(combination)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("signals")


def struck(home, combination):
    signals.strike(home / name(combination), home / f"whole {combination.mode}", combination)


def test_the_table_has_each_value_and_each_pair():
    for size in (1, 2):
        parts = [signals.parts(each, size) for each in COMBINATIONS]
        assert set().union(*parts) == set().union(
            *(signals.parts(each, size) for each in chosen(size))
        )
    assert len(chosen(1)) <= 8 and len(chosen(2)) <= 40
    fast = [each for each in chosen(1) if each.mode != "hogwild"]
    for field in ("signal", "target", "moment", "launcher"):
        values = {getattr(each, field) for each in COMBINATIONS}
        assert {getattr(each, field) for each in fast} == values


@pytest.mark.parametrize(
    "combination",
    [
        # The other combinations have all values except the mode hogwild.
        pytest.param(each, marks=[pytest.mark.slow] * (each.mode == "hogwild"), id=name(each))
        for each in chosen(1)
    ],
)
def test_one_signal_counts_once(home, combination):
    struck(home, combination)


@pytest.mark.slow
@pytest.mark.parametrize(
    "combination", [each for each in chosen(2) if each not in chosen(1)], ids=name
)
def test_one_signal_counts_once_in_each_pair(home, combination):
    struck(home, combination)


@pytest.mark.full("an hour: every combination")
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("mode", RUNS)
def test_one_signal_counts_once_in_every_combination(home, mode, moment, launcher):
    for combination in COMBINATIONS:
        if combination[2:] == (mode, moment, launcher):
            struck(home, combination)


# --- a person's second Ctrl-C
# -------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["ddp-launcher-ours"])
@pytest.mark.parametrize(
    ("mode", "target", "launcher"),
    [
        ("single", "group", "ours"),
        ("ddp", "launcher", "ours"),
        pytest.param("ddp", "group", "torchrun", marks=pytest.mark.slow),
        pytest.param("ddp", "group", "ours", marks=pytest.mark.slow),
        pytest.param("pipeline", "group", "ours", marks=pytest.mark.slow),
        pytest.param("hogwild", "group", "torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, mode, target, launcher):
    """No rank reaches the end of its step."""
    torchrun = launcher == "torchrun"
    with held_job(
        tmp_path / "run",
        "training",
        *RUNS[mode],
        torchrun=torchrun,
        ranks=1 + (mode != "single"),
    ) as job:
        for _ in range(2):
            send(job, target, signal.SIGINT)
            time.sleep(COPY_SECONDS + 0.3)
        code, _ = job.end(5 * slack())
        assert code == (1 if torchrun else 130), job.text()
        # A rank that gives up waiting for its step names the seconds.
        assert not re.search(r"\b\d+ s after SIG", job.text()), job.text()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-????????"))[1:], (
        "that of step 2 alone"
    )


@pytest.mark.full("torch may lose the signal on a loaded machine")
def test_ctrl_backslash_ends_the_run_without_a_traceback(tmp_path):
    with held_job(
        tmp_path / "run", "training", *RUNS["ddp"], start=subprocess.Popen, ranks=2
    ) as job:
        send(job, "group", signal.SIGQUIT)
        # torch's own handler of SIGQUIT raises once, which code that catches exceptions may lose:
        # a person types Ctrl-Backslash again.
        with suppress(subprocess.TimeoutExpired):
            job.main.wait(5)
        if job.main.poll() is None:
            send(job, "group", signal.SIGQUIT)
        code, _ = job.end(10 * slack())
        assert code == 128 + signal.SIGQUIT and "Traceback" not in job.text(), job.text()


@pytest.mark.slow
def test_a_signal_after_the_last_file_leaves_a_completed_run_completed(tmp_path):
    with Job(
        tmp_path / "run",
        *WORDS,
        *RUNS["ddp"],
        start=warm.Popen,
    ) as job:
        wait_for(
            lambda: '"completed"' in "".join(f.read_text() for f in job.folder.glob("result.json")),
            job.main,
            60 * slack(),
        )
        send(job, "group", signal.SIGTERM)
        code, _ = job.end(LIMIT * slack())
        assert code == 0, job.text()


@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_launcher_that_passes_a_signal_on_late_ends_no_rank(tmp_path, launcher):
    """On a busy machine the launcher passes the signal on seconds after the terminal has sent it to
    the ranks.
    """
    torchrun = launcher == "torchrun"
    with held_job(
        tmp_path / "run",
        "training",
        *RUNS["ddp"],
        torchrun=torchrun,
        ranks=2,
    ) as job:
        job.main.send_signal(signal.SIGSTOP)
        send(job, "group", signal.SIGINT)
        time.sleep(COPY_SECONDS + 0.3)
        job.main.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        let_go(job)
        check_ended(job, {1} if torchrun else {130}, "training")


# --- programs that send signals


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_saves_and_a_second_one_does_not(tmp_path):
    """A real terminal signals its foreground process group."""
    for presses in (1, 2):
        files = tmp_path / f"run{presses}-held"
        words = [*WORDS, *RUNS["ddp"], f"output={tmp_path}/run{presses}"]
        variables = environment(HELD_MOMENT="training", HELD_FILES=str(files))
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(PROJECT)
            os.execve(sys.executable, [sys.executable, "-m", "trainer", *words], variables)
        reader = threading.Thread(target=read_all, args=(terminal,))
        reader.start()
        wait_for(
            lambda files=files: len([*tmp_path.glob(f"{files.name}-?")]) == 2, seconds=60 * slack()
        )
        for _ in range(presses):
            os.write(terminal, b"\x03")
            time.sleep(COPY_SECONDS + 0.3)
        if presses == 1:
            Path(f"{files}-struck").touch()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
        reader.join()
        saved = [path.name for path in (tmp_path / f"run{presses}" / "checkpoints").glob("*")]
        assert len(saved) == 2 - presses, saved


def read_all(terminal):
    """Read the output until all processes have closed the terminal."""
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_timeout_signals_its_child_and_then_the_group(tmp_path, launcher, sent):
    class UnderTimeout(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(["timeout", "600", *command], **options)

    torchrun = launcher == "torchrun"
    start = UnderTimeout
    with held_job(
        tmp_path / "run",
        "saving",
        *RUNS["ddp"],
        torchrun=torchrun,
        start=start,
    ) as job:
        job.main.send_signal(signal.Signals[sent])
        time.sleep(0.5)
        let_go(job)
        check_ended(job, {1} if torchrun else {130 if sent == "SIGINT" else 143}, "saving")


@pytest.mark.slow
def test_docker_stop_signals_the_launcher_and_kills_it_ten_seconds_later(tmp_path):
    with held_job(tmp_path / "run", "evaluation", *RUNS["fsdp"], ranks=2) as job:
        begun = time.monotonic()
        send(job, "launcher", signal.SIGTERM)
        let_go(job)
        check_ended(job, {143}, "evaluation")
        assert time.monotonic() - begun < 10 * slack()


@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_srun_signals_every_process_of_a_step_again_and_again(tmp_path, launcher):
    """Workers of the loader get the signal first, then the process that forks them and the helper
    processes of ranks.
    """
    photo_set(tmp_path / "photos", {"a": 20, "b": 20})
    words = [
        "data.name=imagefolder",
        f"data.root={tmp_path}/photos",
        "data.image_size=16",
        "data.workers=2",
        "batch_size=4",
        "mode=ddp",
        "nproc=2",
        "model.name=cnn_gn",
        "schedule.warmup_epochs=0",
    ]
    torchrun = launcher == "torchrun"
    with held_job(tmp_path / "run", "training", *words, torchrun=torchrun, ranks=2) as job:
        for _ in range(4):
            for pid in sorted(job.members(), reverse=True):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        let_go(job)
        check_ended(job, {143, 1, 128 + signal.SIGTERM} if torchrun else {143}, "training")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_torchrun_passes_on_configured_signals(tmp_path, number):
    class WithOption(warm.Popen):
        def __init__(self, command, **options):
            option = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"
            super().__init__(
                [*command[:3], option, *command[3:]],
                **options,
            )

    with held_job(
        tmp_path / "run", "training", *RUNS["ddp"], torchrun=True, ranks=2, start=WithOption
    ) as job:
        send(job, "launcher", number)
        let_go(job)
        check_ended(job, {1}, "training")


# --- a program that trains, and other commands
# --------------------------------------------------------------------

PROGRAM = """
import sys, trainer
from trainer.errors import Interrupted, Preempted
if __name__ == "__main__":
    try:
        trainer.train("digits", *sys.argv[2:], mode=sys.argv[1], plugin="tests.held_moments",
            nproc={nproc})
    except (Interrupted, Preempted) as error:
        print(type(error).__name__, flush=True)
        sys.exit(3)
"""


@pytest.mark.full(cases=["single-None-2-Interrupted", "single-None-15-Preempted"])
@pytest.mark.slow(cases=["ddp-2-2-Interrupted"])
@pytest.mark.parametrize(
    ("mode", "nproc", "number", "raised"),
    [
        ("ddp", 2, signal.SIGINT, "Interrupted"),
        pytest.param("ddp", 2, signal.SIGTERM, "Preempted", marks=pytest.mark.slow),
        pytest.param("single", None, signal.SIGINT, "Interrupted", marks=pytest.mark.slow),
        pytest.param("single", None, signal.SIGTERM, "Preempted", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_trains_saves_at_a_signal_and_its_copy(
    tmp_path, mode, nproc, number, raised
):
    (tmp_path / "program.py").write_text(PROGRAM.format(nproc=nproc))
    words = [word for word in WORDS[1:] if not word.startswith("plugin=")]
    with held_program(
        tmp_path / "run", [str(tmp_path / "program.py"), mode, *words], ranks=nproc or 1
    ) as job:
        for _ in range(2):
            job.main.send_signal(number)
            time.sleep(APART)
        let_go(job)
        check_ended(job, {3}, "training")
        assert raised in job.text(), job.text()


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_a_program_that_trains_counts_ctrl_c_for_its_ranks(tmp_path, presses):
    """On a busy machine srun signals every process, and the program passes the signal on seconds
    later.
    """
    (tmp_path / "program.py").write_text(PROGRAM.format(nproc=2))
    words = [word for word in WORDS[1:] if not word.startswith("plugin=")]
    with held_program(
        tmp_path / "run", [str(tmp_path / "program.py"), "ddp", *words], ranks=2
    ) as job:
        others = sorted(
            job.members().keys() - {job.main.pid},
            reverse=True,
        )
        for press in range(presses):
            for pid in others * (press == 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            time.sleep(COPY_SECONDS + 0.3)
            job.main.send_signal(signal.SIGINT)
        if presses == 1:
            time.sleep(1.0)
            let_go(job)
            check_ended(job, {3}, "training")
        else:
            job.ends(5, 3)
            assert not list((tmp_path / "run" / "checkpoints").glob("step-????????")), (
                "none was saved"
            )
        assert "Interrupted" in job.text(), job.text()


@pytest.mark.full(cases=["SIGINT"])
@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_sweep_lets_its_runs_save(tmp_path, sent):
    words = ["sweep", *WORDS, "mode=single", "optimizer.lr=[0.1,0.01]"]
    trial = tmp_path / "sweep" / "001-optimizer.lr=0.1"
    words = [
        word
        for word in words
        if word not in ("resume=auto", "optimizer.lr=0.001", "logging.progress=false")
    ]
    with held_program(
        tmp_path / "sweep", ["-m", "trainer", *words, f"output={tmp_path}/sweep"]
    ) as job:
        for target in ("group", "launcher"):
            send(job, target, signal.Signals[sent])
            time.sleep(APART)
        let_go(job)
        job.ends(LIMIT, 130 if sent == "SIGINT" else 143)
        assert list((trial / "checkpoints").glob("step-????????")), job.text()
    completed = trainer(*words, f"output={tmp_path}/sweep")
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_predict_and_compare_end_once(tmp_path, sent):
    photo_set(tmp_path / "photos", {"a": 20, "b": 20})
    small = [
        "data.name=imagefolder",
        f"data.root={tmp_path}/photos",
        "data.image_size=16",
        "batch_size=8",
    ]
    ok(
        *latest(*WORDS, *small),
        "mode=single",
        "schedule.warmup_epochs=0",
        f"output={tmp_path}/trained",
    )
    predict = [
        "predict",
        f"checkpoint={tmp_path}/trained",
        f"{tmp_path}/photos",
        "plugin=tests.held_moments",
    ]
    compare = [
        "compare",
        "recipe=digits",
        "modes=[single,ddp]",
        "nproc=2",
        "threads=1",
        "plugin=tests.held_moments",
    ]
    for command, moment in ((predict, "predicting"), (compare, "training")):
        folder = tmp_path / command[0]
        with held_program(
            folder, ["-m", "trainer", *command, f"output={folder}"], moment=moment
        ) as job:
            for target in ("group", "launcher"):
                for pid in (
                    sorted(job.members(), reverse=True) if target == "group" else [job.main.pid]
                ):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[sent])
                time.sleep(APART)
            let_go(job)
            job.ends(LIMIT, 130 if sent == "SIGINT" else 143)
        assert not list(folder.glob("predictions*"))
