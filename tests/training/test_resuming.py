"""The checkpoint that a job resumes, on machines with local disks; whole runs are in
test_training.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, digest, ok, steps, trainer
from tests.saving.states import commit, make, refuse
from tests.strategies import on_ranks
from tests.training.whole_runs import kill
from trainer import load_recipe
from trainer.errors import PeerError, SetupError
from trainer.optim.optimization import build_learning_rate
from trainer.processes.interrupts import Interrupts
from trainer.saving import checkpoint
from trainer.telemetry.tracking import NullTracker
from trainer.training.resuming import find_newest
from trainer.training.snapshots import Snapshots


def on_two(folder, *words, restarts=0):
    """Return the messages of both ranks if only the second has a checkpoint; `restarts` is the
    number of restarts.
    """
    commit(folder, make(7), keep=2)
    recipe = load_recipe("digits", f"output={folder}", *words)
    elsewhere = recipe.replace(output=str(folder / "first"))

    def work(world):
        if world.rank:
            world.place = dataclasses.replace(world.place, restarts=restarts)
        try:
            return find_newest(NullTracker(), world, recipe if world.rank else elsewhere)
        except SetupError as error:
            return str(error)

    return on_ranks(2, work)


@pytest.mark.parametrize(("words", "restarts"), [(["resume=auto"], 0), ([], 1)])
def test_a_first_rank_without_what_another_saved_starts_nothing_over(words, restarts, tmp_path):
    for message in on_two(tmp_path, *words, restarts=restarts):
        assert re.search(rf"rank 1 .*{tmp_path}\S* .*rank 0 .*--node_rank=0\b", message)


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_starts_over(tmp_path):
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "epochs=2",
        "save.every_epochs=5",
        *QUIET,
    ]
    words += [f"output={tmp_path / 'run'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:20"}).returncode
    assert (tmp_path / "run" / "best.safetensors").exists()
    completed = ok(*words, "resume=auto")
    assert re.search(rf"{tmp_path / 'run'}: .*\bcheckpoint\b", completed.stdout)


def test_a_new_job_does_not_ask_for_the_checkpoints_of_another(tmp_path):
    assert on_two(tmp_path) == [None, None]


def test_a_peer_that_is_lost_as_weights_are_made_one_shows_before_a_wait_for_the_device():
    """And the watcher, which waits while a run saves, waits no longer."""
    called = []

    def lost():
        called.append("heartbeat")
        raise PeerError("lost another rank")

    interrupts = Interrupts(False, 60.0)
    world = SimpleNamespace(
        heartbeat=lost,
        raise_any=lambda error: None,
        is_main=True,
        rank=0,
        is_any=lambda flag: flag,
    )
    resolved = SimpleNamespace(
        speed_only=False, world=world, recipe=SimpleNamespace(timeout=1.0), tracker=None
    )
    state = SimpleNamespace(
        strategy=SimpleNamespace(sync_weights=lambda averages: called.append("sync_weights")),
        averages=dict,
        weights=lambda: called.append("weights"),
    )
    snapshots = Snapshots(resolved, state, interrupts, timer=None, replicas=None)
    with pytest.raises(PeerError):
        snapshots.save()
    assert called == ["sync_weights", "heartbeat"] and not interrupts._suspended


@pytest.mark.slow
def test_a_complete_checkpoint_without_a_run_is_reported(tmp_path):
    """Other programs and older versions write such files."""
    words = [
        "recipe=digits",
        "mode=single",
        "epochs=1",
        "model.name=mlp",
        *QUIET,
        f"output={tmp_path / 'run'}",
    ]
    ok(*words)
    state = checkpoint.load_newest(tmp_path / "run", refuse).state
    for more, lacking in enumerate(("model", "history", "topology"), 1):
        shards = {part: named for part, named in state.shards.items() if part != lacking}
        facts = {name: fact for name, fact in state.facts.items() if name != lacking}
        later = state.position._replace(step=state.position.step + more)
        commit(tmp_path / "run", checkpoint.State(later, shards, facts), keep=9)
        completed = trainer(*words, "resume=auto")
        assert completed.returncode == 4 and "Traceback" not in completed.stderr, lacking
        assert "model.init_from=" in completed.stderr and "output=" in completed.stderr, lacking


@pytest.mark.slow(cases=["optimizer-one more0"])
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("optimizer", "one more"),
        ("rank-00000", "one less"),
        *(
            pytest.param(part, change, marks=pytest.mark.slow)
            for part in ("model", "optimizer", "ema", "rank-00000")
            for change in ("one more", "one less")
        ),
    ],
)
def test_tensors_that_only_the_run_or_only_its_checkpoint_has_are_named(change, part, named_run):
    words, state = named_run
    shards = {name: dict(named) for name, named in state.shards.items()}
    name = next(
        name for name in shards[part] if part != "rank-00000" or name.startswith("optimizer:")
    )
    if change == "one more":
        shards[part][f"{name}_more"] = shards[part][name]
    else:
        del shards[part][name]
    position = state.position
    later = position._replace(step=max(map(int, newest_steps(words))) + 1)
    commit(folder_of(words), checkpoint.State(later, shards, state.facts), keep=99)
    completed = trainer(*words, "resume=auto")
    assert completed.returncode == 4 and "Traceback" not in completed.stderr
    assert name in completed.stderr


@pytest.fixture(scope="module")
def named_run(tmp_path_factory):
    """Return the arguments of a run with all parts, and its checkpoint."""
    run = tmp_path_factory.mktemp("named") / "run"
    words = [
        "recipe=digits",
        "mode=local_sgd",
        "nproc=1",
        "epochs=2",
        "max_steps=3",
        "model.name=mlp",
        "ema=0.9",
    ]
    words += [*QUIET, f"output={run}"]
    ok(*words)
    return words, checkpoint.load_newest(run, refuse).state


def folder_of(words):
    return Path(words[-1].removeprefix("output="))


def newest_steps(words):
    return [
        path.name.removeprefix("step-") for path in (folder_of(words) / "checkpoints").iterdir()
    ]


# An optimizer without a row in the table.
RMSPROP = """
import torch
from trainer.optim import optimization
from trainer.training import setup

def build(parameters, recipe, *_):
    group = {"params": [*parameters.values()], "weight_decay": recipe.weight_decay, "rate": 1.0}
    return torch.optim.RMSprop([group], lr=1e-3)

setup.build_optimizer = optimization.build_optimizer = build
"""


def test_an_optimizer_whose_state_is_made_by_its_first_step_resumes_in_no_silence(tmp_path):
    (tmp_path / "rmsprop.py").write_text(RMSPROP)
    words = [
        "recipe=digits",
        "plugin=rmsprop",
        "mode=single",
        "model.name=mlp",
        "epochs=1",
        "save.every_steps=2",
        *QUIET,
    ]
    words += ["optimizer.momentum=0", "optimizer.nesterov=false", f"output={tmp_path / 'run'}"]
    kill(5, *words, cwd=tmp_path)
    completed = trainer(*words, "resume=auto", cwd=tmp_path)
    assert completed.returncode == 4 and "square_avg" in completed.stderr


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


@pytest.mark.slow
def test_a_run_that_goes_on_with_more_images_keeps_its_learning_rate_however_often_it_is_continued(
    tmp_path,
):
    """The first epoch has 10 steps, and at its end there are images for 20: the schedule continues
    at its second epoch.
    """
    (tmp_path / "growing.py").write_text(GROWING)
    words = [
        "plugin=growing",
        "data.name=growing",
        "mode=single",
        "model.name=mlp",
        "batch_size=64",
        "epochs=4",
    ]
    words += ["max_steps=30", "optimizer.lr=0.05", "save.every_steps=5", "resume=auto", *QUIET]
    run = tmp_path / "run"
    once = tmp_path / "once"
    (tmp_path / "count.txt").write_text("640")
    trainer(*words, f"output={run}", cwd=tmp_path, env={"TRAINER_FAULT": "kill@0:12"})
    (tmp_path / "count.txt").write_text("1280")
    shutil.copytree(run, once)
    completed = ok(*words, f"output={once}", cwd=tmp_path)
    assert re.search(r"resuming\D+10\D+30\b", completed.stdout)
    # The event of step 18.
    trainer(*words, f"output={run}", cwd=tmp_path, env={"TRAINER_FAULT": "kill@0:28"})
    completed = ok(*words, f"output={run}", cwd=tmp_path)
    assert re.search(r"resuming\D+15\D+30\b", completed.stdout)
    assert [row["step"] for row in steps(run)] == [str(number + 1) for number in range(30)]
    rates = [float(row["lr"]) for row in steps(run)]
    # The schedule has 40 steps, and 10 of them were left out.
    rate = build_learning_rate(load_recipe(None, *words[5:8]), 20, 40)
    assert rates[10:] == pytest.approx([rate(number + 10) for number in range(10, 30)], rel=1e-6)
    assert rates[-1] < 1e-3
    for name in ("train_loss", "lr", "epoch"):
        assert [row[name] for row in steps(run)] == [row[name] for row in steps(once)]
    assert digest(run / "last.safetensors") == digest(once / "last.safetensors")


@pytest.mark.slow
def test_a_plugin_that_was_edited_is_named_when_its_run_is_resumed(tmp_path):
    plugin = tmp_path / "edited_net.py"
    lines = [
        "from torch import nn",
        "from trainer import register_model",
        '@register_model("edited")',
    ]
    lines += ["def build(num_classes, channels, image_size):"]
    plugin.write_text(
        "\n".join(
            [*lines, "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))", ""]
        )
    )
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=edited",
        "plugin=edited_net",
        "schedule.name=constant",
        *QUIET,
    ]
    words += [f"output={tmp_path / 'run'}", "resume=auto"]
    ok(*words, "epochs=1", cwd=tmp_path)
    same = ok(*words, "epochs=2", cwd=tmp_path)
    plugin.write_text(plugin.read_text().replace("num_classes))", "num_classes), nn.Tanh())"))
    changed = ok(*words, "epochs=3", cwd=tmp_path)
    assert "edited_net.py" not in same.stdout and "edited_net.py" in changed.stdout
