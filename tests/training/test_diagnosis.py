"""Verdicts of real runs that were built to be slow in one way, and the probe that leaves
no trace.
"""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import losses, ok, result
from tests.telemetry.simulated_host import BOTH, DEVICE, HOST, LATE, Clock, Device, play
from trainer.distributed.world import World
from trainer.modes.measures import Communication
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.telemetry.clocks import Ledger, StepTimer
from trainer.training import diagnosis

SLOW = """
    import time

    import torch
    from trainer import register_dataset

    class Sleepy(torch.utils.data.Dataset):
        def __init__(self, length):
            self.length = length

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.full((1, 8, 8), index % 251, dtype=torch.uint8), index % 10

    @register_dataset("sleepy")
    def sleepy(data):
        return Sleepy(128), Sleepy(8), list("0123456789")
"""


@pytest.mark.slow
def test_a_dataset_that_sleeps(tmp_path):
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    words = [
        "recipe=digits_single",
        "plugin=slow",
        "data.name=sleepy",
        "data.workers=1",
        "batch_size=8",
        "threads=1",
    ]
    words += ["data.channels=1", "data.image_size=8", "epochs=2", "output=run", "seed=0"]
    words += ["logging.progress=false", "logging.tensorboard=false", "save.every_epochs=null"]
    completed = ok(*words, cwd=tmp_path)
    actual = result(tmp_path / "run")["verdict"]
    # The strategy is wrapped.
    assert f"verdict {' '.join(actual['sentence'].split())}" in " ".join(completed.stdout.split())
    assert sum(actual["step"].values()) == pytest.approx(1)
    assert sum(actual["run"].values()) == pytest.approx(1)
    # 1 %, and the last pass's surprise.
    assert actual["probe_seconds"] <= 0.02 * result(tmp_path / "run")["seconds"]
    assert actual["bound"] == "data" and actual["step"]["data"] > 0.5, actual
    assert actual["try"] == ["data.workers=2"]


@pytest.mark.slow
def test_the_probe_leaves_no_trace(tmp_path):
    """A run with the probe and one without are equal to the last byte, with BatchNorm and
    dropout.
    """
    words = [
        "recipe=digits",
        "nproc=2",
        "model.name=cnn",
        "epochs=10",
        "max_steps=60",
        "logging.every_steps=10",
    ]
    looked = tmp_path / "looked"
    plain = tmp_path / "plain"
    for folder in (looked, plain):
        ok(
            *words,
            "logging.progress=false",
            f"logging.verdict={str(folder == looked).lower()}",
            f"output={folder}",
        )
    assert result(looked)["verdict"]["probe_seconds"] > 0 and result(plain)["verdict"] is None
    assert losses(looked) == losses(plain)
    weights = [load_file(folder / "last.safetensors") for folder in (looked, plain)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# Cards and hosts by their timelines.

CARD = torch.device("cuda", 0)


class Pair(World):
    """A world of two whose other rank has these figures."""

    others: list

    def max_(self, values, along=None):
        return torch.maximum(values, torch.tensor(self.others.pop(0), dtype=values.dtype))

    def broadcast_object(self, value):
        return value

    def barrier(self):
        pass


class Simulated:
    """A run whose steps are ten kernels, two of them in the optimizer; `kernel` is that of the
    measured pass.
    """

    def __init__(self, monkeypatch, steps, window, *words, spent=1e4, others=()):
        self.clock = Clock(monkeypatch)
        self.card = Device(self.clock, monkeypatch)
        for name, stub in (
            ("device", nullcontext),
            ("_sleep", lambda cycles: self.card.work(cycles / 2e9)),
        ):
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(diagnosis, "synchronise", lambda devices: self.card.synchronise())
        monkeypatch.setattr(diagnosis, "restore_after", lambda modules, device: nullcontext())
        self.recipe, self.kernel = load(None, *words), steps[0]
        self.world = (Pair if others else World)(Place(), CARD, 1, ("cuda:0",))
        self.world.others = [*others]
        self.timer = StepTimer([CARD], warmup=0)
        self.truth = play(
            self.timer,
            self.clock,
            self.card,
            steps,
            window,
            self.recipe.accumulate,
        )
        self.truth /= sum(self.timer.steps)
        self.ledger = Ledger("steps")
        self.ledger.start_time -= spent
        self.strategy = self
        self.average = None
        self.position = None
        self.is_recompute_random = False
        self.context = SimpleNamespace(example=SimpleNamespace(batch=lambda *_, **__: None))
        self.updater = SimpleNamespace(
            step=lambda *_, **__: self.issue(2),
            zero_grad=lambda: None,
            optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        )
        self.state = self
        self.loader = SimpleNamespace(samples_per_step=8, readers=1, workers=None)
        self.datasets, self.noticed = SimpleNamespace(train=range(80)), SimpleNamespace(warnings={})

    def diagnose(self):
        return diagnosis.diagnose(self, self, self, self.loader, True)

    def issue(self, kernels):
        for _ in range(kernels):
            self.clock.now += self.kernel[0]
            self.card.work(self.kernel[1])

    def train_for_probe(self):
        pass

    def forward_backward(self, batch, weight):
        self.issue(8 // self.recipe.accumulate)

    def nothing(self, *_):
        return {}

    train = modules = reduce_gradients = result_fields = nothing

    def communication(self, *_):
        return Communication(0.0)


@pytest.mark.parametrize("words", [(), ("accumulate=2", "batch_size=128")])
@pytest.mark.parametrize("window", [1, 50])
@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        ([HOST] * 100, "launches"),
        ([DEVICE] * 100, "compute"),
        ([BOTH] * 100, "compute"),
        ([(0.0002, 0.001, 0.05)] * 100, "data"),
        ([LATE] * 100, "data"),
        (([HOST] * 5 + [DEVICE] * 5) * 10, "launches"),
    ],
    ids=["host", "device", "both", "data", "data and host", "mixed"],
)
def test_how_long_a_card_waits_for_launches(monkeypatch, steps, bound, window, words):
    run = Simulated(monkeypatch, steps, window, *words)
    actual = run.diagnose()
    assert actual.bound == bound, actual
    assert run.truth - 0.04 <= actual.step["launches"] <= run.truth + 0.01, (run.truth, actual.step)
    assert actual.unmeasured is None and ("Python" in actual.sentence) == (bound == "launches")
    assert sum(actual.step.values()) == pytest.approx(1)
    step = sum(run.timer.steps) / 100
    assert actual.step["optimizer"] == pytest.approx(0.002 / step, abs=0.02), (
        "its launches are no part of it"
    )
    assert (actual.probe_seconds > 0) == (run.timer.summary(8).launch_bound_fraction >= 0.05)


def test_a_short_run_says_what_launches_may_be(monkeypatch):
    run = Simulated(monkeypatch, [HOST] * 100, 50, spent=1)
    actual = run.diagnose()
    assert actual.step["launches"] == 0 and actual.probe_seconds == 0
    assert "up to 9" in actual.unmeasured and "computing" not in actual.sentence


def test_zeros_that_are_faster_than_images_are_no_launches(monkeypatch):
    """A card that has little to switch may run faster: no more is launches than the run's own steps
    allow.
    """
    run = Simulated(monkeypatch, [DEVICE] * 100, 1)
    run.kernel = (0.0002, 0.0001, 0.0)
    actual = run.diagnose()
    assert actual.probe_seconds > 0
    assert actual.step["launches"] == pytest.approx(run.timer.summary(8).launch_bound_fraction)


@pytest.mark.parametrize(
    ("other", "beyond", "bound"),
    [
        ([0.02, -0.002, 0.01], [0.0, 0.0], "data"),  # waits for its images
        ([0.0, -0.002, 0.028], [-0.02, -0.004], "launches"),  # launches slowly
        ([0.0, -0.002, 0.0], None, "compute"),  # works on
    ],
)
def test_a_rank_that_is_late_keeps_the_others_waiting(monkeypatch, other, beyond, bound):
    """The card of this one works, or waits for that rank in a kernel; its host is ahead."""
    run = Simulated(
        monkeypatch,
        [(0.0002, 0.003, 0.0)] * 100,
        50,
        "mode=ddp",
        others=[other, *([beyond] if beyond else [])],
    )
    run.kernel = HOST  # A third of the host's work is a step of the optimizer.
    actual = run.diagnose()
    assert actual.bound == bound and run.world.others == []
    expected = {
        "data": (2 / 3, 0),
        "launches": (0, 2 / 3),
        "compute": (0, 0),
    }[bound]
    assert (actual.step["data"], actual.step["launches"]) == pytest.approx(expected, abs=0.01)
