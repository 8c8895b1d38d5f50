"""accumulate=auto: how many pieces are taken, that finding out changes nothing of the run, going on with more."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.command_line import QUIET, latest, losses, ok, result, suggested, trainer
from tests.modes.test_parity import FP32, distances, tensors
from trainer.data import DataShare
from trainer.errors import DeviceMemoryError, RecipeError
from trainer.recipe import load
from trainer.recipe.checks import check_processes, piece_counts
from trainer.recipe.shares import given
from trainer.saving import checkpoint
from trainer.training import memory_needs as choosing
from trainer.training.state import Resolved

WORDS = ["data.name=synthetic", "data.samples=64", "data.val_samples=24", "data.channels=1", "batch_size=16"]
WORDS += ["epochs=2", "optimizer.lr=0.01", "threads=1", *QUIET]
SHORT = [*WORDS, "data.image_size=8", "plugin=tests.training.short_of_memory", "model.name=short"]
CARDS = [*WORDS, "data.image_size=32", "max_steps=2", "mode=single"]
ON_CARDS = [*CARDS, "plugin=tests.simulated.simcuda.plugin", "model.name=cnn"]
LITTLE, MUCH, TINY = (
    {"TRAINER_TEST_CARDS": "1", "TRAINER_TEST_MEMORY": str(size)} for size in (9 << 20, 1 << 30, 6 << 20)
)


def pieces(folder):
    kept = json.loads((folder / "tuning.json").read_text())["accumulate"]["pieces"]
    assert result(folder)["accumulate"] == kept
    return kept


def assert_same(one, other, steps=None):
    """To the bit: losses, weights, optimizer."""
    assert losses(one)[steps or 0 :] == losses(other)[steps or 0 :]
    for part in ("model", "optimizer"):
        mine, theirs = (checkpoint.newest(folder, print).state.part(part) for folder in (one, other))
        assert mine and all(torch.equal(mine[name].read(), theirs[name].read()) for name in mine), part


@pytest.mark.slow
def test_on_a_card_the_fewest_that_fit_are_those_that_are_typed(tmp_path):
    """With BatchNorm; on a card with room for all it is one piece."""
    words = [*ON_CARDS, "precision=bf16", "ema=0.9", "augment.mixup=0.2"]
    for name, cards, typed in (("little", LITTLE, "auto"), ("much", MUCH, "auto"), ("one", MUCH, 1)):
        done = ok(*words, f"accumulate={typed}", f"output={tmp_path / name}", env=cards)
        assert ("BatchNorm" in done.stdout) == (name == "little")
    found = pieces(tmp_path / "little")
    assert found > 1 == pieces(tmp_path / "much")
    ok(*words, f"accumulate={found}", f"output={tmp_path / 'typed'}", env=MUCH)
    assert_same(tmp_path / "little", tmp_path / "typed")
    assert_same(tmp_path / "much", tmp_path / "one")
    fewer = trainer(*words, f"accumulate={found // 2}", f"output={tmp_path / 'fewer'}", env=LITTLE)
    peak = max(result(tmp_path / "fewer")["peak_memory_bytes"].values(), default=0)
    assert fewer.returncode == 6 or peak > 0.85 * int(LITTLE["TRAINER_TEST_MEMORY"]), "fewer would have fitted"


def test_recompute_auto_stays_as_it_was_when_pieces_were_tried(monkeypatch):
    """For smaller pieces it might choose fewer blocks, with which nothing was tried."""
    given = []

    def build(resolved):
        given.append((resolved.recipe.recompute, resolved.recomputed, resolved.recipe.accumulate))
        resolved = replace(resolved, recipe=resolved.recipe.replace(recompute=True), recomputed=3)
        strategy, loader = SimpleNamespace(tuned={}), SimpleNamespace(close=lambda: None)
        world = SimpleNamespace(drives=[], size=1)
        return SimpleNamespace(resolved=resolved, recipe=resolved.recipe, world=world, strategy=strategy, loader=loader)

    monkeypatch.setattr(choosing, "_number", lambda run, purpose: 2)
    recipe = load(None, "mode=single", "recompute=auto", "accumulate=auto")
    run = choosing.fewest(build, Resolved(recipe, *[None] * 10))
    assert given == [("auto", None, "auto"), (True, 3, 2)] and run.recipe.accumulate == 2


@pytest.mark.slow
def test_the_pass_of_a_teacher_counts(tmp_path):
    """It may need more memory than the student's."""
    words = [*CARDS, "plugin=tests.training.wide_teacher"]
    ok(*words, "model.name=wide", f"output={tmp_path / 'teacher'}", env=MUCH)
    found = []
    for more in ([], [f"distill.teacher={tmp_path / 'teacher'}"]):
        output = f"output={tmp_path / str(len(more))}"
        done = ok(*words, "model.name=linear", "accumulate=auto", *more, output, env=LITTLE)
        assert "out of memory" not in done.stdout
        found.append(pieces(tmp_path / str(len(more))))
    assert found[0] == 1 < found[1]


def test_a_run_that_meets_out_of_memory_goes_on_from_its_last_step(tmp_path):
    """As one that was killed after that step and continued in as many pieces: with dropout and BatchNorm."""
    done = ok(*SHORT, "mode=single", "accumulate=auto", f"output={tmp_path / 'auto'}", env={"FAULTY_AFTER": "6"})
    assert "out of memory after step 6" in done.stdout and "from step 6" in done.stdout
    assert pieces(tmp_path / "auto") == 2 and result(tmp_path / "auto")["steps"] == 8
    assert [end["cause"] for end in result(tmp_path / "auto")["goodput"]["ends"]] == ["out of memory", "completed"]
    words = [*SHORT, "mode=single", "save.every_steps=6", f"output={tmp_path / 'killed'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:7", "FAULTY_ROWS": "99"}).returncode != 0
    ok(*words, "resume=auto", "accumulate=2")
    assert_same(tmp_path / "auto", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize(("after", "code"), [(6, 0), (2, 6)])
def test_in_the_optimizers_step_it_goes_on_from_a_checkpoint_or_ends(after, code, tmp_path):
    words = [*SHORT, "mode=single", "accumulate=auto", f"output={tmp_path / 'run'}"]
    done = trainer(*words, env={"FAULTY_AFTER": str(after), "FAULTY_IN": "step"})
    assert done.returncode == code, done.stderr
    if code:
        again = [f"recipe={tmp_path / 'run'}", words[-1], "resume=auto"]
        assert " ".join(again) in done.stderr
        ok(*again, "plugin=tests.training.short_of_memory")
    else:
        assert "from its newest checkpoint" in done.stdout and "resuming at step 4" in done.stdout
    assert pieces(tmp_path / "run") == 2 and checkpoint.newest(tmp_path / "run", print).state.position.step == 8


@pytest.mark.slow
def test_once_a_minute_at_most(tmp_path):
    env = {"FAULTY_AFTER": "2", "FAULTY_ROWS": "4"}
    done = trainer(*SHORT, "mode=single", "accumulate=auto", f"output={tmp_path / 'run'}", env=env)
    assert done.returncode == 6 and done.stdout.count("out of memory after step") == 1
    assert "the next attempt takes more pieces, 4" in done.stderr
    ok(*SHORT, "mode=single", "accumulate=auto", "resume=auto", f"output={tmp_path / 'run'}", env=env)
    assert pieces(tmp_path / "run") == 4


# All images in each step, also of workers together.
EVERY = latest(*SHORT, "data.samples=16", "epochs=8", "model.name=short_plain", "ema=0.9")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run = tmp_path_factory.mktemp("single") / "run"
    ok(*EVERY, "mode=single", f"output={run}", env={"FAULTY_ROWS": "99"})
    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "local_sgd local_sgd.every=1 local_sgd.outer_momentum=0"])
def test_ranks_of_which_one_runs_out_start_again_from_their_checkpoint(mode, single, tmp_path):
    """In twice as many pieces, all of them; the maths stay those of one device that has room."""
    words, run = [*EVERY, *f"mode={mode}".split(), "nproc=2", "save.every_steps=2"], tmp_path / "run"
    env = {"FAULTY_RANK": "1", "FAULTY_AFTER": "5", "FAULTY_ROWS": "4"}
    done = ok(*words, "accumulate=auto", f"output={run}", env=env)
    assert "starting again, from the newest checkpoint" in done.stderr
    assert pieces(run) == 2 and result(run)["steps"] == 8
    assert losses(run) == pytest.approx(losses(single), rel=FP32)
    assert max(distances(tensors(run), tensors(single)).values()) < FP32


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1.5", "many", "[2]", "true", "null", "''", "1e400", "Auto"])
def test_other_values_are_refused(value, tmp_path):
    (tmp_path / "file.yaml").write_text(f"accumulate: {value}\n")
    for source, words in ((None, [f"accumulate={value}"]), (tmp_path / "file.yaml", [])):
        with pytest.raises(RecipeError, match=r"accumulate.* must be auto or a number"):
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
    assert piece_counts(load(None, *words, "accumulate=auto"), count) == numbers


def settled(words, monkeypatch, tuned=()):
    """The run of rank 1 whose card holds 8 images, and those of each pass that is tried."""
    built, tried = [], []
    cpu = torch.device("cpu")
    world = SimpleNamespace(drives=[cpu], size=2, device=torch.device("cuda"), broadcast_object=lambda value: value)
    share = DataShare(1, 2, numbers=given(load(None, *words)))

    def build(resolved):
        recipe = resolved.recipe
        strategy = SimpleNamespace(tuned=dict(tuned), share=share)
        tracker = SimpleNamespace(journal=SimpleNamespace(last_end=None))
        built.append(SimpleNamespace(recipe=recipe, resolved=resolved, strategy=strategy, world=world, tracker=tracker))
        built[-1].loader = SimpleNamespace(close=lambda: None)
        return built[-1]

    monkeypatch.setattr(choosing, "possible", lambda resolved: [1, 2, 4])
    monkeypatch.setattr(choosing, "_load", lambda run, rows, passes: tried.append(rows) or rows / 8)
    resolved = Resolved(load(None, *words), None, None, world, share, 1, None, None, {}, False, False)
    return choosing.fewest(build, resolved), tried


def test_a_number_is_kept_for_the_same_activations_and_shares(monkeypatch):
    words = ["mode=ddp", "batch_size=32", "accumulate=auto"]
    run, _ = settled([*words, "recompute=true"], monkeypatch)
    assert settled([*words, "recompute=true"], monkeypatch, run.strategy.tuned)[1] == []
    for other in (["recompute=false"], ["recompute=true", "shares=[1,3]"]):
        assert settled([*words, *other], monkeypatch, run.strategy.tuned)[1] != []


def test_each_rank_tries_its_own_share(monkeypatch):
    run, tried = settled(["mode=ddp", "batch_size=32", "accumulate=auto", "shares=[3,1]"], monkeypatch)
    assert tried == [2, 4, 8] and run.recipe.pieces == 1


@pytest.mark.slow
def test_a_card_too_small_for_one_image_is_not_told_to_find_their_number(tmp_path):
    done = trainer(*ON_CARDS, "accumulate=auto", env=TINY)
    assert done.returncode == 6 and "weights, gradients" in done.stderr and "accumulate=" not in done.stderr


@pytest.mark.parametrize(("batch_norm", "found"), [(False, 13), (True, None)])
def test_a_batch_of_few_divisors_is_computed_image_by_image_or_told_another_size(batch_norm, found, monkeypatch):
    """Statistics of one image are none; without BatchNorm single images are the last resort."""
    tried, model = [], SimpleNamespace(batch_norm=batch_norm)
    recipe = load(None, "mode=single", "batch_size=13", "accumulate=auto")
    run = SimpleNamespace(recipe=recipe, strategy=SimpleNamespace(share=DataShare()), resolved=None, state=None)
    run.observer = SimpleNamespace(model=model)
    monkeypatch.setattr(choosing, "_load", lambda run, rows, passes: tried.append(rows) or rows / 8)
    monkeypatch.setattr(choosing, "needs", lambda *_: "what to type")
    if found is None:
        with pytest.raises(DeviceMemoryError):
            choosing._largest_that_fits(run, [1, 13])
    else:
        assert choosing._largest_that_fits(run, [1, 13]) == found and tried[0] == 1


@pytest.mark.slow
def test_a_prime_batch_that_does_not_fit_is_told_one_that_does(tmp_path):
    words = [*ON_CARDS, "accumulate=auto"]
    done = trainer(*latest(*words, "batch_size=17"), env=LITTLE)
    told = suggested(done.stderr.replace(" or ", " or type "))
    assert done.returncode == 6 and "batch_size=16" in told, done.stderr
    ok(*words, f"output={tmp_path}/run", env=LITTLE)
