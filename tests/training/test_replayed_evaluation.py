"""Whole runs whose evaluations are replayed: metrics, averaged weights and files are those of launched ones."""

import tempfile
from contextlib import contextmanager
from unittest import mock

import pytest
from torch import nn

import trainer
from tests.command_line import latest
from tests.simulated.simcuda.runs import alone
from tests.simulated.tape import graphs_on_the_cpu
from tests.training.graphed_runs import differences, train
from trainer.commands.evaluate import evaluate_run
from trainer.models import replayed_forward
from trainer.models.replayed_forward import ReplayedForward
from trainer.modes.base import Strategy
from trainer.training import loop, step_graphs

BASE = """data.name=synthetic data.samples=16 data.val_samples=31 data.image_size=8 data.channels=1 data.workers=0
batch_size=4 model.name=dropping epochs=3 optimizer.lr=0.05 threads=1 mode=single devices=[cpu] logging.progress=false
logging.tensorboard=false logging.verdict=false schedule.warmup_epochs=0"""
BATCHES = 8  # of an evaluation, the last one of three images


class Dropping(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x)).relu().mean((2, 3))))


class Waiting(Dropping):
    def forward(self, x):
        out = super().forward(x)
        return out * 2 if not self.training and out.max().item() > 0 else out


class Counting(Dropping):
    calls = 0

    def forward(self, x):
        self.calls += not self.training
        return super().forward(x) * (2 if self.calls % 3 == 0 else 1)


for kind in (Dropping, Waiting, Counting):
    trainer.register_model(kind.__name__.lower())(kind)


def run(words, graphs="auto", folder=None, patches=()):
    """What a run leaves whose steps are launched: their recordings are tested elsewhere."""
    evaluations, worst, said, plain, init = [], [], [], loop.evaluate, ReplayedForward.__init__

    def evaluate(*given, **named):
        evaluations.append(plain(*given, **named))
        return evaluations[-1]

    def told(own, *given):
        *most, say = given
        init(own, *most, lambda line: (said.append(line), say(line))[1])

    own = [
        (loop, "evaluate", evaluate),
        (loop.presenting, "mistakes", lambda run, found: worst.extend(found.gathered(run.world))),
        (replayed_forward, "PAYS", BATCHES),
        (ReplayedForward, "__init__", told),
        (step_graphs, "WARM", 10**9),
    ]
    with tempfile.TemporaryDirectory() as other:
        whole = latest(*BASE.split(), *words.split(), f"graphs={graphs}")
        left = train(" ".join(whole), folder or other, [*own, *patches])
    left.evaluations, left.said = evaluations, said
    left.figures |= {"evaluations": evaluations, "worst predictions": worst}
    assert len(worst) == 31
    left.replays_of_each = [recorder.replays for recorder in left.recorders[1:]]  # the first is that of steps
    return left


def equal(one, other):
    assert differences(one, other) == []
    return True


@pytest.mark.parametrize("graphs", ["auto", "true"])
@pytest.mark.parametrize("words", ["", "ema=0.9", "precision=bf16 ema=0.5 accumulate=2"])
def test_a_run_whose_evaluations_are_replayed(words, graphs):
    launched, played = run(words, "false"), run(words, graphs)
    assert launched.recorders == [] and equal(launched, played) and played.said == []
    (replays,) = played.replays_of_each  # one recording for all evaluations
    assert replays >= 2 * BATCHES and len(played.evaluations) == 3 and played.recorders[1].closed


@pytest.mark.parametrize("name", ["waiting", "counting"])
def test_a_model_that_cannot_be_replayed(name):
    words = f"model.name={name}"
    played = run(words)
    assert equal(run(words, "false"), played) and len(played.said) == 1 and played.replays_of_each == [0]


def move(self, averages, plain=Strategy.after_epoch):
    """A callback gives the model other storages."""
    plain(self, averages)
    for tensor in (*self.module.parameters(), *self.module.buffers(), *averages.values()):
        tensor.data = tensor.data.clone()


def test_weights_that_move_are_recorded_anew():
    played = run("ema=0.9", patches=[(Strategy, "after_epoch", move)])
    assert len(played.replays_of_each) == 3 and all(played.replays_of_each)


def not_copied(self, inputs):
    self._replay()
    return self._outputs.clone()


def unchecked(self, batches):
    self._paying = True


@contextmanager
def live_at_first(self, averages, plain=Strategy.weights):
    """The first evaluation, which records, has the run's own weights, the others have the averages."""
    seen = vars(self).setdefault("evaluations", [])
    seen.append(1)
    with plain(self, averages if len(seen) > 1 else {}):
        yield


UNCHECKED = (ReplayedForward, "begin", unchecked)
FAULTS = {
    "inputs are not copied": ([], [(ReplayedForward, "_replayed", not_copied)]),
    "weights have moved": ([(Strategy, "after_epoch", move)], [UNCHECKED]),
    "recorded with live weights": ([(Strategy, "weights", live_at_first)], [UNCHECKED]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name):
    around, fault = FAULTS[name]
    launched, played = run("ema=0.9", "false", patches=around), run("ema=0.9", patches=around)
    assert equal(launched, played)
    faulty = run("ema=0.9", patches=[*around, *fault])
    assert faulty.evaluations != launched.evaluations and sum(faulty.replays_of_each) >= BATCHES


def test_the_evaluate_command(tmp_path):
    run("ema=0.9", "false", folder=tmp_path)
    with alone(), graphs_on_the_cpu() as recorders, mock.patch.object(replayed_forward, "PAYS", BATCHES):
        launched = evaluate_run(str(tmp_path), "graphs=false")
        assert recorders == []
        assert evaluate_run(str(tmp_path), "graphs=auto") == launched
        assert recorders[0].replays >= 2 and recorders[0].closed
