"""Runs that learn from a teacher: against a plain loop, in every mode, resumed; and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import softmax

import trainer
from tests.command_line import QUIET, environment, latest, losses, ok, result
from tests.command_line import trainer as typed
from tests.data.photo_folders import photo_set
from tests.modes.test_parity import ALONE, EXACT, FP32, SHALLOW, SMALL, assert_same_training, norms
from tests.tasks.test_ground_truth import SEEN, Recording
from tests.training.graphed_runs import differences, launched, replayed
from tests.warm import Popen
from trainer import tasks
from trainer.commands.plan.dataset_facts import dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.forecast import traffic
from trainer.commands.plan.planned_layout import lay_out
from trainer.commands.plan.planned_memory import footprint
from trainer.data import Batch, TensorSpec, open_datasets
from trainer.errors import RecipeError
from trainer.models.zoo import builders
from trainer.modes.pipeline.torch_schedules import SCHEDULES
from trainer.recipe import Recipe, load
from trainer.training.teaching import Teacher, trained_teacher
from trainer.training.trained import Trained

TAUGHT = ["data.mean=[0.3]", "data.std=[0.4]", "augment.hflip=0.5", "augment.mixup=0.4", "loss.label_smoothing=0.1"]
TAUGHT += ["data.samples=640", "epochs=2", *SHALLOW]  # 20 steps; pixels are normalised otherwise than the teacher's
FAST = ("ddp", "streams", "1f1b", "split")
LONG = [f"fsdp {ranks}" for ranks in ("4", "2x2")]
LONG += [schedule for schedule in SCHEDULES if schedule not in (*FAST, "zbv")]  # whose last stage is on the first rank


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """With BatchNorm, which in training would answer otherwise."""
    folder = tmp_path_factory.mktemp("teacher") / "expert"
    ok(*SMALL, "model.name=cnn", "data.samples=320", "epochs=2", "mode=single", f"output={folder}")
    return folder


@pytest.fixture(scope="module")
def single(teacher):
    """mode=single's folder, by the words that are not of all runs."""

    @cache
    def folder(*words):
        path = teacher.parent / f"single-{len(words)}-{abs(hash(words))}"
        ok(*SMALL, *TAUGHT, *words, "mode=single", f"output={path}")
        return path

    return folder


def normalised(folder):
    """Mean and standard deviation of a run's gray images."""
    with safe_open(folder / "last.safetensors", "pt") as file:
        return [float(file.metadata()[key].strip("[]")) for key in ("mean", "std")]


def test_a_plain_loop_has_the_same_losses_and_weights(teacher, tmp_path, monkeypatch):
    """Of the teacher alone: distill.weight=1. It sees what the student sees, shifted, mirrored and mixed."""
    SEEN.clear()
    words = ["mode=single", "data.samples=320", "epochs=2", "data.mean=[0.3]", "data.std=[0.4]", "threads=1"]
    words += ["augment.hflip=0.5", "augment.crop=pad", "augment.erase=0.5", "augment.cutmix=1", "optimizer.lr=0.05"]
    words += ["schedule.name=constant", "optimizer.momentum=0.9", "optimizer.nesterov=false", "ema=null"]
    words += ["optimizer.weight_decay=0", f"distill.teacher={teacher}", "distill.weight=1", "distill.temperature=3"]
    monkeypatch.setitem(builders, "recording", lambda *_: Recording(10, 64))
    changed = latest(*SMALL[1:], *words, "model.name=recording", f"output={tmp_path / 'run'}")
    trainer.train(load("digits", *changed))
    expert, student, found = trainer.load(teacher).model, Recording(10, 64), []
    mean, std = normalised(teacher)
    optimizer = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    for inputs in SEEN[:10]:
        with torch.no_grad():
            shares = softmax(expert((inputs * 0.4 + 0.3 - mean) / std) / 3, 1)
        ours = torch.log_softmax(student.fc(inputs.flatten(1)) / 3, 1)
        loss = 9 * (shares * (shares.log() - ours)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert len(SEEN) == len(losses(tmp_path / "run")) == 10
    assert losses(tmp_path / "run") == pytest.approx(found, rel=1e-4)
    torch.testing.assert_close(load_file(tmp_path / "run" / "last.safetensors")["fc.weight"], student.fc.weight.data)


WAYS = EXACT | ALONE | {"ddp in pieces": [*EXACT["ddp"], "accumulate=2"]}
FULL = pytest.mark.full("targets go through each schedule alike")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[FULL] if way in LONG else [pytest.mark.slow] * (way not in FAST)) for way in WAYS]
)
def test_a_mode_learns_from_a_teacher_as_single_does(way, teacher, single, tmp_path):
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    reference, run = single(*words), tmp_path / "run"
    ok(*SMALL, *TAUGHT, *words, *WAYS[way], f"output={run}")
    assert_same_training(run, reference)


@pytest.fixture(scope="module")
def large(teacher):
    """With several times the weights of the student."""
    folder = teacher.parent / "large"
    ok(*SMALL, "model.name=resnet20", "data.samples=320", "epochs=1", "mode=single", f"output={folder}")
    return folder


SHARDED = {
    "2": EXACT["fsdp"],
    "3": ["mode=fsdp", "nproc=3", "shares=[1,1,1]"],
    "2x2": EXACT["fsdp 2x2"],
    "unequal, in pieces": [*EXACT["fsdp"], "shares=[3,1]", "accumulate=2", "recompute=true", "channels_last=true"],
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=FULL if way in ("2", "3") else pytest.mark.slow) for way in SHARDED]
)
def test_a_large_teacher_is_sharded_as_its_student_is(way, large, single, tmp_path):
    words = ["distill.weight=0.7", "distill.temperature=3"]
    reference, run = single(f"distill.teacher={large}", *words), tmp_path / "run"
    words += ["distill.teacher=large", *SHARDED[way], f"output={run}"]
    assert "in shards: large" in ok(*SMALL, *TAUGHT, *words, cwd=large.parent).stdout
    assert_same_training(run, reference)
    assert load_file(run / "last.safetensors").keys() == load_file(reference / "last.safetensors").keys()


def test_shards_of_a_teacher_are_all_that_a_rank_keeps(tmp_path):
    """And torch keeps no list of its passes, of which no backward pass comes."""
    ranks = (Popen([sys.executable, "-c", ON_A_RANK, str(rank), str(tmp_path)], env=environment()) for rank in (0, 1))
    assert [rank.wait(120) for rank in [*ranks]] == [0, 0]


ON_A_RANK = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainer.errors import RecipeError
from trainer.models.small import SMALL
from trainer.modes.fsdp import _refused, _sharded

dist.init_process_group("gloo", f"file://{sys.argv[2]}/store", rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
model = SMALL["resnet20"](10, 1, 8).eval().requires_grad_(False)
inputs = torch.randn(4, 1, 8, 8)
whole = sum(p.numel() for p in model.parameters())
expected = model(inputs)
answer = _sharded(model, init_device_mesh("cpu", (2,)), lambda reason: _refused("it", reason))
for _ in range(3):
    with torch.no_grad():
        torch.testing.assert_close(answer(inputs), expected)
    here = sum(p.to_local().numel() for p in model.parameters())
    assert 0.45 * whole < here < 0.55 * whole, "no unit stays whole"
state = model._get_fsdp_state()
assert not state._comm_ctx.post_forward_order
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_the_loss_is_a_share_of_each(teacher, single):
    """Without the teacher's share it is the run without a teacher, to the bit, and its first loss is linear in it."""
    words = [[f"distill.teacher={teacher}", f"distill.weight={share}"] for share in ("0", "0.7", "1")]
    plain, none, part, whole = (single(*more, *["distill.temperature=3"] * bool(more)) for more in ([], *words))
    assert losses(none) == losses(plain) and norms(none) == norms(plain)
    first = [losses(folder)[0] for folder in (plain, whole, part)]
    assert first[2] == pytest.approx(0.3 * first[0] + 0.7 * first[1], rel=1e-6) and first[0] != first[1]
    kept, without = (load_file(folder / "last.safetensors") for folder in (part, plain))
    assert kept.keys() == without.keys()


def test_the_gradient_does_not_shrink_with_temperature():
    """Hinton et al., section 2: at a high temperature it is that of half the squared distance of centred logits, over
    the number of classes."""
    task = tasks.create(load(None), list("abcdefg"))
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 7, generator=draws, dtype=torch.float64).requires_grad_()
    taught = torch.randn(5, 7, generator=draws, dtype=torch.float64)
    (found,) = torch.autograd.grad(task.soft_loss(outputs, taught, 1e4), outputs)
    centred = [part - part.mean(1, keepdim=True) for part in (outputs.detach(), taught)]
    torch.testing.assert_close(found, (centred[0] - centred[1]) / 7 / 5, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("more", ["precision=fp16 model.name=mlp accumulate=2", "precision=bf16 augment.mixup=0.2"])
def test_replayed_steps_learn_what_launched_ones_do(more, teacher):
    words = f"distill.teacher={teacher} ema=0.9 clip_grad_norm=1 {more}"
    played = replayed(words)
    assert differences(launched(words), played) == [] and played.said == [] and played.replayed_to_the_end


def test_the_teacher_is_left_as_it_is(teacher):
    """It answers in evaluation mode and its own precision, without gradients; a rank without a loss has none."""
    recipe = load("digits", f"distill.teacher={teacher}", "precision=bf16")
    data = open_datasets(recipe)
    task = tasks.create(recipe, data.classes)
    mine, idle = (Teacher(task, data, torch.device("cpu"), needed) for needed in (True, False))
    batch = data.example(6).zeros(torch.device("cpu"))
    inputs = torch.randn(batch.inputs.shape)
    taught = mine.teach(type(batch)(inputs, batch.targets, 6)).targets
    assert taught.shape == (6, 11) and not taught.requires_grad
    assert not any(p.requires_grad for p in mine._model.parameters())
    assert torch.equal(taught, mine.teach(type(batch)(inputs, batch.targets, 6)).targets), "no statistics change"
    mean, std = normalised(teacher)
    with torch.no_grad():  # in fp32: the student's bf16 would be 1e-3 apart
        wanted = trainer.load(teacher).model((inputs * data.std[0] + data.mean[0] - mean) / std)
    torch.testing.assert_close(taught[:, 1:], wanted, rtol=1e-5, atol=1e-5)
    assert idle.teach(batch) is batch and idle.facts == mine.facts


def test_a_run_goes_on_with_the_same_teacher(teacher, single, tmp_path):
    """Wherever its folder is by then; with other weights it is refused, and without them."""
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    moved, run = tmp_path / "moved", tmp_path / "run"
    common = [*SMALL, *TAUGHT, *words[1:], f"output={run}", "save.every_steps=4"]
    typed(*common, words[0], *EXACT["ddp"], env={"TRAINER_FAULT": "kill@1:11"})
    shutil.copytree(teacher, moved)
    weights = load_file(moved / "last.safetensors")
    again = [*common, *EXACT["split"], "resume=auto"]
    shutil.copy(moved / "last.safetensors", tmp_path / "good.safetensors")
    with safe_open(moved / "last.safetensors", "pt") as file:
        told = file.metadata()
    save_file({**weights, "0.weight": weights["0.weight"] * 1.001}, moved / "last.safetensors", told)
    save_file(weights, tmp_path / "brighter.safetensors", told | {"mean": "[0.9]"})
    for other in (moved, tmp_path / "nowhere", tmp_path / "brighter.safetensors"):
        done = typed(*again, f"distill.teacher={other}")
        assert done.returncode == 4 and done.stderr.count("\n") == 1 and f"={other}" in done.stderr, done.stderr
    changed = typed(*[word for word in again if word != words[1]], "distill.weight=0.6", words[0])
    assert changed.returncode == 2 and "distill.weight" in changed.stderr, changed.stderr
    ok(*again, f"distill.teacher={tmp_path / 'good.safetensors'}")
    assert losses(run) == pytest.approx(losses(single(*words)), rel=FP32)


def test_what_is_given_away_tells_of_no_teacher(teacher, single, tmp_path):
    """And needs none."""
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    folder = shutil.copytree(single(*words), tmp_path / "run")
    for path in (*folder.glob("*.safetensors"), *(folder / "checkpoints").rglob("*")):
        assert path.is_dir() or str(teacher).encode() not in path.read_bytes(), path
    given = tmp_path / "given.safetensors"
    shutil.copy(folder / "last.safetensors", given)
    hidden = teacher.rename(tmp_path / "hidden")
    try:
        ok("evaluate", f"checkpoint={folder}")
        ok("evaluate", f"checkpoint={given}")
        assert trainer.load(given).predict(torch.zeros(1, 8, 8, dtype=torch.uint8)).label in "0123456789"
        ok("export", folder, "format=exported_program", f"output={tmp_path / 'a.pt2'}")
    finally:
        hidden.rename(teacher)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("distill.teacher=nowhere", 4, "distill.teacher=nowhere: 'nowhere' is not there, nor runs/nowhere"),
        ("distill.teacher=empty", 4, "distill.teacher=empty: "),
        ("distill.teacher=alien.safetensors", 4, "distill.teacher=alien.safetensors: "),
        ("distill.weight=0.5", 2, "type distill.teacher=RUN, or distill.weight=null"),
        ("recipe=mine.yaml", 2, "type distill.teacher=RUN, or distill.weight=null"),
        ("distill.teacher={teacher} data.image_size=16", 2, "type data.image_size=8 data.channels=1"),
        ("distill.teacher={teacher} data.channels=3", 2, "type data.image_size=8 data.channels=1"),
        ("distill.teacher={teacher} model.num_classes=12", 2, "knows 10 "),
        ("distill.teacher={teacher} data.name=imagefolder data.root=photos data.image_size=8", 2, "(ant, bee)"),
        ("distill.teacher=resnet18", 2, "it knows 1,000 classes, and this run has 10"),
        ("distill.teacher={teacher} task.name=multilabel", 2, "set distill.teacher=null"),
        ("distill.teacher={teacher} output={teacher}", 8, "choose another output="),
        ("distill.teacher={teacher} output={teacher} resume=auto", 2, "distill.teacher: None there"),
    ],
)
def test_what_cannot_be_is_one_line(words, code, says, teacher, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.yaml").write_text("distill:\n  temperature: 2.0\nextends: digits\n")
    (tmp_path / "alien.safetensors").write_bytes(b"nothing")
    if "photos" in words:
        photo_set(tmp_path / "photos", {"ant": 40, "bee": 40})
    own = words.format(teacher=teacher).split()
    done = typed(*latest(*SMALL, *own, "mode=single", "max_steps=1"), cwd=tmp_path)
    assert done.returncode == code and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


@pytest.mark.parametrize(
    "value", ["weight=-0.1", "weight=1.1", "weight=nan", "weight=much", "temperature=0", "temperature=.inf"]
)
def test_other_numbers_are_refused(value):
    with pytest.raises(RecipeError, match=f"distill.{value.partition('=')[0]}"):
        load("digits", "distill.teacher=one", f"distill.{value}")


def test_published_weights_teach(tmp_path, monkeypatch):
    """torchvision's, of a file that is there: with its own mean."""
    hub = tmp_path / "hub" / "checkpoints"
    hub.mkdir(parents=True)
    theirs, weights = torchvision.models.resnet18(), torchvision.models.ResNet18_Weights.DEFAULT
    torch.save(theirs.state_dict(), hub / weights.url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    recipe = load(None, "distill.teacher=resnet18", "data.name=synthetic", "data.image_size=32")
    data = open_datasets(recipe)
    folders = ("n01440764", *(f"n02{number:06}" for number in range(998)), "n15075141")
    data = dataclasses.replace(data, mean=(0.5,) * 3)

    def of(classes):
        given = dataclasses.replace(data, classes=classes)
        return Teacher(tasks.create(recipe, classes), given, torch.device("cpu"), True)

    words = tuple(sorted(weights.meta["categories"]))
    for classes in (words, folders[::-1]):  # in another order than the teacher's
        with pytest.raises(RecipeError, match=r"knows 1000 \(tench, "):
            of(classes)
    assert "by their order" in of(tuple(map(str, range(1000)))).note
    mine, pixels = of(folders), torch.rand(2, 3, 32, 32)
    parts = (data.mean, data.std, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    mean, std, own, spread = (torch.tensor(part)[:, None, None] for part in parts)
    batch = Batch((pixels - mean) / std, torch.tensor([3, 999]), 2)
    with torch.no_grad():
        wanted = theirs.eval()((pixels - own) / spread)
    taught = mine.teach(batch).targets
    assert "by their order" not in mine.note
    torch.testing.assert_close(taught[:, 1:], wanted, rtol=1e-4, atol=1e-4)
    assert taught[:, 0].tolist() == [3, 999]


def test_a_teacher_that_timm_lacks_is_one_line(monkeypatch):
    timm = SimpleNamespace(is_model=lambda name: False, get_pretrained_cfg=lambda name: None)
    monkeypatch.setitem(sys.modules, "timm", timm)
    spec = TensorSpec((3, 64, 64), torch.float32)
    with pytest.raises(RecipeError, match=r"^distill.teacher=timm:resnt10t: .* is not a model of timm"):
        trained_teacher(load(None, "distill.teacher=timm:resnt10t"), spec, 1000)


def test_a_published_teacher_reads_the_images_of_the_run():
    """Higher than wide too; and one of other images says which."""
    spec = TensorSpec((3, 48, 32), torch.float32)
    recipe = load(None, "distill.teacher=resnet18")
    assert trained_teacher(recipe, spec, 1000, starting=False).facts.spec == spec
    data = open_datasets(load(None, "data.name=synthetic", "data.image_size=32"))
    mine = SimpleNamespace(recipe=recipe, _task=tasks.create(recipe, data.classes), _outputs=10)
    own = Recipe().replace(data={"name": "synthetic"})
    told = {key: json.dumps(value) for key, value in {"channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3}.items()}
    theirs = Trained(Path(), {}, told | {"image_size": "[48,32]"}, own, own)
    with pytest.raises(RecipeError, match=r"type data.image_size=\[48,32\] data.channels=3"):
        Teacher._check(mine, theirs, data.classes, data)


def test_a_plan_has_shards_of_a_large_one(large, teacher):
    """As training decides, at the same size."""
    size = sum(t.nbytes for t in load_file(large / "last.safetensors").values())
    for name, share in {"cnn_gn": size / 2, "resnet20": size}.items():
        chosen = load("digits", f"distill.teacher={large}", "batch_size=64", "mode=fsdp", f"model.name={name}")
        fake, layout = FakeModel(chosen, dataset_facts(chosen), "cpu"), lay_out(chosen, 2)
        assert [device.teacher for device in footprint(fake, layout)] == [share] * 2
        plain = FakeModel(chosen.replace(distill={}), dataset_facts(chosen), "cpu")
        more = traffic(fake, layout, None).reduced - traffic(plain, layout, None).reduced
        assert more == (size / 2 if share < size else 0)


def test_a_plan_counts_it_where_it_is(teacher):
    """Of pipelines over processes the last stage has it, and reads the images too."""
    recipe = load("digits", f"distill.teacher={teacher}", "batch_size=64")
    size = sum(t.nbytes for t in load_file(teacher / "last.safetensors").values())
    for words, holders in {"mode=ddp": [1, 1], "mode=split": [1, 0], "mode=pipeline": [0, 1], "mode=dp": [1]}.items():
        chosen, count = load(recipe, words), len(holders) if words in ("mode=ddp", "mode=pipeline") else 1
        fake, without = (FakeModel(each, dataset_facts(each), "cpu") for each in (chosen, load("digits", words)))
        layout = lay_out(chosen, count)
        found, plain = footprint(fake, layout), footprint(without, layout)
        assert [device.teacher for device in found] == [size * one for one in holders], words
        more = [new.peak - old.peak - (new.images - old.images) for new, old in zip(found, plain, strict=True)]
        assert more == [device.teacher for device in found]


@pytest.mark.slow
def test_photos_that_two_ranks_read_are_counted_once(tmp_path):
    photos = photo_set(tmp_path / "photos", {"ant": 12, "bee": 12}, split=True)
    (photos / "train" / "ant" / "3.jpg").write_bytes(b"broken")
    words = ["mode=single", "model.name=cnn_gn", "data.name=imagefolder", f"data.root={photos}", "data.image_size=16"]
    words += ["batch_size=8", "epochs=2", "data.on_error=skip", "data.check=off", "data.workers=0", *QUIET]
    ok(*words, f"output={tmp_path / 'expert'}")
    words += [f"distill.teacher={tmp_path / 'expert'}", "data.mean=[0.4,0.5,0.6]"]
    ok(*words, f"output={tmp_path / 'one'}")
    ok(*words[1:], *EXACT["1f1b"], f"output={tmp_path / 'two'}")
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["data"]["skipped"] == two["data"]["skipped"] > 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
