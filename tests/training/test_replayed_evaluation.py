"""Whole runs with replayed evaluations: metrics, averaged weights and files equal those of eager
ones.
"""

import tempfile
from contextlib import contextmanager
from unittest import mock

import pytest

import trainer
from tests.command_line import latest
from tests.simulated.simcuda.runs import alone
from tests.simulated.tape import graphs_on_the_cpu
from tests.training.graphed_runs import Counting, Dropping, Waiting, differences, train
from trainer.commands.evaluate import evaluate_run
from trainer.models import replayed_forward
from trainer.models.replayed_forward import ReplayedForward
from trainer.modes.base import Strategy
from trainer.training import loop, step_graphs

BASE = """data.name=synthetic data.samples=16 data.val_samples=31 data.image_size=8
data.channels=1 data.workers=0
batch_size=4 model.name=dropping epochs=3 optimizer.lr=0.05 threads=1 mode=single
devices=[cpu] logging.progress=false
logging.tensorboard=false logging.verdict=false schedule.warmup_epochs=0"""
BATCHES = 8  # Batches of an evaluation; the last one has three images.


for kind in (Dropping, Waiting, Counting):
    trainer.register_model(kind.__name__.lower())(kind)


def run(words, graphs="auto", folder=None, patches=()):
    """Return the results of a run with eager steps; captured steps are tested in other files."""
    evaluations = []
    worst = []
    messages = []
    plain = loop.evaluate
    init = ReplayedForward.__init__

    def evaluate(*given, **named):
        evaluations.append(plain(*given, **named))
        return evaluations[-1]

    def told(own, *given):
        *most, say = given
        init(
            own,
            *most,
            lambda line: (messages.append(line), say(line))[1],
        )

    own = [
        (loop, "evaluate", evaluate),
        (
            loop.presenting,
            "report_mistakes",
            lambda resolved, found, step: worst.extend(found.gathered(resolved.world)),
        ),
        (replayed_forward, "MIN_PASSES", BATCHES),
        (ReplayedForward, "__init__", told),
        (step_graphs, "WARMUP_STEPS", 10**9),
    ]
    with tempfile.TemporaryDirectory() as other:
        whole = latest(*BASE.split(), *words.split(), f"graphs={graphs}")
        left = train(" ".join(whole), folder or other, [*own, *patches])
    left.evaluations = evaluations
    left.said = messages
    left.figures |= {"evaluations": evaluations, "worst predictions": worst}
    assert len(worst) == 31
    # The first is that of steps.
    left.replays_of_each = [recorder.replays for recorder in left.recorders[1:]]
    return left


def equal(one, other):
    assert differences(one, other) == []
    return True


@pytest.mark.parametrize("graphs", ["auto", "true"])
@pytest.mark.parametrize("words", ["", "ema=0.9", "precision=bf16 ema=0.5 accumulate=2"])
def test_a_run_whose_evaluations_are_replayed(words, graphs):
    launched = run(words, "false")
    played = run(words, graphs)
    assert launched.recorders == [] and equal(launched, played) and played.said == []
    (replays,) = played.replays_of_each  # All evaluations share one capture.
    assert replays >= 2 * BATCHES and len(played.evaluations) == 3 and played.recorders[1].closed


@pytest.mark.parametrize("name", ["waiting", "counting"])
def test_a_model_that_cannot_be_replayed(name):
    words = f"model.name={name}"
    played = run(words)
    assert equal(run(words, "false"), played)
    assert len(played.said) == 1
    assert played.replays_of_each == [0]


def move(self, averages, plain=Strategy.after_epoch):
    """Give the model other storages in a callback."""
    plain(self, averages)
    for tensor in (*self.module.parameters(), *self.module.buffers(), *averages.values()):
        tensor.data = tensor.data.clone()


def test_moved_weights_are_captured_again():
    played = run("ema=0.9", patches=[(Strategy, "after_epoch", move)])
    assert len(played.replays_of_each) == 3 and all(played.replays_of_each)


def not_copied(self, inputs):
    """Replay with the inputs of the first replay."""
    first_inputs = vars(self).setdefault("first_inputs", inputs.clone())
    return self._replay(first_inputs).clone()


def unchecked(self, batches):
    self._paying = True


@contextmanager
def live_at_first(self, averages, plain=Strategy.weights):
    """The first evaluation, which records, has the run's own weights, the others have the
    averages.
    """
    seen = vars(self).setdefault("evaluations", [])
    seen.append(1)
    with plain(self, averages if len(seen) > 1 else {}):
        yield


UNCHECKED = (ReplayedForward, "begin", unchecked)
FAULTS = {
    "inputs are not copied": ([], [(ReplayedForward, "_run_replay", not_copied)]),
    "weights have moved": ([(Strategy, "after_epoch", move)], [UNCHECKED]),
    "recorded with live weights": ([(Strategy, "weights", live_at_first)], [UNCHECKED]),
}


@pytest.mark.slow(cases=["weights have moved", "inputs are not copied"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name):
    around, fault = FAULTS[name]
    launched = run("ema=0.9", "false", patches=around)
    played = run("ema=0.9", patches=around)
    assert equal(launched, played)
    faulty = run("ema=0.9", patches=[*around, *fault])
    assert faulty.evaluations != launched.evaluations and sum(faulty.replays_of_each) >= BATCHES


def test_the_evaluate_command(tmp_path):
    run("ema=0.9", "false", folder=tmp_path)
    with (
        alone(),
        graphs_on_the_cpu() as recorders,
        mock.patch.object(replayed_forward, "MIN_PASSES", BATCHES),
    ):
        launched = evaluate_run(str(tmp_path), "graphs=false")
        assert recorders == []
        assert evaluate_run(str(tmp_path), "graphs=auto") == launched
        assert recorders[0].replays >= 2 and recorders[0].closed
