"""Replayed passes of stages in one process equal the eager passes to the bit, with one graph or
with one for each action.

The CPU has graphs here: `tests.simulated.tape`. Its stages share one device; where they are to be
on several, each has a name of its own for the CPU.
"""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.command_line import result
from tests.simulated.tape import CpuRecorder, same_draws
from tests.training.graphed_runs import differences, train
from trainer.devices.cuda_graphs import NotCapturable
from trainer.errors import NotFiniteError, RecipeError
from trainer.models.balance import BlockCost
from trainer.modes.deferred_batchnorm import DeferredStatistics
from trainer.modes.pipeline.recorded import RecordedActions
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.streams import Edge, StreamPipeline
from trainer.recipe import load
from trainer.recipe.checks import check_processes, explain_eager_steps
from trainer.training import step_graphs

SGD = "optimizer.weight_decay=0.001 optimizer.nesterov=true"
ADAMW = (
    "optimizer.name=adamw optimizer.lr=0.003 optimizer.weight_decay=0.1 "
    "optimizer.norm_weight_decay=0"
)
MUON = "optimizer.name=muon optimizer.lr=0.01 optimizer.weight_decay=0.05 optimizer.nesterov=true"
TWO = "devices=[cpu,cpu]"
THREE = "devices=[cpu,cpu,cpu]"
FOUR = f"mode=pipeline pipeline.microbatches=4 {TWO}"


class Several(CpuRecorder):
    """Recorders of several devices, each with its own memory."""

    def __init__(self, device):
        super().__init__(device)
        self.others = {}

    def get_recorder(self, device):
        if device == self.device:
            return self
        if device not in self.others:
            self.others[device] = type(self)(device)
        return self.others[device]

    def close(self):
        super().close()
        for other in self.others.values():
            other.close()


def setup(self, model):
    """Names of the CPU that put each stage on its own device."""
    _setup(self, model)
    for number, lane in enumerate(self.lanes):
        lane.device = torch.device("cpu", number) if number else self.device
    self.world.local_devices = tuple(lane.device for lane in self.lanes)


def probe(self, rows):
    """Cuts that are the same in every run: random numbers are drawn in the order of the stages."""
    return [BlockCost(1.0, 2.0, 8)] * (len(self.traced.cuts) + 1)


_setup = StreamPipeline.setup
ALIKE = [(Staged, "probe", probe)]
APART = [(StreamPipeline, "setup", setup)]


@functools.cache
def launched(words):
    """Muon's last bits depend on whether its rate is a tensor, on the CPU: of one device this run
    has tensors too.
    """
    tensors = [(step_graphs, "WARMUP_STEPS", 10**9)] if "muon" in words else []
    with tempfile.TemporaryDirectory() as folder:
        left = train(
            f"{words} graphs={'true' if tensors else 'false'}", Path(folder), [*ALIKE, *tensors]
        )
        left.result = result(folder)
        return left


def replayed(
    words,
    apart,
    patches=(),
    kind=Several,
    graphs="true",
    folder=None,
    **more,
):
    """A run that records its steps, with each stage on a device of its own, or all on one."""
    with tempfile.TemporaryDirectory() as other:
        patches = [*ALIKE, *(APART if apart else ()), *patches]
        left = train(f"{words} graphs={graphs}", Path(folder or other), patches, kind=kind, **more)
        if "stop_after" not in more:
            left.result = result(folder or other)
        return left


WORDS = {
    "split": f"mode=split {TWO} {SGD} clip_grad_norm=1",
    "split in three": f"mode=split {THREE} {ADAMW} accumulate=2 ema=0.9",
    "one micro-batch": f"mode=pipeline pipeline.microbatches=1 {TWO} {SGD}",
    "two micro-batches": (
        f"mode=pipeline pipeline.microbatches=2 {TWO} {ADAMW} ema=0.9 clip_grad_norm=0.5"
    ),
    "four in three stages": f"mode=pipeline pipeline.microbatches=4 {THREE} {SGD}",
    "a smaller last "
    "one": f"mode=pipeline pipeline.split_size=3 {TWO} {SGD} accumulate=2 batch_size=16",
    "each micro-batch's statistics": f"{FOUR} pipeline.deferred_batch_norm=false {SGD}",
    "muon": f"{FOUR} {MUON}",
    "fp16": f"{FOUR} precision=fp16 model.name=mlp {SGD} accumulate=2",
    "bf16": f"{FOUR} precision=bf16 {ADAMW}",
    "frozen": f"{FOUR} model.name=cnn model.freeze=1 {SGD}",
    "frozen, in "
    "three": f"mode=pipeline pipeline.microbatches=2 model.name=cnn model.freeze=2 {THREE} {SGD}",
    "mixed": f"{FOUR} augment.mixup=0.2 augment.cutmix=0.5 {SGD}",
    "vit": f"{FOUR} model.name=vit_tiny {ADAMW}",
    "computed anew": f"{FOUR} model.name=cnn recompute=true {ADAMW}",
    "computed anew in "
    "three": f"mode=split {THREE} model.name=cnn recompute=true {SGD} accumulate=2",
}
FAST = ("split", "two micro-batches", "fp16")


@pytest.mark.slow(cases=["fp16-one device", "split-one device", "two micro-batches-one device"])
@pytest.mark.full(
    but=[
        "a smaller last one-several",
        "bf16-several",
        "computed anew in three-several",
        "each micro-batch's statistics-several",
        "fp16-one device",
        "frozen, in three-several",
        "frozen-several",
        "one micro-batch-several",
        "split-several",
        "two micro-batches-one device",
    ]
)
@pytest.mark.parametrize("apart", [False, True], ids=["one device", "several"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.full if name == "vit" else pytest.mark.slow] * (name not in FAST),
        )
        for name in WORDS
    ],
)
def test_replayed_steps_are_the_launched_ones(name, apart):
    played = replayed(WORDS[name], apart)
    assert differences(launched(WORDS[name]), played) == []
    assert played.said == [] and played.replayed_to_the_end
    # The optimizer's part, which one device records.
    assert (played.steps.captured.update is None) is apart


@pytest.mark.slow(cases=["several"])
@pytest.mark.parametrize(
    "apart", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one device", "several"]
)
def test_a_run_goes_on_in_mid_epoch(apart, tmp_path):
    words = f"{FOUR} {ADAMW} ema=0.9 data.samples=80"
    replayed(words, apart, folder=tmp_path, stop_after=7)
    left = replayed(f"{words} resume=auto", apart, folder=tmp_path)
    whole = launched(words)
    assert left.replayed_to_the_end
    whole.figures, every = (
        {name: value for name, value in whole.figures.items() if name in left.figures},
        whole.figures,
    )
    assert len(whole.figures) > 5 and differences(whole, left) == []
    whole.figures = every


@pytest.mark.slow
def test_bubbles_are_those_of_replayed_steps_or_none(tmp_path):
    """Nothing can be timed within a graph, and the times of eager steps are not those of replayed
    ones.
    """
    words = f"{FOUR} {SGD} pipeline.timeline=true epochs=4"
    assert launched(words).result["pipeline"]["bubble_measured"] is not None
    together = replayed(words, False, folder=tmp_path / "together").result["pipeline"]
    assert (together["bubble_measured"], together["bubble_at_most"], together["stage_seconds"]) == (
        None,
        None,
        [],
    )
    apart = replayed(words, True, folder=tmp_path / "apart").result["pipeline"]
    assert 0 <= apart["bubble_measured"] <= apart["bubble_at_most"] <= 1
    events = json.loads((tmp_path / "apart/timeline.json").read_text())["traceEvents"]
    steps = {event["args"]["step"] for event in events if event["ph"] == "X"}
    # 2 stages, 4 micro-batches, there and back.
    assert sum(event["ph"] == "X" for event in events) == 16 * len(steps)
    assert "bubble_measured" in replayed(f"mode=split {TWO} {SGD}", True).result["pipeline"]


@pytest.mark.slow
def test_two_stages_on_one_of_several_devices_are_launched():
    def names(self, model):
        _setup(self, model)
        self.lanes[2].device = torch.device("cpu", 1)

    words = f"mode=pipeline pipeline.microbatches=2 {THREE} {SGD}"
    played = replayed(words, False, [(StreamPipeline, "setup", names)])
    assert differences(launched(words), played) == []
    assert len(played.said) == 1 and "share" in played.said[0] and not played.replays


class Fails(Several):
    """A recorder that fails after some captures."""

    after = 0

    def record(self, work, stream=None):
        if len(self.recordings) >= self.after:
            with pytest.raises(NotCapturable):
                super().record(lambda: (work(), torch.zeros(()).item()))
            raise NotCapturable("of a reason")
        return super().record(work)


@pytest.mark.slow(cases=["False-0"])
@pytest.mark.parametrize(("apart", "after"), [(False, 0), (True, 0), (True, 3), (True, 8)])
def test_a_recording_that_fails_leaves_nothing(apart, after):
    words = f"{FOUR} model.name=cnn {SGD}"
    played = replayed(
        words,
        apart,
        kind=type("After", (Fails,), {"after": after}),
    )
    assert differences(launched(words), played) == []
    assert len(played.said) == 1 and all(recorder.closed for recorder in played.recorders)


@pytest.mark.slow
def test_stages_with_random_numbers_are_recomputed_eagerly():
    words = f"{FOUR} {SGD} recompute=true"
    with pytest.raises(RecipeError, match=r"recompute=false, or graphs=false"):
        replayed(words, False)
    played = replayed(words, False, graphs="auto")
    assert differences(launched(words), played) == [] and not played.replays
    assert len(played.said) == 1 and "random states" in played.said[0]


def test_over_processes_steps_are_launched_unless_graphs_is_true():
    """See test_step_graphs.py for the replays of several ranks."""
    asked = load(None, "mode=pipeline", "graphs=true", "batch_size=8")
    check_processes(asked, 2)
    assert explain_eager_steps(asked, 2) is None
    auto = load(None, "mode=pipeline", "graphs=auto", "batch_size=8")
    assert explain_eager_steps(auto, 1) is None and explain_eager_steps(auto, 2)


# Mutants: each is wrong, and is found.


def changed(change):
    """Return RecordedActions with another list."""

    def init(self, *given):
        _init(self, *given)
        self._actions = change(self._actions)

    return [(RecordedActions, "__init__", init)]


_init = RecordedActions.__init__
_copy = Edge.copy


def of_the_former(actions):
    """Each gradient that goes back is that of the previous micro-batch."""
    back = {
        action.microbatch: copied
        for action, _, copied in actions
        if action.kind == "B" and copied is not None
    }
    assert len(back) == 4
    return [
        (
            action,
            replay,
            (back[max(0, action.microbatch - 1)][0], copied[1])
            if copied and action.kind == "B"
            else copied,
        )
        for action, replay, copied in actions
    ]


def only_once(self, tensor, into=None):
    """A value that was copied is never copied again."""
    seen = self.__dict__.setdefault("seen", set())
    if into is not None and into.data_ptr() in seen:
        return into
    seen.update([] if into is None else [into.data_ptr()])
    return _copy(self, tensor, into)


class CommitsAtOnce(Several):
    """Statistics are written while they are recorded."""

    def record(self, work, stream=None):
        if getattr(work, "__func__", None) is DeferredStatistics.commit:
            return lambda: None, work()
        return super().record(work)


def not_filled(self):
    """Keep the targets of the first pass."""
    self._targets = self._last_targets
    _replay(self)


_replay = RecordedActions.replay
MUTANTS = {
    "all forward passes first": changed(
        lambda actions: sorted(actions, key=lambda one: one[0].kind != "F")
    ),
    "forward passes in turn": changed(lambda actions: [actions[1], actions[0], *actions[2:]]),
    "a gradient of the micro-batch before": changed(of_the_former),
    "an edge that is not copied anew": [(Edge, "copy", only_once)],
    "targets that are not copied anew": [(RecordedActions, "replay", not_filled)],
    "a generator that is not registered": same_draws(Several),
    "statistics that are committed at once": CommitsAtOnce,
}


@pytest.mark.slow(
    cases=[
        "forward passes in turn",
        "an edge that is not copied anew",
        "a generator that is not registered",
        "a gradient of the micro-batch before",
    ]
)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    """Even without the step that is replayed as a proof."""
    mutant = MUTANTS[name]
    words = f"{FOUR} {SGD}"
    patches, kind = (mutant, Several) if isinstance(mutant, list) else ([], mutant)
    blind = [(step_graphs, "find_difference", lambda *_: None)]
    try:
        played = replayed(words, True, [*patches, *blind], kind)
    except NotFiniteError:
        return
    assert played.replays > 0 and differences(launched(words), played) != []
