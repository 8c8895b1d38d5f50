"""Runs that are continued for more epochs or steps: held, bit by bit, against runs that had them at
once.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import sys
import time
from functools import cache

import pytest
import torch

import trainer as api
from tests.command_line import (
    BARE,
    QUIET,
    digest,
    environment,
    losses,
    ok,
    result,
    rows,
    steps,
    trainer,
)
from tests.modes.ways import WORKERS
from tests.saving.states import refuse
from tests.warm import Popen
from trainer.errors import RecipeError
from trainer.recipe import load, notes_on_idle
from trainer.saving import checkpoint

# 5 steps an epoch
BASE = ["recipe=digits", "model.name=cnn_gn", "batch_size=256", "threads=1", *QUIET]
RISING = [*BASE, "schedule.warmup_epochs=0.4", "optimizer.lr=0.02"]
WORDS = [*RISING, "ema=0.9", "augment.mixup=0.2"]
CONSTANT = ["schedule.name=constant"]
STEP = ["schedule.name=step", "schedule.step_epochs=1", "schedule.gamma=0.5"]
COSINE = ["schedule.name=cosine", "schedule.min_lr=0.001"]
ALLOWED = "schedule.restart=true"


def held(folder):
    """Return the contents of a run's newest checkpoint, without times and names of processes."""
    state = checkpoint.load_newest(folder, refuse).state
    facts = {name: fact for name, fact in state.facts.items() if name != "run_id"}
    facts["history"] = {
        name: value for name, value in facts["history"].items() if name != "seconds"
    }
    return state.position, {part: state.tensors(part) for part in state.shards}, facts


def same_rows(run, whole):
    """Compare the logged rows and the last weights."""
    for name in ("step", "epoch", "train_loss", "lr"):
        assert [row[name] for row in steps(run)] == [row[name] for row in steps(whole)], name
    clocks = {"seconds", "samples_per_sec"}
    evaluations = []
    for folder in (run, whole):
        table = rows(folder / "epochs.csv")
        evaluations.append([{key: row[key] for key in row.keys() - clocks} for row in table])
    assert evaluations[0] == evaluations[1]
    assert digest(run / "last.safetensors") == digest(whole / "last.safetensors")


def same(run, whole):
    """Compare weights, optimizer, moving average, random streams, history, best, logged rows and
    the length in the files.
    """
    (here, ours, own), (there, reference, facts) = held(run), held(whole)
    assert here == there
    assert own == facts
    assert ours.keys() == reference.keys() >= {"model", "optimizer", "ema"}
    for part, tensors in reference.items():
        assert ours[part].keys() == tensors.keys()
        assert all(torch.equal(ours[part][name], tensor) for name, tensor in tensors.items()), part
    same_rows(run, whole)
    assert digest(run / "best.safetensors") == digest(whole / "best.safetensors")
    one, two = (load(str(path)) for path in (run, whole))
    assert (one.epochs, one.max_steps, one.schedule) == (two.epochs, two.max_steps, two.schedule)
    one = result(run)
    two = result(whole)
    for key in (
        "epochs",
        "steps",
        "status",
        "ended_by",
        "best_epoch",
        "best_top1",
        "val_top1",
        "losses",
        "validation",
    ):
        assert one[key] == two[key], key


def fault(words, step):
    completed = trainer(*words, env={"TRAINER_FAULT": f"kill@0:{step}"})
    assert completed.returncode and "Traceback" not in completed.stderr, completed.stderr


SINGLE = ["mode=single"]
DDP = ["mode=ddp", "nproc=2"]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """The folder of a run that had four epochs from the beginning."""

    @cache
    def folder(*words):
        path = tmp_path_factory.mktemp("whole") / "run"
        ok(*words, "epochs=4", "max_steps=null", f"output={path}")
        return path

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mode", "short", "killed"),
    [
        (STEP, SINGLE, ["epochs=2"], None),
        pytest.param(
            STEP,
            SINGLE,
            ["epochs=4", "max_steps=8"],
            None,
            marks=pytest.mark.full("it ends an epoch early"),
        ),
        pytest.param(
            CONSTANT, DDP, ["epochs=2"], None, marks=pytest.mark.full("the next one, not killed")
        ),
        (CONSTANT, DDP, ["epochs=3"], 8),  # The end is within an epoch.
    ],
)
def test_a_lengthened_run_with_an_endless_schedule_equals_a_longer_run(
    schedule, mode, short, killed, at_once, tmp_path
):
    run = tmp_path / "run"
    words = [*WORDS, *schedule, *mode, "save.every_steps=3"]
    whole = at_once(*words)
    if killed:
        fault([*words, *short, f"output={run}"], killed)
        assert held(run)[0].step < killed
    else:
        ok(*words, *short, f"output={run}")
    completed = ok(
        f"recipe={run}", *mode, "epochs=4", "max_steps=null", f"output={run}", "resume=auto"
    )
    assert "new cosine" not in " ".join(completed.stdout.split())
    if "max_steps=8" in short:  # The end of that run was evaluated, and may be the best.
        same_rows(run, whole)
        assert result(run)["losses"] == pytest.approx(result(whole)["losses"], rel=1e-12)
        assert held(run)[0] == held(whole)[0]
        assert held(run)[2]["history"]["latest"] == held(whole)[2]["history"]["latest"]
        before = digest(run / "last.safetensors")
        ok(f"recipe={run}", *mode, f"output={run}", "resume=auto")  # The run is complete.
        assert digest(run / "last.safetensors") == before and result(run)["epochs"] == 4
    else:
        same(run, whole)


@pytest.mark.full("killed and lengthened many times")
def test_a_restarted_cosine_is_the_same_however_often_the_run_is_killed_and_lengthened(
    tmp_path,
):
    """The result is compared with one run whose recipe has the new cosines from the beginning."""
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    words = [*WORDS, *COSINE, *DDP]
    ok(*words, "epochs=6", "schedule.restart=[2,3]", f"output={whole}")
    rates = [float(row["lr"]) for row in steps(whole)]
    assert rates[10] == rates[15] == 0.02 == max(rates)
    assert rates[9] < 0.003
    assert rates[14] < 0.004
    ok(*words, "epochs=2", f"output={run}")
    longer = [f"recipe={run}", *DDP, f"output={run}", "resume=auto"]
    fault([*longer, "epochs=3", ALLOWED], 12)  # before anything of the new cosine is saved
    assert held(run)[0].step == 10 and result(run)["status"] == "running"
    completed = ok(*longer)  # the plain words: its recipe has changed
    text = " ".join(completed.stdout.split())
    assert re.search(r"resuming\D+10\D+15\b", text)
    assert re.search(r"cosine .*\blr 0\.02 .*\bepoch 2\b", text)
    fault([*longer, "epochs=6", ALLOWED], 23)
    ok(*longer, "epochs=6", ALLOWED)  # A script types the command again.
    same(run, whole)


KILLER = """
import os, signal
from trainer.saving import files
put, when = files.replace_file, os.environ["FAULTY_PUT"]
def dying(draft, path):
    if path.name == "recipe.yaml" and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    put(draft, path)
    if path.name == "recipe.yaml":
        os.kill(os.getpid(), signal.SIGKILL)
files.replace_file = dying
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_while_its_recipe_is_rewritten_continues(when, tmp_path):
    """The folder has the old recipe or the new one, neither marks it as completed, and no draft
    remains.
    """
    (tmp_path / "killer.py").write_text(KILLER)
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    words = [*WORDS, *COSINE, *SINGLE]
    ok(*words, "epochs=4", "schedule.restart=[2]", f"output={whole}")
    ok(*words, "epochs=2", f"output={run}")
    longer = [f"recipe={run}", f"output={run}", "resume=auto", "epochs=4", ALLOWED]
    killed = trainer(*longer, "plugin=killer", cwd=tmp_path, env={"FAULTY_PUT": when})
    assert killed.returncode == -9
    assert load(str(run)).epochs == (2 if when == "before" else 4)
    assert result(run)["status"] == "running"
    ok(*longer)
    same(run, whole)
    assert {path.name for path in run.glob(".*")} == {".lock"}


@pytest.mark.slow
def test_a_killed_run_ends_its_cosine_before_a_new_one_begins(tmp_path):
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    words = [*WORDS, *COSINE, *SINGLE]
    ok(*words, "epochs=4", "schedule.restart=[1.6]", "save.every_steps=3", f"output={whole}")
    fault([*words, "epochs=4", "max_steps=8", "save.every_steps=3", f"output={run}"], 7)
    ok(
        *words,
        "epochs=4",
        "max_steps=null",
        "save.every_steps=3",
        ALLOWED,
        f"output={run}",
        "resume=auto",
    )
    same_rows(run, whole)


@pytest.mark.slow
def test_a_run_that_was_still_warming_up_needs_no_new_cosine(tmp_path):
    words = [*BASE, *SINGLE, "schedule.warmup_epochs=2", "ema=0.9"]
    ok(*words, "epochs=4", f"output={tmp_path / 'whole'}")
    ok(*words, "epochs=2", f"output={tmp_path / 'run'}")
    ok(*words, "epochs=4", "resume=auto", f"output={tmp_path / 'run'}")
    same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("was", WORKERS)
def test_workers_train_longer_and_another_mode_goes_on_with_them(was, tmp_path):
    run = tmp_path / "run"
    words = [*RISING, *COSINE]
    ok(*words, *WORKERS[was], "epochs=2", f"output={run}")
    completed = ok(*words, *WORKERS[was], "epochs=3", ALLOWED, f"output={run}", "resume=auto")
    run_result = result(run)
    assert "after epoch 2" in " ".join(completed.stdout.split())
    assert (
        run_result["epochs"],
        run_result["status"],
    ) == (3, "completed")
    each = run_result["steps"] // 3
    rates = [float(row["lr"]) for row in steps(run)]
    assert rates[2 * each] == 0.02
    assert rates[2 * each - 1] < 0.01 > rates[-1]
    ok(*words, *SINGLE, "epochs=5", ALLOWED, f"output={run}", "resume=auto")
    assert float(steps(run)[3 * each]["lr"]) == 0.02
    assert (
        result(run)["epochs"],
        len(losses(run)),
    ) == (5, 3 * each + 10)
    assert load(str(run)).schedule.restarts == [2, 3]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return a completed run with a cosine schedule: 2 epochs, and the last one was no better."""
    run = tmp_path_factory.mktemp("done") / "run"
    ok(
        *BASE,
        *SINGLE,
        "epochs=9",
        "max_steps=15",
        "schedule.warmup_epochs=0",
        "optimizer.lr=1e-12",
        "stop.patience=1",
        "augment.crop=none",
        "optimizer.weight_decay=0",
        f"output={run}",
    )
    assert result(run)["ended_by"] == "stop.patience"
    return run


@pytest.mark.slow(cases=["words1-patterns1", "words5-patterns5", "words0-patterns0"])
@pytest.mark.parametrize(
    ("words", "patterns"),
    [
        (["epochs=12", "max_steps=null"], [r"schedule\.restart=true", r"lr 1e-12\b"]),
        (["epochs=12", "max_steps=null", "schedule.restart=false"], [r"schedule\.restart=true"]),
        # The limit still ends the run.
        (["epochs=12", ALLOWED], ["max_steps=15", "max_steps=null"]),
        (["epochs=8"], [r"\bepochs: 9 .*\b8\b", r"\brecipe=\S+/run\b"]),
        (["max_steps=14", "epochs=12"], [r"\bmax_steps: 15 .*\b14\b"]),
        (["max_steps=20", ALLOWED], [r"stop\.patience=1\b", r"stop\.patience=2\b"]),
        (["max_steps=20", "schedule.restart=[1]"], [r"schedule\.restart\b"]),
    ],
)
def test_runs_that_cannot_continue_are_refused_with_a_suggestion(words, patterns, done, tmp_path):
    run = shutil.copytree(done, tmp_path / "run")
    before = {
        path: digest(path)
        for path in run.rglob("*")
        if path.is_file() and path.suffix in (".yaml", ".json")
    }
    asked = trainer(f"recipe={run}", f"output={run}", "resume=auto", *words)
    assert asked.returncode == 2, asked.stderr
    assert all(re.search(pattern, asked.stderr) for pattern in patterns), asked.stderr
    assert {path: digest(path) for path in before} == before
    with pytest.raises(RecipeError, match=patterns[0]):
        api.train(str(run), *words, output=str(run), resume="auto")


def test_the_api_goes_on_and_patience_counts_on(done, tmp_path):
    run = shutil.copytree(done, tmp_path / "run")
    trained = api.train(
        str(run),
        output=str(run),
        resume="auto",
        max_steps=25,
        stop__patience=2,
        schedule__restart=True,
    )
    assert (trained["epochs"], trained["steps"], trained["ended_by"], trained["best_epoch"]) == (
        3,
        15,
        "stop.patience",
        1,
    )
    assert load(str(run)).schedule.restarts == [3]


@pytest.mark.slow(cases=["y\\n-mode0-0", "y\\n-mode1-0"])
@pytest.mark.parametrize(
    ("answer", "mode", "code"), [(b"y\n", [], 0), (b"y\n", DDP, 0), (b"n\n", [], 2), (b"", [], 130)]
)
def test_a_terminal_asks(answer, mode, code, done, tmp_path):
    """Once, before any rank starts; Ctrl-C is an answer too."""
    run = shutil.copytree(done, tmp_path / "run")
    words = [
        f"recipe={run}",
        *mode,
        "max_steps=20",
        "stop.patience=null",
        f"output={run}",
        "resume=auto",
        *BARE,
    ]
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "trainer", *words]
    child = Popen(
        command, env=environment(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    written = b""
    while b"y/N" not in written:
        written += os.read(master, 65536)
    assert b"a new cosine from lr 1e-12" in written
    if answer:
        os.write(master, answer)
    else:
        # Python loses a signal that arrives between the prompt of input() and its read; no person
        # is that fast.
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
    os.close(slave)
    try:
        assert child.wait(60) == code
    finally:
        child.kill()
        os.close(master)
    assert result(run)["steps"] == (20 if answer == b"y\n" else 10)


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "[]",
        "[0]",
        "[-1]",
        "[nan]",
        "[inf]",
        "[2,1]",
        "[1,1]",
        "[true]",
        "[a]",
        "yes please",
        "null",
        "{}",
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_no_list_of_epochs(value, typed, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(f"extends: digits\nschedule: {{restart: {value}}}\n")
    with pytest.raises(RecipeError, match=r"schedule\.restart.*must be.*\[10, 20\]"):
        load("digits", f"schedule.restart={value}") if typed else load(str(file))


def test_a_rate_that_needs_no_new_cosine_takes_no_word_for_it():
    [note] = notes_on_idle("digits", "schedule.name=step", ALLOWED)
    assert re.match(r"schedule\.restart=true .*schedule\.name=step\b", note)
