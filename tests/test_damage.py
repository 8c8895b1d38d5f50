"""Storms: every file of a run folder damaged at random, and disks of every size that fill.

A failure names its seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.command_line import QUIET, digest, environment, ok, result, steps, trainer
from trainer.saving import checkpoint
from trainer.saving.journal import JOURNAL, read_journal

RUN = [
    "recipe=digits",
    "mode=single",
    "threads=1",
    "model.name=mlp",
    "epochs=2",
    "save.every_epochs=1",
]
RUN += ["save.every_steps=5", "logging.every_steps=1", "logging.progress=false"]
STEPS = 28  # Steps of that run. Killed in step 18, it has the checkpoints 14 and 15.


def flip(dice, path):
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(dice.choice([1, 1, 20])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def instead(make):
    def act(dice, path):
        path.unlink()
        make(path)

    return act


DAMAGES = {
    "flip": flip,
    "cut": lambda dice, path: os.truncate(path, dice.randrange(path.stat().st_size + 1)),
    "longer": lambda dice, path: path.write_bytes(
        path.read_bytes() + dice.randbytes(dice.randrange(1, 5000))
    ),
    "random": lambda dice, path: path.write_bytes(dice.randbytes(dice.randrange(5000))),
    "nested": lambda dice, path: path.write_text(dice.choice(["[", '{"a":', "- "]) * 50_000),
    "other JSON": lambda dice, path: path.write_text(
        dice.choice(["5", "[]", "null", "{}", '"x"', '{"status":[]}'])
    ),
    "giant field": lambda dice, path: path.write_text("1,0,1," + "9" * 500_000 + "\n"),
    "gone": lambda dice, path: path.unlink(),
    "folder": instead(Path.mkdir),
    "dangling": instead(lambda path: path.symlink_to("nowhere")),
    "loop": instead(lambda path: path.symlink_to(path.name)),
    "endless": instead(lambda path: path.symlink_to("/dev/zero")),
    "pipe": instead(os.mkfifo),
}


def tidy(done, codes):
    """Assert that the exit code is one of these, with a one-line error unless it is 0."""
    messages = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode in codes, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    assert len(messages) == (done.returncode != 0), messages
    return done


def killed_run(folder):
    """Return a run that was killed in its second epoch, and the final weights of the undisturbed
    run.
    """
    completed = trainer(*RUN, f"output={folder / 'run'}", env={"TRAINER_FAULT": "kill@0:18"})
    assert completed.returncode == -signal.SIGKILL, completed.stderr
    shutil.copytree(folder / "run", folder / "whole")
    ok(*RUN, f"output={folder / 'whole'}", "resume=auto")
    return folder / "run", digest(folder / "whole" / "last.safetensors")


def storm(folder, rounds, seed):
    """Damage one to three files of a killed run, then evaluate, predict and resume it."""
    run, expected = killed_run(folder)
    dice = random.Random(seed)
    tally = {}
    for number in range(rounds):
        work = folder / f"damaged-{number}"
        shutil.copytree(run, work)
        files = sorted(path for path in work.rglob("*") if path.is_file())
        damaged = {
            path: dice.choice(list(DAMAGES))
            for path in dice.sample(files, dice.choice([1, 1, 2, 3]))
        }
        for path, kind in damaged.items():
            DAMAGES[kind](dice, path)
        names = {str(path.relative_to(work)): kind for path, kind in damaged.items()}
        try:
            codes = one_damage(work, names, expected)
        except BaseException as error:
            error.add_note(f"seed {seed}, round {number}: {names}")
            raise
        tally[str(codes)] = tally.get(str(codes), 0) + 1
        shutil.rmtree(work)
    return tally


def one_damage(work, names, expected):
    """Assert the exit codes of evaluate, predict and resume=auto."""
    first = tidy(
        trainer(
            "evaluate",
            f"checkpoint={work}",
            timeout=600,
        ),
        {0, 2, 4},
    ).returncode
    words = [
        "predict",
        f"checkpoint={work}",
        "predict.split=val",
        f"output={work}-labels",
        "logging.progress=false",
    ]
    second = tidy(trainer(*words, timeout=600), {0, 2, 4}).returncode
    shutil.rmtree(f"{work}-labels", ignore_errors=True)
    if not any("last.safetensors" in name for name in names):
        assert (first, second) == (0, 0)
    completed = tidy(
        trainer(
            *RUN,
            f"output={work}",
            "resume=auto",
            timeout=600,
        ),
        {0, 2, 3, 4},
    )
    if completed.returncode == 2:
        assert "recipe.yaml" in names
    if completed.returncode == 3:
        assert ".lock" in names
    if completed.returncode == 4:
        assert len({name.split("/")[1] for name in names if name.startswith("checkpoints")}) == 2
    if completed.returncode == 0:
        assert digest(work / "last.safetensors") == expected, "a damage changed what is learnt"
        if "steps.csv" not in names and "resuming at" in completed.stdout:
            assert [int(row["step"]) for row in steps(work)] == [*range(1, STEPS + 1)]
    return first, second, completed.returncode


def test_damage_anywhere_is_a_sentence_and_never_a_traceback(tmp_path, full):
    seed = random.randrange(10**6) if full else 6
    rounds = 100 if full else 1
    tally = storm(tmp_path, rounds, seed)
    print("seed", seed, tally)
    assert sum(tally.values()) == rounds


# Disks that fill


@contextmanager
def disk(path, size):
    """Mount a disk of `size` KiB, which only root may do."""
    path.mkdir(parents=True, exist_ok=True)
    run_output = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", path],
        capture_output=True,
        text=True,
    )
    if run_output.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {run_output.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


MANY = [word for word in RUN if not word.startswith("mode=")]
KINDS = {  # words, and the KiB that they write about
    "single": ([*RUN], 2400),
    "ddp": ([*MANY, "mode=ddp", "nproc=2"], 2400),
    "pipeline": ([*MANY, "mode=pipeline", "nproc=2", "pipeline.microbatches=2"], 2400),
    "predict": (
        ["predict", "predict.split=val", "predict.batch_size=8", "logging.progress=false"],
        80,
    ),
    "compare": (
        ["compare", *MANY[:1], "modes=[single]", "steps=5", "repeats=1", "model.name=mlp"],
        2000,
    ),
}


def fill(folder, kind, size, trained):
    """Run on a disk of `size` KiB, then again on a larger one to the end.

    Return the first exit code.
    """
    words, _ = KINDS[kind]
    words = [*words, *([f"checkpoint={trained}"] if kind == "predict" else [])]
    with disk(folder, size):
        run = folder / "run"
        words.append(f"output={run}")
        completed = trainer(*words, timeout=600)
        if kind == "compare" and completed.returncode:
            assert "Traceback" not in completed.stdout + completed.stderr, completed.stderr[-3000:]
            assert "full" in completed.stdout + completed.stderr
        else:
            tidy(completed, {0, 28})
            assert not completed.returncode or "disk is full" in completed.stderr
        for path in checkpoint.checkpoints_in(run / "checkpoints"):
            checkpoint.load(path)
        assert not list(run.glob("checkpoints/*.tmp-*"))
        subprocess.run(["mount", "-o", "remount,size=256m", folder], check=True)
        # The disk was large enough, so the folder contains predictions.
        refused = kind == "predict" and not completed.returncode
        again = tidy(
            trainer(*words, *([] if kind == "predict" else ["resume=auto"]), timeout=600),
            {8 * refused},
        )
        if kind == "predict":
            rows = (run / "predictions.csv").read_text().splitlines()
            assert len(rows) == 361, again.stdout
        elif kind == "compare":
            assert json.loads((run / "compare.json").read_text())["entries"][0]["error"] is None
        else:
            assert [int(row["step"]) for row in steps(run)] == [*range(1, STEPS + 1)]
        return completed.returncode


def disks(folder, rounds, seed):
    """Disks of random sizes under every kind of command."""
    trained = folder / "trained"
    ok(*RUN, f"output={trained}")
    dice = random.Random(seed)
    tally = {}
    for number in range(rounds):
        for kind in KINDS:
            size = 4 * dice.randrange(1, KINDS[kind][1] // 4)
            try:
                code = fill(folder / f"disk-{number}-{kind}", kind, size, trained)
            except BaseException as error:
                error.add_note(f"seed {seed}, round {number}: {kind} on {size} KiB")
                raise
            tally[f"{kind} {code}"] = tally.get(f"{kind} {code}", 0) + 1
    return tally


def test_a_disk_too_small_for_the_first_lines(tmp_path):
    with disk(tmp_path / "disk", 16) as small:
        completed = tidy(trainer(*RUN, f"output={small / 'run'}"), {28})
        assert re.fullmatch(r"trainer: error: .*disk is full.*\n", completed.stderr)


@pytest.mark.full("minutes: every kind of command on disks of many sizes")
def test_disks_that_fill(tmp_path):
    seed = random.randrange(10**6)
    tally = disks(tmp_path, 12, seed)
    print("seed", seed, tally)
    assert sum(tally.values()) == 12 * len(KINDS)


# Odd beginnings


@pytest.mark.slow
def test_a_run_killed_after_its_last_checkpoint_has_the_last_weights_and_all_rows(
    tmp_path,
):
    """A resumed run of this kind has no steps left, and writes no weights and no rows."""
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=cnn_gn",
        "epochs=3",
        "save.every_epochs=1",
        *QUIET,
    ]
    words += ["save.keep=2", f"output={tmp_path / 'run'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@save:prune"}).returncode == -signal.SIGKILL
    ok(*words, "resume=auto")
    ended = result(tmp_path / "run")
    attempts, _ = read_journal(tmp_path / "run" / JOURNAL)
    assert attempts[-1].resumed == ended["steps"]
    assert [int(row["step"]) for row in steps(tmp_path / "run")] == [*range(1, ended["steps"] + 1)]
    saved = max((tmp_path / "run" / "checkpoints").iterdir())
    last = load_file(tmp_path / "run" / "last.safetensors")
    weights = load_file(saved / "model.safetensors")
    assert ended["status"] == "completed"
    assert last.keys() == weights.keys()
    assert all(torch.equal(last[name], weights[name]) for name in last)


CLOSED = """
import os, runpy, sys
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""


def test_a_run_without_stdout_and_stderr_trains(tmp_path):
    words = [*RUN, "max_steps=3", f"output={tmp_path / 'run'}"]
    completed = warm.run(
        [sys.executable, "-c", CLOSED, *words],
        env=environment(),
        timeout=180,
    )
    assert completed.returncode == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    assert (tmp_path / "run" / ".lock").read_text().count("\n") == 0, "nothing was printed into it"
