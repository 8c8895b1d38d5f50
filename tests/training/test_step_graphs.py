"""A replayed step is the launched one, to the bit: losses, norms, weights, optimizer, averages,
random states, files.

Here the CPU has graphs: `tests.simulated.tape`. On simulated cards:
`tests/simulated/test_graphs_on_simulated_cuda.py`.
"""

import random
import re
from contextlib import contextmanager

import pytest
import torch

from tests.command_line import PROJECT, latest, ok, result, suggested, trainer
from tests.options import OPTIONS
from tests.simulated.tape import CpuRecorder, is_recording, same_draws
from tests.training.graphed_runs import BASE, WARM, Left, differences, launched, replayed, train
from trainer.devices.cuda_graphs import NotCapturable
from trainer.errors import TrainerError
from trainer.modes.base import Strategy
from trainer.optim.optimization import MovingAverage, Updater
from trainer.optim.optimizers import LearningRates
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.training import step_graphs
from trainer.training.step_graphs import GraphSteps

SGD = "optimizer.weight_decay=0.001 optimizer.nesterov=true"
ADAMW = (
    "optimizer.name=adamw optimizer.lr=0.003 optimizer.weight_decay=0.1 "
    "optimizer.norm_weight_decay=0"
)
MUON = "optimizer.name=muon optimizer.lr=0.01 optimizer.weight_decay=0.05 optimizer.nesterov=true"
UNEVEN = "mode=local_sgd local_sgd.every=3 data.samples=53"
CASES = {
    # On a CPU only fused steps accept a tensor as the learning rate without reading it.
    **{
        name: f"optimizer.name={name} optimizer.lr=0.003"
        for name, row in OPTIMIZERS.items()
        if row.fused
    },
    "sgd without momentum": "optimizer.momentum=0 clip_grad_norm=0.5",
    "nesterov": f"{SGD} accumulate=4 ema=0.9 clip_grad_norm=1",
    "adam": "optimizer.name=adam optimizer.lr=0.003 schedule.name=step schedule.step_epochs=1",
    "adamw": f"{ADAMW} accumulate=2 ema=0.9 clip_grad_norm=0.5",
    "muon": f"{MUON} optimizer.layer_decay=0.7 model.name=cnn",
    "fp16": f"precision=fp16 model.name=mlp {SGD} ema=0.9 clip_grad_norm=1 accumulate=2",
    "bf16": f"precision=bf16 {ADAMW} clip_grad_norm=1",
    "all that changes "
    "images": f"augment.mixup=0.2 augment.cutmix=0.5 augment.erase=0.5 augment.crop=pad {SGD}",
    "unequal batches": f"{UNEVEN} batch_size=10 {SGD} ema=0.9",
    "unequal micro-batches": f"{UNEVEN} accumulate=3 batch_size=12 {SGD}",
    "an odd buffer": f"model.name=expanded {SGD}",
}
SLOW = {
    "vit": f"model.name=vit_tiny {ADAMW}",
    "muon, bf16": f"{MUON} precision=bf16 ema=0.9 accumulate=2",
}
ELSEWHERE = {
    "graphs": "all that is here",
    "compile": "of cards: a tape does not see the kernels of compiled code",
    "tf32": "of cards",
    "sync_bn": "of ranks, below",
    "muon": "above",
}
ALLOWED = [option for option in OPTIONS if option not in ELSEWHERE]
MODEL = {
    "freeze": "cnn",
    "layer_decay": "cnn",
    "fp16": "mlp",
    "channels_last": "cnn",
    "recompute": "cnn",
}


def equal(words, played):
    """Return whether a run with captured steps equals the one with eager steps."""
    assert differences(launched(words), played) == []
    return True


def one_line(played):
    """Return the message that a run continues without captures."""
    (line,) = played.said
    assert not played.replayed_to_the_end
    return line


@pytest.mark.full(cases=["sgd", "adamw", "muon", "nesterov"])
@pytest.mark.slow(
    cases=[
        "nesterov",
        "muon",
        "sgd without momentum",
        "fp16",
        "adamw",
        "sgd",
        "bf16",
        "adam",
        "unequal micro-batches",
    ]
)
@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)]
)
def test_a_run_with_replayed_steps_is_the_one_with_launched_steps(name):
    words = (CASES | SLOW)[name]
    played = replayed(words)
    assert equal(words, played) and played.said == []
    assert played.replays > 4 and played.replayed_to_the_end


@pytest.mark.parametrize("warm", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_a_step_is_recorded_after_a_save_or_an_evaluation(warm):
    """The fourth step is the last before a save, the fifth before an evaluation with averaged
    weights.
    """
    words = f"{ADAMW} accumulate=2 ema=0.9"
    played = replayed(words, [(step_graphs, "WARMUP_STEPS", warm)])
    assert equal(words, played) and played.said == [] and played.replayed_to_the_end


@pytest.mark.full(
    cases=["ema", "mixup", "accumulate", "label_smoothing", "layer_decay", "recompute", "shares"]
)
@pytest.mark.slow(
    cases=["recompute", "accumulate", "shares", "layer_decay", "clip_grad_norm", "freeze"]
)
@pytest.mark.parametrize("option", ALLOWED)
def test_an_option(option):
    key, value = OPTIONS[option]
    words = f"{key}={value} model.name={MODEL.get(option, 'noisy')}"
    played = replayed(words)
    assert equal(words, played) and played.said == [] and played.replayed_to_the_end


@pytest.mark.slow(cases=["True"])
@pytest.mark.parametrize("told", [True, False])
def test_blocks_with_random_numbers_are_recomputed_eagerly(told, tmp_path):
    """A message says so in advance, or the comparison with a replay detects it."""
    unknown = [] if told else [(Strategy, "note_draws", lambda strategy, draws: None)]
    if told:
        with pytest.raises(TrainerError, match="recompute=false, or graphs=false"):
            train("recompute=true graphs=true", tmp_path)
    played = replayed("recompute=true", unknown, graphs="auto" if told else "true")
    assert ("random states" if told else "random numbers") in one_line(played)
    assert equal("recompute=true", played)


# Steps that are not finite.


@pytest.mark.parametrize("words", ["", "precision=fp16 model.name=mlp"])
def test_a_step_that_is_not_finite_ends_the_run(words, tmp_path):
    collected = []
    for graphs in ("false", "true"):
        with pytest.raises(TrainerError, match="not finite") as error:
            train(f"{words} graphs={graphs} logging.every_steps=100", tmp_path / graphs, nan_at=[7])
        collected.append(
            (str(error.value).replace(f"/{graphs}", ""), Left(tmp_path / graphs).read())
        )
    assert collected[0][0] == collected[1][0]
    assert differences(collected[0][1], collected[1][1]) == []


# Resuming.


def continued(words, folder, stops):
    """Kill a run after some steps, given as (step, argument for graphs), resume it each time, and
    end with the last argument.
    """
    for step, graphs in stops:
        left = train(f"{words} {graphs} resume=auto", folder, stop_after=step)
    return left


@pytest.mark.slow(cases=["false true"])
@pytest.mark.parametrize(
    "ways", [pytest.param("true true", marks=pytest.mark.slow), "true false", "false true"]
)
def test_a_run_goes_on_in_mid_epoch(ways, tmp_path):
    """And graphs may be turned on and off there."""
    words = f"accumulate=2 {ADAMW} ema=0.9 data.samples=80"
    first, second = (f"graphs={way}" for way in ways.split())
    left = continued(words, tmp_path, [(7, first), (None, second)])
    whole = launched(words)
    norms = {name: value for name, value in whole.figures.items() if name in left.figures}
    assert len(whole.figures) > len(norms) > 10
    whole.figures, every = norms, whole.figures
    assert differences(whole, left) == []
    whole.figures = every
    assert left.replays > 8 or second == "graphs=false"


# The faster way.


def clock(replay):
    """Simulate a recorder for a device on which an eager step takes a second and a replayed one
    `replayed` seconds.
    """

    class Timed(CpuRecorder):
        seconds = 0.0
        noted = 0

        def record_event(self):
            self.seconds += replay if self.replays > self.noted else 1.0
            self.noted = self.replays
            return self.seconds

    return Timed


@pytest.mark.slow(cases=["0.5-True", "2.0-False"])
@pytest.mark.parametrize(("replay", "kept"), [(0.5, True), (0.99, False), (2.0, False)])
def test_auto_keeps_the_faster(replay, kept):
    words = f"accumulate=2 {ADAMW} data.samples=96"
    played = replayed(words, graphs="auto", kind=clock(replay))
    assert equal(words, played) and len(played.said) == 1, played.said
    assert played.replays > 0 and played.replayed_to_the_end is kept
    assert f"{1e3 * replay:.3g}" in played.said[0] and "1e+03" in played.said[0]


# --- models that cannot be captured.

REASONS = {
    "waits": r"graphed_runs\.py:\d+|_local_scalar_dense",
    "hostdraws": "random",
    "replaces": "buffer",
    "counts": "calls",
    "drifts": "factors",
    "countsinobject": "pace.calls",
    "hooked": "hook of norm",
}


@pytest.mark.slow(cases=["countsinobject", "hooked", "waits"])
@pytest.mark.parametrize("model", REASONS)
def test_a_model_that_cannot_be_recorded_is_launched(model):
    words = f"model.name={model} {SGD} accumulate=2"
    played = replayed(words)
    assert equal(words, played) and re.search(REASONS[model], one_line(played))


class Fails(CpuRecorder):
    """Cannot record what is asked for after some recordings."""

    after = 0
    error = NotCapturable("odd kernel")

    def record(self, work):
        if len(self.recordings) >= self.after:
            raise self.error
        return super().record(work)


@pytest.mark.slow(cases=["error0-1", "error1-1", "error0-0", "error1-2", "error1-0"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [NotCapturable("odd kernel"), torch.OutOfMemoryError("CUDA memory")]
)
def test_a_recording_that_fails_changes_nothing(after, error):
    words = f"{ADAMW} accumulate=2 ema=0.9 clip_grad_norm=1"
    played = replayed(
        words,
        kind=type(
            "Fails",
            (Fails,),
            {"after": after, "error": error},
        ),
    )
    assert equal(words, played)
    assert ("odd kernel" if isinstance(error, NotCapturable) else "memory") in one_line(played)


def in_recordings(plain, does):
    """Return a function that does something else first, except in eager steps."""

    def changed(*given):
        if is_recording():
            does(*given)
        return plain(*given)

    return changed


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


@pytest.mark.slow(cases=["changes1-local_scalar", "changes0-memory"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((Strategy, "loss", in_recordings(Strategy.loss, full)), "memory"),
        (
            (Updater, "step", in_recordings(Updater.step, lambda updater, loss, *_: loss.item())),
            "local_scalar",
        ),
        ((Updater, "step", in_recordings(Updater.step, lambda *_: random.random())), "random"),
    ],
)
def test_a_failed_capture_changes_nothing(changes, told):
    words = f"{SGD} ema=0.9 accumulate=2"
    played = replayed(words, [changes])
    assert equal(words, played) and told in one_line(played)


# --- values that change from step to step.


@contextmanager
def moved(self, averages, plain=Strategy.weights):
    """Evaluations that leave the weights somewhere else in memory, with the same values."""
    with plain(self, averages):
        yield
    for parameter in self.module.parameters():
        parameter.data = parameter.data.clone()


MOVES = [(Strategy, "weights", moved)]


@pytest.mark.parametrize(
    ("model", "keeps"), [("noisy", True), pytest.param("anneals", False, marks=pytest.mark.slow)]
)
def test_a_captured_step_is_checked_after_an_evaluation_within_an_epoch(model, keeps):
    words = f"model.name={model} {SGD} epochs=1 data.samples=80 evaluate.every_steps=6"
    played = replayed(words)
    assert equal(words, played) and (played.said == []) is keeps
    assert played.replays > 2 and played.replayed_to_the_end is keeps


@pytest.mark.slow(cases=["words0-patches0-\\\\bfirst\\\\.weight\\\\b"])
@pytest.mark.parametrize(
    ("words", "patches", "pattern"),
    [
        (f"{ADAMW} ema=0.9", MOVES, r"\bfirst\.weight\b"),
        (f"model.name=anneals {SGD}", [], r"\battribute epochs\b"),
    ],
)
def test_steps_that_differ_from_the_previous_epoch_are_eager(words, patches, pattern):
    played = replayed(words, patches)
    assert equal(words, played) and re.search(pattern, one_line(played))


# --- mutants: each is wrong, and is detected as a different run or as one that falls back to eager
# steps.


def rates_are_numbers(self, optimizer, device=None):
    self.groups = optimizer.param_groups
    self.tensors = {}


def loss_is_kept(self, batch, weight, sync, plain=GraphSteps.forward_backward):
    before = self.recorder.replays
    loss = plain(self, batch, weight, sync)
    return loss if self.recorder.replays == before else self.recorder.last.result


def batch_is_not_copied(self, batch, weight, sync, plain=GraphSteps.forward_backward):
    if self.recorder.replays:
        batch = vars(self).setdefault("first", batch)
    return plain(self, batch, weight, sync)


class OneForAll(CpuRecorder):
    """A recorder that reuses the first capture for everything with equal results: a pass that
    accumulates, another shape.
    """

    def record(self, work):
        recorded = super().record(work)
        kind = isinstance(recorded[1], torch.Tensor)
        return vars(self).setdefault(f"first {kind}", recorded)


AVERAGES = []


def average_is_updated_outside(self, step, plain=MovingAverage.update):
    AVERAGES[:] = [self]
    if step <= WARM:
        plain(self, step)


def average_is_recorded(self, *given, plain=Updater.step, update=MovingAverage.update):
    """Use the decay of the captured step for all steps."""
    norm = plain(self, *given)
    if is_recording():
        update(AVERAGES[0], WARM + 1)
    return norm


RECORDED = [
    (Updater, "step", average_is_recorded),
    (MovingAverage, "update", average_is_updated_outside),
]
NUMBERS = [(LearningRates, "__init__", rates_are_numbers)]
MUTANTS = {  # words, patches, recorder
    "the learning rate is a number": (SGD, NUMBERS, CpuRecorder),
    "muon's learning rate is a number": (CASES["muon"], NUMBERS, CpuRecorder),
    "a loss is kept": (SGD, [(GraphSteps, "forward_backward", loss_is_kept)], CpuRecorder),
    "the batch is not copied": (
        SGD,
        [(GraphSteps, "forward_backward", batch_is_not_copied)],
        CpuRecorder,
    ),
    "storages change": (
        f"{ADAMW} ema=0.9",
        [*MOVES, (GraphSteps, "check", lambda self: None)],
        CpuRecorder,
    ),
    "draws repeat": ("", [], same_draws(CpuRecorder)),
    "a pass that adds is the first": (f"{SGD} accumulate=2", [], OneForAll),
    "a number of the host": (f"model.name=fromthehost {SGD}", [], CpuRecorder),
    "the average is recorded": (f"{ADAMW} ema=0.99", RECORDED, CpuRecorder),
}


@pytest.mark.full(
    cases=[
        "the learning rate is a number-True",
        "muon's learning rate is a number-True",
        "a loss is kept-False",
        "the batch is not copied-False",
        "storages change-True",
        "draws repeat-True",
        "a pass that adds is the first-True",
        "a number of the host-True",
        "the average is recorded-True",
    ]
)
@pytest.mark.slow(
    cases=[
        "muon's learning rate is a number-True",
        "draws repeat-True",
        "storages change-True",
        "the batch is not copied-True",
        "the average is recorded-True",
        "a number of the host-True",
        "a loss is kept-True",
    ]
)
@pytest.mark.parametrize("proven", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant(name, proven):
    """The comparison before the first real replay detects it, if there is one, or the results of
    the run do.
    """
    words, patches, kind = MUTANTS[name]
    unproven = [] if proven else [(step_graphs, "find_difference", lambda *_: None)]
    try:
        played = replayed(words, [*patches, *unproven], kind=kind)
    except (RuntimeError, AssertionError, TrainerError):
        return  # The process has ended.
    assert differences(launched(words), played) or not played.replayed_to_the_end


# Ranks.

CUT = "model.name=cnn pipeline.cuts=['7']"
# Columns: arguments, and the number of steps before one is captured; a save or an averaging follows
# the last of them
RANKS = {
    "ddp": (f"mode=ddp accumulate=2 ema=0.9 clip_grad_norm=0.5 {ADAMW}", 4),
    "local_sgd": (
        f"mode=local_sgd local_sgd.every=3 data.samples=97 batch_size=20 ema=0.9 {SGD}",
        3,
    ),
    "pipeline": (
        f"mode=pipeline pipeline.schedule=1f1b {CUT} pipeline.microbatches=2 accumulate=2 ema=0.9 "
        f"clip_grad_norm=0.5 {ADAMW}",
        4,
    ),
    "fsdp": (
        f"mode=fsdp accumulate=2 ema=0.9 clip_grad_norm=0.5 evaluate.every_steps=3 {ADAMW}",
        4,
    ),
}
FOUR_STAGES = "mode=pipeline model.name=cnn pipeline.cuts=['1','4','7'] pipeline.microbatches=4"
MORE_RANKS = {
    "ddp, label smoothing": (f"mode=ddp loss.label_smoothing=0.1 augment.mixup=0.2 {SGD}", 2),
    "ddp, bf16, compressed": (f"mode=ddp precision=bf16 ddp.compress=bf16 {ADAMW}", 2),
    "ddp, sync_bn": (
        f"mode=ddp model.name=cnn sync_bn=true accumulate=3 batch_size=12 clip_grad_norm=0.5 {SGD}",
        2,
    ),
    "ddp, shares": ("mode=ddp shares=[3,1] accumulate=2 model.name=mlp precision=bf16", 2),
    "ddp, frozen blocks": (f"mode=ddp model.name=cnn model.freeze=1 {SGD}", 2),
    "ddp, fp16, unequal": ("mode=ddp model.name=mlp precision=fp16 batch_size=9", 2),
    "pipeline, one micro-batch": (
        f"mode=pipeline pipeline.schedule=gpipe {CUT} pipeline.microbatches=1 precision=fp16",
        2,
    ),
    "pipeline, recompute": (
        f"mode=pipeline pipeline.schedule=1f1b {CUT} pipeline.microbatches=4 recompute=true "
        "pipeline.deferred_batch_norm=false model.freeze=1",
        2,
    ),
    "pipeline, replicas": (
        f"mode=pipeline pipeline.schedule=1f1b {CUT} pipeline.microbatches=2 pipeline.stages=2 "
        f"nproc=4 precision=bf16 {SGD}",
        2,
    ),
    "pipeline, four ranks": (
        f"{FOUR_STAGES} pipeline.schedule=1f1b nproc=4 ema=0.9 clip_grad_norm=0.5 {ADAMW}",
        2,
    ),
    "pipeline, interleaved": (f"{FOUR_STAGES} pipeline.schedule=interleaved1f1b {SGD}", 2),
    "pipeline, zero bubble": (f"{FOUR_STAGES} pipeline.schedule=interleavedzerobubble {SGD}", 2),
    "pipeline, V": (f"{FOUR_STAGES} pipeline.schedule=zbv {SGD}", 2),
    "pipeline, dualpipev": (f"{FOUR_STAGES} pipeline.schedule=dualpipev optimizer.name=muon", 2),
    "pipeline, breadth first": (f"{FOUR_STAGES} pipeline.schedule=loopedbfs accumulate=2 {SGD}", 2),
    "pipeline, a frozen stage": (
        f"{FOUR_STAGES} pipeline.schedule=zbv model.freeze=2 verify.every=3 {SGD}",
        2,
    ),
    "pipeline, measured": (f"{FOUR_STAGES} pipeline.schedule=measured {SGD}", 2),
    "local_sgd, fp16": ("mode=local_sgd model.name=mlp precision=fp16 batch_size=16", 2),
    "fsdp, three passes": (f"mode=fsdp accumulate=3 batch_size=12 fsdp.reshard=false {SGD}", 2),
    "fsdp, an evaluation before the capture": (f"mode=fsdp ema=0.9 {SGD}", 5),
    "fsdp, bf16": (f"mode=fsdp precision=bf16 clip_grad_norm=1 {ADAMW}", 2),
    "fsdp, fp16, unequal": ("mode=fsdp model.name=mlp precision=fp16 batch_size=9 ema=0.9", 2),
    "fsdp, recompute": (
        f"mode=fsdp model.name=cnn recompute=true sync_bn=true accumulate=2 {SGD}",
        2,
    ),
    "fsdp, muon": (f"mode=fsdp model.name=cnn {MUON}", 2),
    "fsdp, shares": ("mode=fsdp shares=[3,1] accumulate=2 model.name=mlp precision=bf16", 2),
}


def commanded(words, graphs, warm, folder, plugin="tests.simulated.tape_plugin"):
    """Return the results of ranks of a command, two by default, and the number of steps, or parts
    of steps, that each replayed.
    """
    base = [word for word in BASE.split() if not word.startswith("devices=")]
    path = f"{folder}:{PROJECT}"
    folder = folder / f"warm {warm}"
    replays = folder / f"replays {graphs}"
    replays.mkdir(parents=True)
    env = {"TRAINER_TEST_REPLAYS": str(replays), "TRAINER_TEST_WARM": str(warm)}
    env["PYTHONPATH"] = path
    more = [
        "nproc=2",
        f"plugin={plugin}",
        f"graphs={graphs}",
        f"output={folder / graphs}",
    ]
    left = Left(folder / graphs)
    left.output = ok(*latest(*base, *more, *words.split()), env=env).stdout
    return left.read(), [file.stat().st_size for file in replays.iterdir()]


@pytest.mark.slow(cases=["ddp"])
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[pytest.mark.slow] * (name != "ddp")) for name in RANKS),
        *(pytest.param(name, marks=pytest.mark.full) for name in MORE_RANKS),
    ],
)
def test_ranks_that_replay_are_ranks_that_launch(name, tmp_path):
    words, warm = (RANKS | MORE_RANKS)[name]
    eager, none = commanded(words, "false", 0, tmp_path)
    played, replays = commanded(words, "true", warm, tmp_path)
    assert differences(eager, played) == [] and none == []
    assert len(replays) == (4 if "nproc=4" in words else 2) and min(replays) > 5


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "fsdp" else pytest.mark.full)
        for name in RANKS
    ],
)
def test_ranks_that_replay_compiled_code_are_ranks_that_launch_it(name, tmp_path):
    words, warm = RANKS[name]
    words += " compile=true"
    plugin = "tests.simulated.compiled_tape_plugin"
    eager, _ = commanded(words, "false", 0, tmp_path, plugin)
    played, replays = commanded(words, "true", warm, tmp_path, plugin)
    assert differences(eager, played) == []
    assert len(replays) == 2 and min(replays) > 5
    assert played.output.count("compiled code is recorded") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason", "has_replayed"),
    [("waitsonone", "graphed_runs.py", False), ("countsepochsonone", "epochs", True)],
    ids=["at the capture", "an epoch later"],
)
def test_if_one_rank_gives_up_all_ranks_run_eagerly_with_a_message(
    model, reason, has_replayed, tmp_path
):
    words = f"mode=ddp model.name={model} {SGD} epochs=3"
    eager, _ = commanded(words, "false", 0, tmp_path)
    played, replays = commanded(words, "true", 2, tmp_path)
    assert differences(eager, played) == [] and result(played.folder)["graphs"] == "launched"
    assert "rank 1" in played.output and reason in played.output
    # No rank has replayed more often than the other.
    assert (len(replays) == 2 and replays[0] == replays[1] > 2) if has_replayed else replays == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_do_not_capture_copies_of_buffers(mode, tmp_path):
    base = [word for word in BASE.split() if not word.startswith("devices=")]
    words = latest(*base, "model.name=expanded", f"mode={mode}", "nproc=2", "graphs=true")
    refused = trainer(*words, "plugin=tests.simulated.tape_plugin", f"output={tmp_path / 'run'}")
    assert refused.returncode == 2 and "buffers" in refused.stderr
    assert "graphs=false" in refused.stderr


@pytest.mark.full("a teacher")
@pytest.mark.parametrize(
    "mode",
    ["ddp", "fsdp", f"pipeline {CUT} pipeline.schedule=1f1b pipeline.microbatches=2"],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_ranks_with_a_teacher_replay_what_they_launch(mode, tmp_path):
    teacher = tmp_path / "teacher"
    ok(*latest(*BASE.split(), "model.name=cnn", "epochs=1", f"output={teacher}"))
    words = f"mode={mode} distill.teacher={teacher} {SGD}"
    eager, none = commanded(words, "false", 0, tmp_path)
    played, replays = commanded(words, "true", 2, tmp_path)
    assert differences(eager, played) == [] and none == []
    assert len(replays) == 2 and min(replays) > 5


NEVER = 1000  # steps before one is captured, in a run of fewer steps


@pytest.mark.full("four ranks")
@pytest.mark.parametrize(
    "mode",
    [
        "ddp sync_bn=true model.name=cnn accumulate=2",
        "fsdp fsdp.shards=2 accumulate=3 batch_size=12 clip_grad_norm=0.5",
    ],
)
def test_four_ranks_replay_what_they_launch(mode, tmp_path):
    """The sums of four ranks depend on their buckets, and those of replicas of shards on the passes
    in which they meet, so the eager run has the same ones.
    """
    words = f"mode={mode} nproc=4 ema=0.9 {ADAMW}"
    eager, none = commanded(words, "true", NEVER, tmp_path)
    played, replays = commanded(words, "true", 2, tmp_path)
    assert differences(eager, played) == [] and none == []
    assert len(replays) == 4 and min(replays) > 5


INTERRUPTIONS = 20


@pytest.mark.full("a run that is killed twenty times")
@pytest.mark.parametrize(
    "mode",
    [
        "mode=ddp",
        "mode=fsdp",
        f"mode=pipeline pipeline.schedule=1f1b {CUT} pipeline.microbatches=2",
    ],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_ranks_that_are_killed_again_and_again_replay_what_they_launch(mode, tmp_path):
    words = f"{mode} accumulate=2 ema=0.9 data.samples=280 save.every_steps=3 save.keep=2"
    words += f" clip_grad_norm=0.5 {ADAMW}"
    eager, _ = commanded(words, "false", 0, tmp_path)
    base = [word for word in BASE.split() if not word.startswith("devices=")]
    run = tmp_path / "killed"
    words = latest(*base, *words.split(), "nproc=2", "plugin=tests.simulated.tape_plugin")
    words += ["graphs=true", "resume=auto", f"output={run}"]
    for turn in range(INTERRUPTIONS):
        env = {"TRAINER_TEST_WARM": "2", "TRAINER_FAULT": f"kill@{turn % 2}:{3 * turn + 5}"}
        assert trainer(*words, env=env).returncode == 7
    ok(*words, env={"TRAINER_TEST_WARM": "2"})
    assert result(run)["graphs"] == "replayed"
    assert differences(eager, Left(run).read()) == []


CAPTURED = "from trainer.devices import cuda_graphs\nfrom trainer.distributed.world import World\n"
RANK_MUTANTS = {
    "the sum is not captured": (
        "plain = World.start_sum\n"
        "World.start_sum = lambda w, v: None if cuda_graphs.is_capturing else plain(w, v)\n"
        "wait = World.wait\n"
        "World.wait = lambda w, work: work and wait(w, work)\n"
    ),
    "one rank's sum is captured wrong": (
        "plain = World.start_sum\n"
        "def start(world, values):\n"
        "    if cuda_graphs.is_capturing and world.rank == 1:\n"
        "        values.mul_(0.5)\n"
        "    return plain(world, values)\n"
        "World.start_sum = start\n"
    ),
    "one rank captures a pass that computes nothing": (
        "from trainer.modes.ddp import DistributedDataParallel as Mode\n"
        "plain = Mode.backward\n"
        "def backward(mode, loss):\n"
        "    alone = cuda_graphs.is_capturing and mode.world.rank == 1\n"
        "    plain(mode, loss * 2 if alone else loss)\n"
        "Mode.backward = backward\n"
    ),
}


SHARD_MUTANTS = {
    "the weights are not gathered": (
        "from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather\n"
        "plain = DefaultAllGather.__call__\n"
        "def gather(*given, **named):\n"
        "    return None if cuda_graphs.is_capturing else plain(*given, **named)\n"
        "DefaultAllGather.__call__ = gather\n"
    ),
    "one rank's gradients are captured wrong": (
        "import os\n"
        "from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter\n"
        "plain = DefaultReduceScatter.__call__\n"
        "def scatter(self, output_tensor, input_tensor, **given):\n"
        "    if cuda_graphs.is_capturing and os.environ['RANK'] == '1':\n"
        "        input_tensor.mul_(0.5)\n"
        "    return plain(self, output_tensor, input_tensor, **given)\n"
        "DefaultReduceScatter.__call__ = scatter\n"
    ),
    "gradients of the first pass are forgotten": (
        "from trainer.modes.fsdp import DTensor\n"
        "plain = DTensor.from_local\n"
        "DTensor.from_local = lambda rows, *given, **named: plain(rows.clone(), *given, **named)\n"
    ),
}


def mutated(words, mutant, folder):
    """Return the results of two eager ranks, and of ranks that replay with a mutant."""
    (folder / "mutant.py").write_text("import tests.simulated.tape_plugin\n" + CAPTURED + mutant)
    eager, _ = commanded(words, "false", 0, folder)
    played, replays = commanded(words, "true", 2, folder, plugin="mutant")
    return eager, played, replays


@pytest.mark.slow(cases=["the sum is not captured", "the weights are not gathered"])
@pytest.mark.full(
    cases=["one rank's gradients are captured wrong", "gradients of the first pass are forgotten"]
)
@pytest.mark.parametrize("name", RANK_MUTANTS | SHARD_MUTANTS)
def test_ranks_launch_if_a_replay_sums_something_else(name, tmp_path):
    mode = "ddp" if name in RANK_MUTANTS else "fsdp"
    mutant = (RANK_MUTANTS | SHARD_MUTANTS)[name]
    eager, played, _ = mutated(f"mode={mode} accumulate=2 {SGD}", mutant, tmp_path)
    assert differences(eager, played) == [] and result(played.folder)["graphs"] == "launched"
    assert "another step" in played.output


CALLS = "import os\nfrom trainer.modes.pipeline.stage_calls import StageCalls\n"
CALLS += "plain, count = StageCalls.run, 0\n"
LEFT_OUT = (
    "def run(calls, work, *given):\n"
    "    global count\n"
    "    count += calls._replayed is not None\n"
    "    if calls._replayed and count == 5 and os.environ['RANK'] == '1':\n"
    "        calls._replayed = map(leave_out, calls._replayed)\n"
    "    return plain(calls, work, *given)\n"
    "def leave_out(call, left_out=[]):\n"
    "    if left_out:\n"
    "        return call\n"
    "    left_out.append(call)\n"
    "    return type(call)(call.action, lambda: None, call.result, call.caches)\n"
    "StageCalls.run = run\n"
)


@pytest.mark.slow
def test_stages_launch_if_a_call_is_not_replayed(tmp_path):
    words = f"{FOUR_STAGES} pipeline.schedule=interleaved1f1b {SGD}"
    eager, played, _ = mutated(words, CALLS + LEFT_OUT, tmp_path)
    assert differences(eager, played) == [] and result(played.folder)["graphs"] == "launched"
    assert "another step" in played.output


@pytest.mark.slow
def test_weights_that_an_evaluation_has_gathered_are_gathered_again(tmp_path):
    """Without the end of a pass, the next evaluation would use them, and nothing would say so."""
    words = f"mode=fsdp epochs=1 data.samples=80 evaluate.every_steps=4 {SGD}"
    mutant = "from trainer.modes import fsdp\nfsdp.end_pass = lambda root: None\n"
    eager, stale, replays = mutated(words, mutant, tmp_path)
    assert min(replays) > 5 and any("val_loss" in line for line in differences(eager, stale))
    played, replays = commanded(words, "true", 3, tmp_path)
    assert min(replays) > 5 and differences(eager, played) == []


COLLECTIVE_FAILS = (
    "import os, torch\n"
    "from torch.distributed.fsdp._fully_shard._fsdp_collectives import Default{0} as Collective\n"
    "plain, calls = Collective.__call__, []\n"
    "def call(*given, **named):\n"
    "    if cuda_graphs.is_capturing and os.environ['RANK'] == '1':\n"
    "        calls.append(None)\n"
    "        if len(calls) == {1}:\n"
    "            raise torch.OutOfMemoryError('out of memory')\n"
    "    return plain(*given, **named)\n"
    "Collective.__call__ = call\n"
)
FAILURES = {
    "ddp, the comparison": (
        "mode=ddp accumulate=2",
        "import os, torch\n"
        "from trainer.training.step_evidence import StepResult\n"
        "plain = StepResult.distances\n"
        "def distances(result, other, before):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise torch.OutOfMemoryError('out of memory')\n"
        "    return plain(result, other, before)\n"
        "StepResult.distances = distances\n",
    ),
    "fsdp, forward": ("mode=fsdp accumulate=2", COLLECTIVE_FAILS.format("AllGather", 3)),
    "fsdp, backward": ("mode=fsdp accumulate=2", COLLECTIVE_FAILS.format("ReduceScatter", 2)),
    "pipeline": (
        f"{FOUR_STAGES} pipeline.schedule=interleaved1f1b",
        CALLS + "import torch\n"
        "def run(calls, work, *given):\n"
        "    global count\n"
        "    count += calls.step_recorder is not None\n"
        "    if calls.step_recorder and count == 5 and os.environ['RANK'] == '1':\n"
        "        raise torch.OutOfMemoryError('out of memory')\n"
        "    return plain(calls, work, *given)\n"
        "StageCalls.run = run\n",
    ),
    # Torch raises another error, about tensors, from this one.
    "pipeline, backward": (
        f"mode=pipeline {CUT} pipeline.schedule=1f1b pipeline.microbatches=2",
        "import os, torch\n"
        "plain = torch.autograd.backward\n"
        "def backward(*given, **named):\n"
        "    if cuda_graphs.is_capturing and os.environ['RANK'] == '1':\n"
        "        raise torch.OutOfMemoryError('out of memory')\n"
        "    plain(*given, **named)\n"
        "torch.autograd.backward = backward\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_capture_that_fails_on_one_rank_ends_the_run_on_all(name, tmp_path):
    words, mutant = FAILURES[name]
    with pytest.raises(AssertionError) as error:
        mutated(f"{words} {SGD}", mutant, tmp_path)
    assert "memory" in str(error.value) and "graphs=false" in suggested(str(error.value))
