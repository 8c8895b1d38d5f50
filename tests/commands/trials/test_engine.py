"""The engine of trials: finished trials are kept after any interruption, and the same arguments
resume.

Each command on it is a case.
"""

import errno
import json
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
from tests.command_line import BARE, environment, result, trainer
from tests.commands.trials.stand_in import SMALL
from trainer.__main__ import answer
from trainer.commands.trials.engine import (
    TrialEngine,
    TrialFailed,
    TrialRun,
    claim_folder,
    find_failure,
)
from trainer.errors import FolderInUseError, Interrupted
from trainer.saving.locks import lock_folder

COMPARE = [
    "compare",
    "recipe=digits",
    "modes=[single,ddp]",
    "repeats=2",
    "steps=40",
    *SMALL,
    "output=out",
]
SWEEP = ["sweep", "recipe=digits", "optimizer.lr=[0.01,0.1,1]", "threads=2", "output=out"]
# Columns: command, its arguments, arguments that resume it, its file, its number of trials, a
# fault in the third one
CASES = {
    "compare": (COMPARE, ["resume=auto"], "compare.json", 6, "single/1"),
    "sweep": (SWEEP, [], "sweep.json", 3, "003"),
}


@pytest.mark.slow(cases=["Ctrl-C-sweep", "Ctrl-C-compare", "SIGTERM-compare"])
@pytest.mark.parametrize("command", CASES)
@pytest.mark.parametrize(
    ("fault", "code"),
    [(KeyboardInterrupt(), 130), (signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_stopped_trial_continues_where_it_stopped(
    command, fault, code, machine, capsys, tmp_path
):
    words, again, file, count, third = CASES[command]
    machine.faults[third] = fault
    assert answer(words) == code
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "kept" in message
    assert (" ".join(again) or "the same command") in message
    assert json.loads((tmp_path / "out" / file).read_text())["status"] == "interrupted"
    left = [
        json.loads(path.read_text())["status"] for path in (tmp_path / "out").rglob("result.json")
    ]
    assert left.count("preempted") == 1, "the run under way was told to save and leave"
    before = machine.ran
    machine.ran = []
    assert answer([*words, *again]) == 0
    assert machine.ran[0] == before[-1] and len(before) - 1 + len(machine.ran) == count, (
        "each once, but the stopped"
    )
    report = json.loads((tmp_path / "out" / file).read_text())
    machine.ran.clear()
    assert answer([*words, *again]) == 0 and not machine.ran
    assert report["status"] == "completed"
    rows = [key for key in ("entries", "trials") if key in report]
    assert json.loads((tmp_path / "out" / file).read_text())[rows[0]] == report[rows[0]]


@pytest.mark.parametrize("command", CASES)
def test_a_full_disk_is_a_separate_error_and_finished_trials_are_kept(
    command, machine, capsys, tmp_path, monkeypatch
):
    words, again, _, count, third = CASES[command]
    opened = Path.open
    full = [True]

    def open_(path, *given, **named):
        if full[0] and path.name.endswith(".log") and third in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", open_)
    assert answer(words) == 28
    assert re.match(r"trainer: error: out: .*\bdisk\b", capsys.readouterr().err)
    finished = len(machine.ran)
    machine.ran = []
    full[0] = False
    assert answer([*words, *again]) == 0 and finished + len(machine.ran) == count


@pytest.mark.parametrize("command", CASES)
def test_a_folder_of_something_else_or_in_use_is_left_alone(
    command, machine, capsys, tmp_path, monkeypatch
):
    words = CASES[command][0]
    with monkeypatch.context() as launched:
        launched.setenv("RANK", "0")
        launched.setenv("WORLD_SIZE", "1")
        assert answer(words) == 2 and "without torchrun" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/result.json").write_text("{}")
    assert answer(words) == 8 and "output=" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        "result.json",
        ".lock",
    }
    assert not machine.ran
    (tmp_path / "out/result.json").unlink()
    lock = lock_folder(Path("out"), "run")
    assert answer(words) == 8 and "in use" in capsys.readouterr().err
    os.close(lock)


def living(folder):
    """Processes with the folder in their command line."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                alive.append(path.parent.name)
    return alive


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopped_as_it_runs_it_leaves_nothing_behind_and_goes_on(number, code, tmp_path):
    folder = tmp_path / "out"
    pipe = subprocess.PIPE
    words = [
        "sweep",
        "recipe=digits",
        "seed=[1,2]",
        "devices=[cpu,cpu]",
        "model.name=mlp",
        "epochs=400",
        *BARE,
    ]
    typed = [sys.executable, "-m", "trainer", *words, "save.every_epochs=1", f"output={folder}"]
    started = warm.Popen(
        typed, env=environment(), cwd=tmp_path, stdout=pipe, stderr=pipe, text=True
    )
    until = time.monotonic() + 120
    while not list(folder.glob("001*/checkpoints/*/*")):
        assert started.poll() is None and time.monotonic() < until, started.communicate()
        time.sleep(0.05)
    started.send_signal(number)
    out, err = started.communicate(timeout=90)
    assert started.returncode == code, out + err
    assert code < 0 or (err.count("\n") == 1 and "kept" in err), err
    time.sleep(0.5)
    assert living(folder) == []
    assert code < 0 or result(next(folder.glob("001*/")))["status"] == "preempted"
    refused = trainer(*words, "batch_size=64", f"output={folder}", cwd=tmp_path)
    assert refused.returncode == 8 and "other batch_size" in refused.stderr


# --- the engine alone
# -------------------------------------------------------------------------------------------------


def trial(name, *words, **options):
    return TrialRun(f"runs/{name}/1", ["mode=single", *words], **options)


def test_trials_run_at_all_places_in_their_order_and_the_next_depends_on_the_last(
    machine, tmp_path
):
    heard = []

    def trials():
        yield trial("a")
        yield trial("b")
        assert heard, "a place was free only after one had ended"
        yield trial("c", environment={"X": "1"})

    both = TrialEngine(tmp_path, [["devices=[one]"], ["devices=[two]"]])
    both.run(trials(), lambda one, outcome: heard.append(one.name))
    assert heard == ["runs/a/1", "runs/b/1", "runs/c/1"] and machine.most == 2
    assert [words["devices"] for words in machine.words] == ["[one]", "[two]", "[one]"]
    assert machine.environments[2]["X"] == "1"
    assert all("resume" not in words for words in machine.words)


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda path: None, False),
        (lambda path: (path / "words.json").write_text('["mode=ddp"]'), True),
        (lambda path: (path / "words.json").write_text("{"), True),
        (lambda path: (path / "result.json").write_text('{"status": "completed"'), True),
        (lambda path: (path / "result.json").write_text('{"status": "running"}'), True),
        (lambda path: (path / "steps.csv").write_text("step\nodd,1\n"), True),
    ],
)
def test_only_a_whole_run_of_the_same_words_is_not_done_again(damage, again, machine, tmp_path):
    one = trial("a", read=lambda path, result: result["steps"])
    assert TrialEngine(tmp_path).value(one) == 8
    damage(tmp_path / "runs/a/1")
    assert TrialEngine(tmp_path).value(one) == 8 and len(machine.ran) == 1 + again


def test_unreadable_values_are_measured_again_and_useless_ones_are_not(machine, tmp_path):
    def useless(path, result):
        raise TrialFailed("no epoch", 2)

    with pytest.raises(TrialFailed, match="no epoch"):
        TrialEngine(tmp_path).value(trial("a", read=useless))
    with pytest.raises(TrialFailed):
        TrialEngine(tmp_path).value(trial("a", read=lambda path, result: result["nothing"]))
    assert len(machine.ran) == 2


def test_a_run_that_hangs_is_killed(tmp_path):
    words = ["recipe=digits", "mode=single", "max_steps=2", "epochs=1", "logging.warmup_steps=0"]
    one = TrialRun("a", words, environment={**environment(), "TRAINER_FAULT": "hang@0:1"})
    with pytest.raises(TrialFailed, match=r"\b2 s\b") as error:
        TrialEngine(tmp_path, timeout=2.0).value(one)
    assert error.value.code == 7 and living(tmp_path / "a") == []


def test_the_last_line_of_a_run_that_failed(tmp_path):
    log = tmp_path / "log"
    for text, code, line in (
        ("epoch 1\ntrainer: error: no data\n", 3, "no data"),
        ("Traceback\n  file\nValueError: odd\n\n", 1, "ValueError: odd"),
        ("half a line", -signal.SIGKILL, "killed by SIGKILL"),
        ("", 1, "ended with exit code 1 and no output"),
    ):
        log.write_text(f"python -m trainer\n{text}")
        assert find_failure(log, code) == line


def test_an_older_folder_with_a_word_more_or_less_is_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def held(output=None, **asked):
        with claim_folder(output, Path("runs/x"), "sweep", "sweep.json", asked, "again") as path:
            return str(path)

    assert [
        held(a=1),
        held(a=2),
        held(a=1),
        held(a=1, b=None),
    ] == [
        "runs/x",
        "runs/x-2",
        "runs/x",
        "runs/x",
    ]
    (tmp_path / "old").mkdir()
    (tmp_path / "old/sweep.json").write_text('{"asked": {"a": 1, "sweep": "seed:[1,2]"}}')
    with pytest.raises(FolderInUseError, match="other sweep"):
        held("old", a=1)
    with pytest.raises(FolderInUseError, match=r"^runs/x .*\bother b: .*\bagain; .*\boutput="):
        held("runs/x", a=1, b=2)
    with (
        pytest.raises(Interrupted, match=r"Ctrl-C; .*\bsame command\b"),
        claim_folder("y", Path("z"), "sweep", "f.json", {}),
    ):
        raise KeyboardInterrupt
