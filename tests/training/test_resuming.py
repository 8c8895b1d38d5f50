"""Which checkpoint a job continues, on machines with disks of their own; whole runs are in test_training."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, digest, ok, steps, trainer
from tests.saving.states import make, refuse
from tests.worlds import on_ranks
from trainer import load_recipe
from trainer.errors import PeerError, SetupError
from trainer.optim.optimization import learning_rate
from trainer.processes.interrupts import Interrupts
from trainer.saving import checkpoint
from trainer.saving.checkpoint import commit
from trainer.telemetry.tracking import NullTracker
from trainer.training.resuming import newest
from trainer.training.snapshots import save


def on_two(folder, *words, restarts=0):
    """What both ranks say where only the second has a checkpoint; it has been restarted so many times."""
    commit(folder, make(7), keep=2)
    recipe = load_recipe("digits", f"output={folder}", *words)
    elsewhere = recipe.replace(output=str(folder / "first"))

    def work(world):
        if world.rank:
            world.place = dataclasses.replace(world.place, restarts=restarts)
        try:
            return newest(NullTracker(), world, recipe if world.rank else elsewhere)
        except SetupError as error:
            return str(error)

    return on_ranks(2, work)


@pytest.mark.parametrize(("words", "restarts"), [(["resume=auto"], 0), ([], 1)])
def test_a_first_rank_without_what_another_saved_starts_nothing_over(words, restarts, tmp_path):
    for said in on_two(tmp_path, *words, restarts=restarts):
        assert "rank 1 finds checkpoints in" in said and "where rank 0 has none" in said


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_starts_over(tmp_path):
    words = ["recipe=digits", "mode=single", "model.name=mlp", "epochs=2", "save.every_epochs=5", *QUIET]
    words += [f"output={tmp_path / 'run'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:20"}).returncode
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert "no checkpoint yet; starting over" in ok(*words, "resume=auto").stdout


def test_a_new_job_does_not_ask_for_the_checkpoints_of_another(tmp_path):
    assert on_two(tmp_path) == [None, None]


def test_a_peer_that_is_lost_as_weights_are_made_one_shows_before_a_wait_for_the_device():
    """And the watcher, which waits while a run saves, waits no longer."""
    called = []

    def lost():
        called.append("heartbeat")
        raise PeerError("lost another rank")

    interrupts = Interrupts(own_process=False)
    run = SimpleNamespace(
        speed_only=False,
        interrupts=interrupts,
        resolved=None,
        saver=SimpleNamespace(wait=lambda: None, error=None),
        state=SimpleNamespace(
            strategy=SimpleNamespace(sync_weights=lambda averages: called.append("sync_weights")),
            averages=dict,
            weights=lambda: called.append("weights"),
        ),
        world=SimpleNamespace(heartbeat=lost, raise_any=lambda error: None, is_main=True, max_=lambda value: value),
    )
    with pytest.raises(PeerError):
        save(run)
    assert called == ["sync_weights", "heartbeat"] and not interrupts._suspended


def test_a_checkpoint_that_is_whole_and_no_runs_is_told(tmp_path):
    """As one of another program, or of a version that knew less."""
    words = ["recipe=digits", "mode=single", "epochs=1", "model.name=mlp", *QUIET, f"output={tmp_path / 'run'}"]
    ok(*words)
    state = checkpoint.newest(tmp_path / "run", refuse).state
    for more, lacking in enumerate(("model", "history", "topology"), 1):
        tensors = {part: dict(named) for part, named in state.tensors.items() if part != lacking}
        facts = {name: fact for name, fact in state.facts.items() if name != lacking}
        later = state.position._replace(step=state.position.step + more)
        commit(tmp_path / "run", checkpoint.State(later, tensors, facts), keep=9)
        done = trainer(*words, "resume=auto")
        assert done.returncode == 4 and "Traceback" not in done.stderr, lacking
        assert "model.init_from=" in done.stderr and "output=" in done.stderr, lacking


GROWING = """
from pathlib import Path
import torch
from trainer import register_dataset

@register_dataset("growing")
def growing(data):
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1400, 1, 8, 8), generator=drawn, dtype=torch.uint8)
    labels, count = torch.randint(10, (1400,), generator=drawn), int(Path("count.txt").read_text())
    return (images[:count], labels[:count]), (images[1300:], labels[1300:]), 10
"""


def test_a_run_that_goes_on_with_more_images_keeps_its_learning_rate_however_often_it_is_continued(tmp_path):
    """At the end of the first epoch, of 10 steps, there are images for 20: the schedule goes on at its second epoch."""
    (tmp_path / "growing.py").write_text(GROWING)
    words = ["plugin=growing", "data.name=growing", "mode=single", "model.name=mlp", "batch_size=64", "epochs=4"]
    words += ["max_steps=30", "optimizer.lr=0.05", "save.every_steps=5", "resume=auto", *QUIET]
    run, once = tmp_path / "run", tmp_path / "once"
    (tmp_path / "count.txt").write_text("640")
    trainer(*words, f"output={run}", cwd=tmp_path, env={"TRAINER_FAULT": "kill@0:12"})
    (tmp_path / "count.txt").write_text("1280")
    shutil.copytree(run, once)
    assert "resuming at step 10 of 30" in ok(*words, f"output={once}", cwd=tmp_path).stdout
    trainer(*words, f"output={run}", cwd=tmp_path, env={"TRAINER_FAULT": "kill@0:28"})  # its 18th step
    assert "resuming at step 15 of 30" in ok(*words, f"output={run}", cwd=tmp_path).stdout
    assert [row["step"] for row in steps(run)] == [str(number + 1) for number in range(30)]
    rates = [float(row["lr"]) for row in steps(run)]
    rate = learning_rate(load_recipe(None, *words[5:8]), 20, 40)  # as of 40 steps, of which 10 were left out
    assert rates[10:] == pytest.approx([rate(number + 10) for number in range(10, 30)], rel=1e-6) and rates[-1] < 1e-3
    for name in ("train_loss", "lr", "epoch"):
        assert [row[name] for row in steps(run)] == [row[name] for row in steps(once)]
    assert digest(run / "last.safetensors") == digest(once / "last.safetensors")
