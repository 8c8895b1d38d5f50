"""The setting accumulate=auto: the number of micro-batches, a search that does not change the run,
and continuing with more.
"""

import json
import re
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from tests.command_line import QUIET, latest, losses, ok, result, suggested, trainer
from tests.modes.ways import FP32, distances, tensors
from trainer.data import DataShare
from trainer.errors import DeviceMemoryError, RecipeError
from trainer.launch.endings import SMALLER
from trainer.recipe import load
from trainer.recipe.checks import check_processes, list_micro_batch_counts
from trainer.recipe.shares import fixed_shares
from trainer.saving import checkpoint
from trainer.training import memory_keys as choosing
from trainer.training.state import Opened, Resolved

WORDS = [
    "data.name=synthetic",
    "data.samples=64",
    "data.val_samples=24",
    "data.channels=1",
    "batch_size=16",
]
WORDS += ["epochs=2", "optimizer.lr=0.01", "threads=1", *QUIET]
SHORT = [*WORDS, "data.image_size=8", "plugin=tests.training.short_of_memory", "model.name=short"]
CARDS = [*WORDS, "data.image_size=32", "max_steps=2", "mode=single"]
ON_CARDS = [*CARDS, "plugin=tests.simulated.simcuda.plugin", "model.name=cnn"]
LITTLE, MUCH, TINY = (
    {"TRAINER_TEST_CARDS": "1", "TRAINER_TEST_MEMORY": str(size)}
    for size in (9 << 20, 1 << 30, 6 << 20)
)


def pieces(folder):
    kept = json.loads((folder / "tuning.json").read_text())["accumulate"]["pieces"]
    assert result(folder)["accumulate"] == kept
    return kept


def causes(folder):
    """Return what ended each attempt of a run."""
    return [end["cause"] for end in result(folder)["goodput"]["ends"]]


def assert_same(one, other, steps=None):
    """Assert that losses, weights and optimizer are equal to the bit."""
    assert losses(one)[steps or 0 :] == losses(other)[steps or 0 :]
    for part in ("model", "optimizer"):
        own, reference = (
            checkpoint.load_newest(folder, print).state.part(part) for folder in (one, other)
        )
        assert own and all(torch.equal(own[name].read(), reference[name].read()) for name in own), (
            part
        )


@pytest.mark.slow
def test_on_a_card_the_fewest_that_fit_are_those_that_are_typed(tmp_path):
    """The model has BatchNorm. A card with enough memory uses one micro-batch."""
    words = [*ON_CARDS, "precision=bf16", "ema=0.9", "augment.mixup=0.2"]
    for name, cards, typed in (
        ("little", LITTLE, "auto"),
        ("much", MUCH, "auto"),
        ("one", MUCH, 1),
    ):
        completed = ok(*words, f"accumulate={typed}", f"output={tmp_path / name}", env=cards)
        assert ("BatchNorm" in completed.stdout) == (name == "little")
    actual = pieces(tmp_path / "little")
    assert actual > 1 == pieces(tmp_path / "much")
    ok(*words, f"accumulate={actual}", f"output={tmp_path / 'typed'}", env=MUCH)
    assert_same(tmp_path / "little", tmp_path / "typed")
    assert_same(tmp_path / "much", tmp_path / "one")
    fewer = trainer(*words, f"accumulate={actual // 2}", f"output={tmp_path / 'fewer'}", env=LITTLE)
    peak = max(result(tmp_path / "fewer")["peak_memory_bytes"].values(), default=0)
    assert fewer.returncode == 6 or peak > 0.85 * int(LITTLE["TRAINER_TEST_MEMORY"]), (
        "fewer would have fitted"
    )


@pytest.mark.parametrize("words", ["accumulate=2", "accumulate=auto recompute=auto"])
def test_a_run_is_resolved_once_and_its_model_is_built_once(words, tmp_path):
    plugin = ["plugin=tests.training.counted_builds", "mode=single", "model.name=counted"]
    builds = tmp_path / "builds"
    output = f"output={tmp_path / 'run'}"
    known = [*WORDS, "data.image_size=8", *plugin, *words.split(), "max_steps=1"]
    ok(*latest(*known), output, env={"TRAINER_TEST_BUILDS": str(builds)})
    assert builds.read_text().split() == ["resolved", "built"]


@pytest.mark.slow
@pytest.mark.parametrize(("cards", "runs"), [(MUCH, 1), (LITTLE, 2)])
def test_a_probe_is_built_first_and_trains_if_one_piece_fits(cards, runs, tmp_path):
    plugin = "plugin=tests.training.counted_builds_on_cards"
    words = [*CARDS, plugin, "model.name=counted", "accumulate=auto"]
    env = {**cards, "TRAINER_TEST_BUILDS": str(tmp_path / "builds")}
    ok(*words, f"output={tmp_path / 'run'}", env=env)
    assert (tmp_path / "builds").read_text().split() == runs * ["resolved", "built"]


def test_a_resolved_configuration_is_frozen():
    recipe = load(None, "mode=single")
    resolved = Resolved(recipe, *[None] * 11, recomputed=None, tuned={})
    with pytest.raises(FrozenInstanceError):
        resolved.recipe = recipe


def test_recompute_auto_stays_as_it_was_when_pieces_were_tried(monkeypatch):
    """For smaller pieces it might choose fewer blocks, with which nothing was tried."""
    recipe = load(None, "mode=single", "recompute=auto", "accumulate=auto")
    chosen = []
    loader = SimpleNamespace(close=lambda: None)

    def choose(opened):
        chosen.append(opened.recipe.accumulate)
        return opened.recipe.replace(recompute=True), 3

    def build(resolved):
        strategy = SimpleNamespace(tuned={}, close=lambda: None)
        return SimpleNamespace(resolved=resolved, strategy=strategy, loader=loader)

    monkeypatch.setattr(choosing, "choose_recompute", choose)
    monkeypatch.setattr(choosing, "_recall_number", lambda *_: None)
    monkeypatch.setattr(choosing, "list_possible_numbers", lambda opened: [1, 2])
    monkeypatch.setattr(choosing, "_find_smallest_that_fits", lambda run, numbers: 2)
    world = SimpleNamespace(local_devices=[], size=1, broadcast_object=lambda value: value)
    resolved = choosing.resolve_and_build(opened(recipe, world), build).resolved
    assert chosen == ["auto"] and resolved.recomputed == 3
    assert resolved.recipe.recompute is True and resolved.recipe.accumulate == 2


def opened(recipe, world, share=None, tuned=()):
    tracker = SimpleNamespace(
        folder=SimpleNamespace(read=lambda name, say: dict(tuned)),
        journal=SimpleNamespace(last_end=None),
        say=print,
    )
    return Opened(recipe, None, None, world, share, 1, tracker, None, {}, False, False, None)


@pytest.mark.slow
def test_the_pass_of_a_teacher_counts(tmp_path):
    """The pass of the teacher may need more memory than that of the student."""
    words = [*CARDS, "plugin=tests.training.wide_teacher"]
    ok(*words, "model.name=wide", f"output={tmp_path / 'teacher'}", env=MUCH)
    collected = []
    for more in ([], [f"distill.teacher={tmp_path / 'teacher'}"]):
        output = f"output={tmp_path / str(len(more))}"
        ok(*words, "model.name=linear", "accumulate=auto", *more, output, env=LITTLE)
        assert causes(tmp_path / str(len(more))) == ["completed"]
        collected.append(pieces(tmp_path / str(len(more))))
    assert collected[0] == 1 < collected[1]


@pytest.mark.slow
def test_a_run_that_meets_out_of_memory_goes_on_from_its_last_step(tmp_path):
    """The run equals one that was killed after that step and resumed with the same number of
    micro-batches, with dropout and BatchNorm.
    """
    completed = ok(
        *SHORT,
        "mode=single",
        "accumulate=auto",
        f"output={tmp_path / 'auto'}",
        env={"FAULTY_AFTER": "6"},
    )
    assert re.search(r"memory\D+6\D+6\D+2\D", completed.stdout)
    assert pieces(tmp_path / "auto") == 2 and result(tmp_path / "auto")["steps"] == 8
    first, last = causes(tmp_path / "auto")
    assert "memory" in first and last == "completed"
    words = [*SHORT, "mode=single", "save.every_steps=6", f"output={tmp_path / 'killed'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:7", "FAULTY_ROWS": "99"}).returncode != 0
    ok(*words, "resume=auto", "accumulate=2")
    assert_same(tmp_path / "auto", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize(("after", "code"), [(6, 0), (2, 6)])
def test_out_of_memory_in_the_optimizer_resumes_from_a_checkpoint_or_ends(after, code, tmp_path):
    words = [*SHORT, "mode=single", "accumulate=auto", f"output={tmp_path / 'run'}"]
    completed = trainer(*words, env={"FAULTY_AFTER": str(after), "FAULTY_IN": "step"})
    assert completed.returncode == code, completed.stderr
    if code:
        again = [f"recipe={tmp_path / 'run'}", words[-1], "resume=auto"]
        assert " ".join(again) in completed.stderr
        ok(*again, "plugin=tests.training.short_of_memory")
    else:
        # Step 6 has changed the weights, so the run cannot resume from step 5.
        assert re.search(r"memory\D+5\D+2\D", completed.stdout)
        assert re.search(r"resuming\D+4\D+8\b", completed.stdout)
    assert pieces(tmp_path / "run") == 2
    assert checkpoint.load_newest(tmp_path / "run", print).state.position.step == 8


@pytest.mark.slow
def test_once_a_minute_at_most(tmp_path):
    env = {"FAULTY_AFTER": "2", "FAULTY_ROWS": "4"}
    completed = trainer(
        *SHORT, "mode=single", "accumulate=auto", f"output={tmp_path / 'run'}", env=env
    )
    assert completed.returncode == 6
    assert len(re.findall(r"memory\D+2\D+2\D+2\D", completed.stdout)) == 1
    assert f"{SMALLER}, 4" in completed.stderr
    ok(
        *SHORT,
        "mode=single",
        "accumulate=auto",
        "resume=auto",
        f"output={tmp_path / 'run'}",
        env=env,
    )
    assert pieces(tmp_path / "run") == 4


# Each step uses all images, over all workers.
EVERY = latest(*SHORT, "data.samples=16", "epochs=8", "model.name=short_plain", "ema=0.9")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run = tmp_path_factory.mktemp("single") / "run"
    ok(*EVERY, "mode=single", f"output={run}", env={"FAULTY_ROWS": "99"})
    return run


@pytest.mark.full(cases=["fsdp"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["ddp", "fsdp", "local_sgd local_sgd.every=1 local_sgd.outer_momentum=0"]
)
def test_if_one_rank_runs_out_of_memory_all_resume_from_their_checkpoint(mode, single, tmp_path):
    """All ranks use twice as many micro-batches.

    The result equals that of one device with enough memory.
    """
    words = [*EVERY, *f"mode={mode}".split(), "nproc=2", "save.every_steps=2"]
    run = tmp_path / "run"
    env = {"FAULTY_RANK": "1", "FAULTY_AFTER": "5", "FAULTY_ROWS": "4"}
    completed = ok(*words, "accumulate=auto", f"output={run}", env=env)
    first, last = causes(run)
    assert "memory" in first and last == "completed"
    assert re.search(r"resuming\D+[1-5]\D+8\b", completed.stdout)
    assert pieces(run) == 2 and result(run)["steps"] == 8
    assert losses(run) == pytest.approx(losses(single), rel=FP32)
    assert max(distances(tensors(run), tensors(single)).values()) < FP32


@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "1.5", "many", "[2]", "true", "null", "''", "1e400", "Auto"]
)
def test_other_values_are_refused(value, tmp_path):
    (tmp_path / "file.yaml").write_text(f"accumulate: {value}\n")
    for source, words in ((None, [f"accumulate={value}"]), (tmp_path / "file.yaml", [])):
        with pytest.raises(RecipeError, match=r"accumulate.*\bauto\b.*\b8\b"):
            load(source, *words)


def test_a_pipeline_has_micro_batches():
    for words in (["mode=pipeline"], ["mode=pipeline", "pipeline.schedule=gpipe"]):
        with pytest.raises(RecipeError, match=r"use pipeline.microbatches=auto"):
            check_processes(load(None, *words, "accumulate=auto"), 1 + len(words[1:]))


@pytest.mark.parametrize(
    ("words", "count", "numbers"),
    [
        (["mode=ddp", "batch_size=24"], 2, [1, 2, 3, 4, 6, 8, 12]),
        (["mode=local_sgd", "batch_size=24"], 2, [1, 2, 3, 4, 6, 12]),
        (["mode=ddp", "batch_size=24"], 5, [1, 2, 3, 4]),
        (["mode=single", "batch_size=12", "augment.mixup=0.2"], 1, [1, 2, 3, 6]),
        (["mode=single", "batch_size=7"], 1, [1, 7]),
    ],
)
def test_numbers_that_divide_the_batch_and_its_shares(words, count, numbers):
    assert list_micro_batch_counts(load(None, *words, "accumulate=auto"), count) == numbers


def settled(words, monkeypatch, tuned=()):
    """Return the run of rank 1 whose card has memory for 8 images, with the numbers of each pass
    that is tried.
    """
    tried = []
    cpu = torch.device("cpu")
    world = SimpleNamespace(
        local_devices=[cpu],
        size=2,
        device=torch.device("cuda"),
        broadcast_object=lambda value: value,
    )
    share = DataShare(1, 2, numbers=fixed_shares(load(None, *words)))

    def build(resolved):
        strategy = SimpleNamespace(tuned=dict(resolved.tuned), share=share, close=lambda: None)
        return SimpleNamespace(
            recipe=resolved.recipe,
            resolved=resolved,
            strategy=strategy,
            loader=SimpleNamespace(close=lambda: None),
            observer=SimpleNamespace(model=SimpleNamespace(batch_norm=False)),
        )

    monkeypatch.setattr(choosing, "list_possible_numbers", lambda resolved: [1, 2, 4])
    monkeypatch.setattr(
        choosing, "_measure_load", lambda run, rows, passes: tried.append(rows) or rows / 8
    )
    start = opened(load(None, *words), world, share, tuned)
    return choosing.resolve_and_build(start, build), tried


@pytest.mark.slow
def test_a_number_is_kept_for_the_same_activations_and_shares(monkeypatch):
    words = ["mode=ddp", "batch_size=32", "accumulate=auto"]
    run, _ = settled([*words, "recompute=true"], monkeypatch)
    assert settled([*words, "recompute=true"], monkeypatch, run.strategy.tuned)[1] == []
    for other in (["recompute=false"], ["recompute=true", "shares=[1,3]"]):
        assert (
            settled(
                [*words, *other],
                monkeypatch,
                run.strategy.tuned,
            )[1]
            != []
        )


def test_each_rank_tries_its_own_share(monkeypatch):
    run, tried = settled(
        ["mode=ddp", "batch_size=32", "accumulate=auto", "shares=[3,1]"], monkeypatch
    )
    assert tried == [2, 4, 8] and run.recipe.pieces == 1


@pytest.mark.slow
def test_a_card_too_small_for_one_image_gets_no_suggestion_of_micro_batches(tmp_path):
    completed = trainer(*ON_CARDS, "accumulate=auto", env=TINY)
    assert completed.returncode == 6
    assert "weights, gradients" in completed.stderr
    assert "accumulate=" not in completed.stderr


@pytest.mark.parametrize(("batch_norm", "found"), [(False, 13), (True, None)])
def test_a_batch_with_few_divisors_is_computed_image_by_image_or_gets_a_suggested_size(
    batch_norm, found, monkeypatch
):
    """A single image has no statistics; without BatchNorm single images are the last resort."""
    tried = []
    model = SimpleNamespace(batch_norm=batch_norm)
    recipe = load(None, "mode=single", "batch_size=13", "accumulate=auto")
    run = SimpleNamespace(
        recipe=recipe, strategy=SimpleNamespace(share=DataShare()), resolved=None, state=None
    )
    run.observer = SimpleNamespace(model=model)
    monkeypatch.setattr(
        choosing, "_measure_load", lambda run, rows, passes: tried.append(rows) or rows / 8
    )
    monkeypatch.setattr(choosing, "describe_needs", lambda *_: "what to type")
    if found is None:
        with pytest.raises(DeviceMemoryError):
            choosing._find_smallest_that_fits(run, [1, 13])
    else:
        assert choosing._find_smallest_that_fits(run, [1, 13]) == found and tried[0] == 1


@pytest.mark.slow
def test_a_prime_batch_that_does_not_fit_gets_a_suggestion_that_does(tmp_path):
    words = [*ON_CARDS, "accumulate=auto"]
    completed = trainer(*latest(*words, "batch_size=17"), env=LITTLE)
    message = suggested(completed.stderr.replace(" or ", " or type "))
    assert completed.returncode == 6 and "batch_size=16" in message, completed.stderr
    ok(*words, f"output={tmp_path}/run", env=LITTLE)


# Models with state that each pass changes, besides BatchNorm's statistics.
STATE = """
import torch
from torch import nn
from tests.modes.odd_models import Plain
from trainer import register_model

class Spectral(Plain):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.b)

class Counted(Plain):
    def __init__(self):
        super().__init__()
        self.count = 0
    def between(self, x):
        self.count += self.training
        return x * (1 + self.count / 10)

class Normal(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
    def between(self, x):
        return self.norm(x)

class Decayed(Plain):
    "Scales its weights in each pass, unseen by autograd."
    def body(self, x):
        self.b.weight.data.mul_(0.9 if self.training else 1)
        return super().body(x)

class Permuted(Plain):
    "Changes nothing but the order of its weights."
    def body(self, x):
        self.b.weight.data.copy_(self.b.weight.data.roll(1, 0))
        return super().body(x)

class Unit(Plain):
    "Normalises its weights in place: a second pass changes them by rounding alone."
    def body(self, x):
        self.b.weight.data.div_(self.b.weight.data.norm())
        self.c.weight.data.clamp_(-0.1, 0.1)
        return super().body(x)

class Cooling(Plain):
    def __init__(self):
        super().__init__()
        self.heat = 2.0
    def between(self, x):
        self.heat *= 0.99
        return x * self.heat

class Moving(Plain):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(16, dtype=torch.bfloat16)
    def between(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).bfloat16()
        return x - self.mean

class Unsaved(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(16), persistent=False)
    def between(self, x):
        self.total += 0.01
        return x - self.total

class Epochs(Plain):
    def __init__(self):
        super().__init__()
        self.epoch = 0
    def train(self, mode=True):
        self.epoch += mode
        return super().train(mode)
    def between(self, x):
        return x * (1 + self.epoch / 10)

class Modes(Epochs):
    def train(self, mode=True):
        self.epoch = 2 if mode else 1
        return Plain.train(self, mode)

for kind in (
    Spectral, Counted, Normal, Decayed, Permuted, Unit, Plain,
    Cooling, Moving, Unsaved, Epochs, Modes,
):
    register_model("my_" + kind.__name__)(lambda num_classes, channels, image_size,
        kind=kind: kind())
"""


@pytest.mark.parametrize(
    ("model", "words", "state"),
    [
        ("Spectral", "accumulate=2", "_u"),
        pytest.param("Counted", "accumulate=2", "count", marks=pytest.mark.slow),
        pytest.param("Spectral", "accumulate=2 mode=ddp nproc=2", "_u", marks=pytest.mark.slow),
        pytest.param("Spectral", "accumulate=2 mode=fsdp nproc=2", "_u", marks=pytest.mark.slow),
        ("Normal", "accumulate=2", None),
        ("Decayed", "accumulate=2", "weight b.weight"),
        pytest.param("Permuted", "accumulate=2", "weight b.weight", marks=pytest.mark.slow),
        pytest.param(
            "Decayed", "accumulate=2 mode=ddp nproc=2", "weight b.weight", marks=pytest.mark.slow
        ),
        pytest.param(
            "Decayed",
            "accumulate=2 mode=local_sgd nproc=2",
            "weight b.weight",
            marks=pytest.mark.slow,
        ),
        pytest.param("Plain", "accumulate=2 mode=hogwild nproc=2", None, marks=pytest.mark.slow),
        pytest.param("Unit", "accumulate=2", None, marks=pytest.mark.slow),
        pytest.param("Counted", "accumulate=1", None, marks=pytest.mark.slow),
    ],
)
def test_state_that_each_pass_changes_is_named_where_a_step_has_several(
    model, words, state, tmp_path
):
    (tmp_path / "state.py").write_text(STATE)
    known_names = [
        "recipe=digits",
        "plugin=state",
        f"model.name=my_{model}",
        "mode=single",
        "batch_size=32",
        "max_steps=2",
    ]
    known_names += ["epochs=1", "threads=1", "augment.crop=none", *QUIET]
    completed = ok(
        *latest(*known_names, *words.split()), f"output={tmp_path / 'run'}", cwd=tmp_path
    )
    messages = [
        line for line in (completed.stdout + completed.stderr).splitlines() if "each pass" in line
    ]
    assert [state in line for line in messages] == ([True] if state else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "state"),
    [
        *(
            ("Counted", "count"),
            ("Cooling", "heat"),
            ("Moving", "mean"),
            ("Unsaved", "total"),
            ("Epochs", "epoch"),
        ),
        *(("Spectral", None), ("Normal", None), ("Modes", None)),
    ],
)
def test_state_that_no_checkpoint_has_is_named_in_a_resumed_run(model, state, tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    words = [
        "recipe=digits",
        "plugin=state",
        f"model.name=my_{model}",
        "mode=single",
        "batch_size=32",
        "epochs=1",
        "threads=1",
        "augment.crop=none",
        "save.every_steps=2",
        "schedule.name=constant",
        *QUIET,
        f"output={tmp_path / 'run'}",
    ]
    ok(*words, "max_steps=4", cwd=tmp_path)
    completed = ok(*words, "max_steps=8", "resume=auto", cwd=tmp_path)
    messages = [
        line
        for line in (completed.stdout + completed.stderr).splitlines()
        if line.startswith("WARNING: each")
    ]
    assert [state in line for line in messages] == ([True] if state else [])
