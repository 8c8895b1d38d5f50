"""Runs that learn from a teacher: against a plain loop, in every mode, resumed; and what is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
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
from tests.commands.plan.plans import create_fake_model
from tests.data.photo_folders import photo_set
from tests.models.families import SEEN, Recording
from tests.modes.ways import ALONE, EXACT, FP32, SHALLOW, SMALL, assert_same_training, norms
from tests.training.graphed_runs import differences, launched, replayed
from tests.warm import Popen
from trainer import tasks
from trainer.commands.plan.forecast import compute_traffic
from trainer.commands.plan.planned_layout import lay_out
from trainer.data import Batch, TensorSpec, open_datasets
from trainer.errors import CheckpointError, RecipeError
from trainer.memory.prediction import footprint
from trainer.models.zoo import builders
from trainer.modes.pipeline.torch_schedules import SCHEDULES
from trainer.recipe import Recipe, load
from trainer.training.teaching import Teacher, load_teacher
from trainer.training.trained import Trained

TAUGHT = [
    "data.mean=[0.3]",
    "data.std=[0.4]",
    "augment.hflip=0.5",
    "augment.mixup=0.4",
    "loss.label_smoothing=0.1",
]
# 20 steps; pixels are normalised otherwise than the teacher's.
TAUGHT += [
    "data.samples=640",
    "epochs=2",
    *SHALLOW,
]
FAST = ("ddp", "1f1b", "split")
LONG = [f"fsdp {ranks}" for ranks in ("4", "2x2")]
# The last stage is on the first rank.
LONG += [schedule for schedule in SCHEDULES if schedule not in (*FAST, "zbv")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Train a teacher with BatchNorm, whose answers differ in training mode."""
    folder = tmp_path_factory.mktemp("teacher") / "expert"
    ok(*SMALL, "model.name=cnn", "data.samples=320", "epochs=2", "mode=single", f"output={folder}")
    return folder


@pytest.fixture(scope="module")
def single(teacher):
    """Return the folder of a mode=single run by its additional arguments."""

    @cache
    def folder(*words):
        path = teacher.parent / f"single-{len(words)}-{abs(hash(words))}"
        ok(
            *latest(*SMALL, *TAUGHT, *words),
            "mode=single",
            f"output={path}",
            cwd=teacher.parent,
        )
        return path

    return folder


SMOOTH = """
from torch import nn
from trainer import register_model
from trainer.models.small import SMALL

INSTEAD = {nn.ReLU: nn.GELU, nn.MaxPool2d: lambda: nn.AvgPool2d(2)}

@register_model("smooth")
def smooth(*sizes):
    return nn.Sequential(*(INSTEAD.get(type(layer),
        lambda: layer)() for layer in SMALL["cnn_gn"](*sizes)))
"""


def normalised(folder):
    """Mean and standard deviation of a run's gray images."""
    with safe_open(folder / "last.safetensors", "pt") as file:
        return [float(file.metadata()[key].strip("[]")) for key in ("mean", "std")]


@pytest.mark.slow
def test_a_plain_loop_has_the_same_losses_and_weights(teacher, tmp_path, monkeypatch):
    """The teacher alone counts, by distill.weight=1.

    Its inputs are those of the student: shifted, mirrored and mixed.
    """
    SEEN.clear()
    words = [
        "mode=single",
        "data.samples=320",
        "epochs=2",
        "data.mean=[0.3]",
        "data.std=[0.4]",
        "threads=1",
        "augment.hflip=0.5",
        "augment.crop=pad",
        "augment.erase=0.5",
        "augment.cutmix=1",
        "optimizer.lr=0.05",
        "schedule.name=constant",
        "optimizer.momentum=0.9",
        "optimizer.nesterov=false",
        "ema=null",
        "optimizer.weight_decay=0",
        f"distill.teacher={teacher}",
        "distill.weight=1",
        "distill.temperature=3",
    ]
    monkeypatch.setitem(builders, "recording", lambda *_: Recording(10, 64))
    changed = latest(*SMALL[1:], *words, "model.name=recording", f"output={tmp_path / 'run'}")
    trainer.train(load("digits", *changed))
    expert = trainer.load(teacher, "last").model
    student = Recording(10, 64)
    collected = []
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
        collected.append(loss.item())
    assert len(SEEN) == len(losses(tmp_path / "run")) == 10
    assert losses(tmp_path / "run") == pytest.approx(collected, rel=1e-4)
    torch.testing.assert_close(
        load_file(tmp_path / "run" / "last.safetensors")["fc.weight"], student.fc.weight.data
    )


WAYS = EXACT | ALONE | {"ddp in pieces": [*EXACT["ddp"], "accumulate=2"]}
FULL = pytest.mark.full("targets go through each schedule alike")


@pytest.mark.full(but=["ddp", "ddp in pieces"])
@pytest.mark.slow(cases=["split", "1f1b"])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[FULL] if way in LONG else [pytest.mark.slow] * (way not in FAST))
        for way in WAYS
    ],
)
def test_a_mode_learns_from_a_teacher_as_single_does(way, teacher, single, tmp_path):
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    reference = single(*words)
    run = tmp_path / "run"
    ok(*SMALL, *TAUGHT, *words, *WAYS[way], f"output={run}")
    assert_same_training(run, reference)


@pytest.fixture(scope="module")
def large(teacher):
    """Train a teacher with several times the weights of the student."""
    folder = teacher.parent / "large"
    ok(
        *SMALL,
        "model.name=resnet20",
        "data.samples=320",
        "epochs=1",
        "mode=single",
        f"output={folder}",
    )
    return folder


SHARDED = {
    "2": EXACT["fsdp"],
    "3": ["mode=fsdp", "nproc=3", "shares=[1,1,1]"],
    "2x2": EXACT["fsdp 2x2"],
    "unequal, in pieces": [
        *EXACT["fsdp"],
        "shares=[3,1]",
        "accumulate=2",
        "recompute=true",
        "channels_last=true",
    ],
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=FULL if way in ("2", "3") else pytest.mark.slow) for way in SHARDED],
)
def test_a_large_teacher_is_sharded_as_its_student_is(way, large, single, tmp_path):
    words = ["distill.weight=0.7", "distill.temperature=3"]
    if way.startswith("unequal"):
        # Sums of unequal shares have another order. In a student with ReLU, an activation was
        # -7.5e-8 in step 15 with one order and above zero with the other, which changed a norm by
        # 4e-5 and AdamW's state by 2e-4. The difference without kinks is 1e-6, and in float64 the
        # weights differ by 4e-16.
        (large.parent / "smooth.py").write_text(SMOOTH)
        words += ["plugin=smooth", "model.name=smooth"]
    reference = single(f"distill.teacher={large}", *words)
    run = tmp_path / "run"
    words += ["distill.teacher=large", *SHARDED[way], f"output={run}"]
    assert "in shards: large" in ok(*latest(*SMALL, *TAUGHT, *words), cwd=large.parent).stdout
    assert_same_training(run, reference)
    assert (
        load_file(run / "last.safetensors").keys()
        == load_file(reference / "last.safetensors").keys()
    )


def test_shards_of_a_teacher_are_all_that_a_rank_keeps(tmp_path):
    """torch keeps no list of its forward passes, because they have no backward passes."""
    ranks = (
        Popen(
            [
                sys.executable,
                "-c",
                ON_A_RANK,
                str(rank),
                str(tmp_path),
            ],
            env=environment(),
        )
        for rank in (0, 1)
    )
    assert [rank.wait(120) for rank in [*ranks]] == [0, 0]


ON_A_RANK = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainer.errors import CheckpointError, RecipeError
from trainer.models.small import SMALL
from trainer.modes.fsdp import refuse_sharding, shard_teacher

dist.init_process_group("gloo", f"file://{sys.argv[2]}/store", rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
model = SMALL["resnet20"](10, 1, 8).eval().requires_grad_(False)
inputs = torch.randn(4, 1, 8, 8)
whole = sum(p.numel() for p in model.parameters())
expected = model(inputs)
mesh = init_device_mesh("cpu", (2,))
answer = shard_teacher(model, mesh, lambda reason: refuse_sharding("it", reason))
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


@pytest.mark.slow
def test_the_loss_is_a_share_of_each(teacher, single):
    """A share of zero equals, to the bit, the run without a teacher.

    The first loss is linear in the share.
    """
    words = [
        [f"distill.teacher={teacher}", f"distill.weight={share}"] for share in ("0", "0.7", "1")
    ]
    plain, none, part, whole = (
        single(*more, *["distill.temperature=3"] * bool(more)) for more in ([], *words)
    )
    assert losses(none) == losses(plain) and norms(none) == norms(plain)
    first = [losses(folder)[0] for folder in (plain, whole, part)]
    assert first[2] == pytest.approx(0.3 * first[0] + 0.7 * first[1], rel=1e-6)
    assert first[0] != first[1]
    kept, without = (load_file(folder / "last.safetensors") for folder in (part, plain))
    assert kept.keys() == without.keys()


def test_the_gradient_does_not_shrink_with_temperature():
    """Hinton et al., section 2: at a high temperature it is that of half the squared distance of
    centred logits, over the number of classes."""
    task = tasks.create_task(load(None), list("abcdefg"))
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 7, generator=draws, dtype=torch.float64).requires_grad_()
    taught = torch.randn(5, 7, generator=draws, dtype=torch.float64)
    (actual,) = torch.autograd.grad(task.soft_loss(outputs, taught, 1e4), outputs)
    centred = [part - part.mean(1, keepdim=True) for part in (outputs.detach(), taught)]
    torch.testing.assert_close(
        actual,
        (centred[0] - centred[1]) / 7 / 5,
        rtol=1e-3,
        atol=1e-6,
    )


@pytest.mark.slow(cases=["precision=bf16 augment.mixup=0.2"])
@pytest.mark.parametrize(
    "more", ["precision=fp16 model.name=mlp accumulate=2", "precision=bf16 augment.mixup=0.2"]
)
def test_replayed_steps_learn_what_launched_ones_do(more, teacher):
    words = f"distill.teacher={teacher} ema=0.9 clip_grad_norm=1 {more}"
    played = replayed(words)
    assert differences(launched(words), played) == []
    assert played.said == []
    assert played.replayed_to_the_end


def test_the_teacher_is_left_as_it_is(teacher):
    """The teacher answers in evaluation mode and its own precision, without gradients.

    A rank without a loss has no teacher.
    """
    recipe = load("digits", f"distill.teacher={teacher}", "precision=bf16")
    data = open_datasets(recipe)
    task = tasks.create_task(recipe, data.classes)
    own, idle = (
        Teacher(
            task,
            data,
            torch.device("cpu"),
            needed,
        )
        for needed in (True, False)
    )
    batch = data.example(6).batch(torch.device("cpu"))
    inputs = torch.randn(batch.inputs.shape)
    taught = own.teach(type(batch)(inputs, batch.targets, 6)).targets
    assert taught.shape == (6, 11) and not taught.requires_grad
    assert not any(p.requires_grad for p in own._model.parameters())
    assert torch.equal(taught, own.teach(type(batch)(inputs, batch.targets, 6)).targets), (
        "no statistics change"
    )
    mean, std = normalised(teacher)
    # The teacher computes in fp32, because the student's bf16 would be 1e-3 apart.
    with torch.no_grad():
        expected = trainer.load(teacher, "last").model(
            (inputs * data.std[0] + data.mean[0] - mean) / std
        )
    torch.testing.assert_close(taught[:, 1:], expected, rtol=1e-5, atol=1e-5)
    assert idle.teach(batch) is batch and idle.facts == own.facts


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_teacher(teacher, single, tmp_path):
    """Wherever its folder is by then; with other weights it is refused, and without them."""
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    moved = tmp_path / "moved"
    run = tmp_path / "run"
    common = [*SMALL, *TAUGHT, *words[1:], f"output={run}", "save.every_steps=4"]
    typed(*common, words[0], "mode=single", env={"TRAINER_FAULT": "kill@0:11"})
    shutil.copytree(teacher, moved)
    weights = load_file(moved / "last.safetensors")
    again = [*common, *EXACT["split"], "resume=auto"]
    shutil.copy(moved / "last.safetensors", tmp_path / "good.safetensors")
    with safe_open(moved / "last.safetensors", "pt") as file:
        weights_metadata = file.metadata()
    save_file(
        {**weights, "0.weight": weights["0.weight"] * 1.001},
        moved / "last.safetensors",
        weights_metadata,
    )
    save_file(weights, tmp_path / "brighter.safetensors", weights_metadata | {"mean": "[0.9]"})
    for other in (moved, tmp_path / "nowhere", tmp_path / "brighter.safetensors"):
        with pytest.raises(CheckpointError, match=re.escape(f"={other}")) as refused:
            trainer.train(load("digits", *again[1:], f"distill.teacher={other}"))
        assert "\n" not in str(refused.value)
    changed = [word for word in again if word != words[1]]
    with pytest.raises(RecipeError, match=r"distill\.weight"):
        trainer.train(load("digits", *changed[1:], "distill.weight=0.6", words[0]))
    ok(*again, f"distill.teacher={tmp_path / 'good.safetensors'}")
    assert losses(run) == pytest.approx(losses(single(*words)), rel=FP32)


@pytest.mark.slow
def test_exported_files_do_not_mention_the_teacher(teacher, single, tmp_path):
    """The files do not need the teacher, either."""
    words = [f"distill.teacher={teacher}", "distill.weight=0.7", "distill.temperature=3"]
    folder = shutil.copytree(single(*words), tmp_path / "run")
    for path in (*folder.glob("*.safetensors"), *(folder / "checkpoints").rglob("*")):
        assert path.is_dir() or str(teacher).encode() not in path.read_bytes(), path
    arguments = tmp_path / "given.safetensors"
    shutil.copy(folder / "last.safetensors", arguments)
    hidden = teacher.rename(tmp_path / "hidden")
    try:
        ok("evaluate", f"checkpoint={folder}")
        ok("evaluate", f"checkpoint={arguments}")
        assert (
            trainer.load(arguments).predict(torch.zeros(1, 8, 8, dtype=torch.uint8)).label
            in "0123456789"
        )
        ok("export", folder, "format=exported_program", f"output={tmp_path / 'a.pt2'}")
    finally:
        hidden.rename(teacher)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (
            "distill.teacher=nowhere",
            4,
            r"distill\.teacher=nowhere: 'nowhere' .*\bruns/nowhere\b",
        ),
        ("distill.teacher=empty", 4, r"distill\.teacher=empty: "),
        ("distill.teacher=alien.safetensors", 4, r"distill\.teacher=alien\.safetensors: "),
        (
            "distill.teacher={teacher} data.image_size=16",
            2,
            r"type data\.image_size=8 data\.channels=1\b",
        ),
        (
            "distill.teacher={teacher} data.channels=3",
            2,
            r"type data\.image_size=8 data\.channels=1\b",
        ),
        ("distill.teacher={teacher} model.num_classes=12", 2, r"\b10 .*\b12\b"),
        (
            "distill.teacher={teacher} data.name=imagefolder data.root=photos data.image_size=8",
            2,
            r"\(ant, bee\)",
        ),
        ("distill.teacher=resnet18", 2, r"=resnet18: .*\b1,000 .*\b10\b"),
        ("distill.teacher={teacher} task.name=multilabel", 2, r"set distill\.teacher=null\b"),
        ("distill.teacher={teacher} output={teacher}", 8, r"\boutput="),
        (
            "distill.teacher={teacher} output={teacher} resume=auto",
            2,
            r"distill\.teacher: None ",
        ),
    ],
)
def test_an_invalid_call_is_one_line(words, code, pattern, teacher, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "alien.safetensors").write_bytes(b"nothing")
    if "photos" in words:
        photo_set(tmp_path / "photos", {"ant": 40, "bee": 40})
    own = words.format(teacher=teacher).split()
    completed = typed(*latest(*SMALL, *own, "mode=single", "max_steps=1"), cwd=tmp_path)
    assert (
        completed.returncode == code
        and completed.stderr.count("\n") == 1
        and re.search(pattern, completed.stderr)
    ), completed.stderr


@pytest.mark.parametrize(
    "value",
    ["weight=-0.1", "weight=1.1", "weight=nan", "weight=much", "temperature=0", "temperature=.inf"],
)
def test_other_numbers_are_refused(value):
    with pytest.raises(RecipeError, match=f"distill.{value.partition('=')[0]}"):
        load("digits", "distill.teacher=one", f"distill.{value}")


@pytest.mark.slow
def test_published_weights_teach(tmp_path, monkeypatch):
    """torchvision's, of a file that is there: with its own mean."""
    hub = tmp_path / "hub" / "checkpoints"
    hub.mkdir(parents=True)
    reference = torchvision.models.resnet18()
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    torch.save(reference.state_dict(), hub / weights.url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    recipe = load(None, "distill.teacher=resnet18", "data.name=synthetic", "data.image_size=32")
    data = open_datasets(recipe)
    folders = ("n01440764", *(f"n02{number:06}" for number in range(998)), "n15075141")
    data = dataclasses.replace(data, mean=(0.5,) * 3)

    def of(classes):
        arguments = dataclasses.replace(data, classes=classes)
        return Teacher(tasks.create_task(recipe, classes), arguments, torch.device("cpu"), True)

    with pytest.raises(RecipeError, match=r"knows 1000 \(tench, "):
        of(folders[::-1])
    assert "order" in of(tuple(map(str, range(1000)))).note
    own_value = of(folders)
    pixels = torch.rand(2, 3, 32, 32)
    parts = (
        data.mean,
        data.std,
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    )
    mean, std, own, spread = (torch.tensor(part)[:, None, None] for part in parts)
    batch = Batch(
        (pixels - mean) / std,
        torch.tensor([3, 999]),
        2,
    )
    with torch.no_grad():
        expected = reference.eval()((pixels - own) / spread)
    taught = own_value.teach(batch).targets
    assert "order" not in own_value.note
    torch.testing.assert_close(taught[:, 1:], expected, rtol=1e-4, atol=1e-4)
    assert taught[:, 0].tolist() == [3, 999]
    named = weights.meta["categories"]
    words = tuple(sorted(named))
    in_words = of(words).teach(batch).targets[:, 1:]
    torch.testing.assert_close(
        in_words,
        expected[:, [named.index(word) for word in words]],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.slow(cases=["sorted"])
@pytest.mark.parametrize("known", ["in order", "sorted"])
def test_numbered_classes_are_matched_by_name(known, tmp_path):
    """Folders 0 to 10 sort 0, 1, 10, 2: a teacher of tensors has its outputs in another order."""
    numbers = [str(number) for number in range(11)]
    inputs = torch.zeros(22, 3, 8, 8, dtype=torch.uint8)
    labels = torch.arange(22) % 11
    part = inputs, labels
    names = numbers if known == "in order" else sorted(numbers)
    options = {
        "mode": "single",
        "max_steps": 1,
        "batch_size": 11,
        "threads": 1,
        "schedule__warmup_epochs": 0,
    }
    trainer.train(
        "digits",
        data=(part, part, names),
        output=tmp_path / "teacher",
        **options,
    )
    recipe = load(
        "digits",
        f"distill.teacher={tmp_path / 'teacher'}",
        "data.name=synthetic",
        "data.image_size=8",
    )
    there = open_datasets(recipe)
    other = tuple(sorted(numbers)) if known == "in order" else tuple(numbers)
    data = dataclasses.replace(
        there,
        classes=other,
        channels=3,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    own = Teacher(tasks.create_task(recipe, other), data, torch.device("cpu"), True)
    assert "order" not in own.note
    batch = Batch(
        torch.randn(4, 3, 8, 8),
        torch.zeros(4, dtype=torch.int64),
        4,
    )
    unordered = dataclasses.replace(data, classes=tuple(names))
    plain = Teacher(tasks.create_task(recipe, names), unordered, torch.device("cpu"), True)
    expected = plain.teach(batch).targets[:, 1:][:, [names.index(name) for name in other]]
    assert torch.equal(own.teach(batch).targets[:, 1:], expected)


def test_a_teacher_of_some_other_numbers_is_refused(tmp_path):
    part = torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.arange(6) % 3
    options = {
        "mode": "single",
        "max_steps": 1,
        "batch_size": 3,
        "threads": 1,
        "schedule__warmup_epochs": 0,
    }
    trainer.train(
        "digits",
        data=(part, part, ["5", "6", "7"]),
        output=tmp_path / "teacher",
        **options,
    )
    with pytest.raises(RecipeError):
        trainer.train(
            "digits",
            data=(part, part, ["6", "7", "8"]),
            distill__teacher=tmp_path / "teacher",
            output=tmp_path / "student",
            **options,
        )


def test_a_teacher_that_timm_lacks_is_one_line(monkeypatch):
    timm = SimpleNamespace(is_model=lambda name: False, get_pretrained_cfg=lambda name: None)
    monkeypatch.setitem(sys.modules, "timm", timm)
    spec = TensorSpec((3, 64, 64), torch.float32)
    with pytest.raises(
        RecipeError, match=r"^distill\.teacher=timm:resnt10t: .*\btimm\.list_models\b"
    ):
        load_teacher(load(None, "distill.teacher=timm:resnt10t"), spec, 1000)


def test_a_published_teacher_reads_the_images_of_the_run():
    """Images may be higher than wide; a teacher of other images is refused by name."""
    spec = TensorSpec((3, 48, 32), torch.float32)
    recipe = load(None, "distill.teacher=resnet18")
    assert load_teacher(recipe, spec, 1000, starting=False).facts.spec == spec
    data = open_datasets(load(None, "data.name=synthetic", "data.image_size=32"))
    own_value = SimpleNamespace(
        recipe=recipe,
        _task=tasks.create_task(recipe, data.classes),
        _outputs=10,
    )
    own = Recipe().replace(data={"name": "synthetic"})
    reported = {
        key: json.dumps(value)
        for key, value in {
            "channels": 3,
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
        }.items()
    }
    reference = Trained(Path(), {}, reported | {"image_size": "[48,32]"}, own, own)
    with pytest.raises(RecipeError, match=r"type data.image_size=\[48,32\] data.channels=3"):
        Teacher._check(own_value, reference, data.classes, data)


@pytest.mark.slow
def test_a_plan_has_shards_of_a_large_one(large, teacher):
    """Training shards a teacher from the same size on."""
    size = sum(t.nbytes for t in load_file(large / "last.safetensors").values())
    for name, share in {"cnn_gn": size / 2, "resnet20": size}.items():
        chosen = load(
            "digits", f"distill.teacher={large}", "batch_size=64", "mode=fsdp", f"model.name={name}"
        )
        fake = create_fake_model(chosen)
        layout = lay_out(chosen, 2)
        assert [device.teacher for device in footprint(fake, layout)] == [share] * 2
        plain = create_fake_model(chosen.replace(distill={}))
        more = (
            compute_traffic(fake, layout, None).reduced
            - compute_traffic(plain, layout, None).reduced
        )
        assert more == (size / 2 if share < size else 0)


@pytest.mark.slow
def test_a_plan_counts_it_where_it_is(teacher):
    """The last stage of a pipeline over processes has the teacher, and reads the images, too."""
    recipe = load("digits", f"distill.teacher={teacher}", "batch_size=64")
    size = sum(t.nbytes for t in load_file(teacher / "last.safetensors").values())
    for words, holders in {
        "mode=ddp": [1, 1],
        "mode=split": [1, 0],
        "mode=pipeline": [0, 1],
        "mode=dp": [1],
    }.items():
        chosen = load(recipe, words)
        count = len(holders) if words in ("mode=ddp", "mode=pipeline") else 1
        fake, without = (create_fake_model(each) for each in (chosen, load("digits", words)))
        layout = lay_out(chosen, count)
        actual = footprint(fake, layout)
        plain = footprint(without, layout)
        assert [device.teacher for device in actual] == [size * one for one in holders], words
        more = [
            new.peak - old.peak - (new.images - old.images)
            for new, old in zip(actual, plain, strict=True)
        ]
        assert more == [device.teacher for device in actual]


@pytest.mark.slow
def test_photos_that_two_ranks_read_are_counted_once(tmp_path):
    photos = photo_set(tmp_path / "photos", {"ant": 12, "bee": 12}, split=True)
    (photos / "train" / "ant" / "3.jpg").write_bytes(b"broken")
    words = [
        "mode=single",
        "model.name=cnn_gn",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=16",
        "batch_size=8",
        "epochs=2",
        "data.on_error=skip",
        "data.check=off",
        "data.workers=0",
        *QUIET,
    ]
    ok(*words, f"output={tmp_path / 'expert'}")
    words += [f"distill.teacher={tmp_path / 'expert'}", "data.mean=[0.4,0.5,0.6]"]
    ok(*words, f"output={tmp_path / 'one'}")
    ok(*words[1:], *EXACT["1f1b"], f"output={tmp_path / 'two'}")
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["data"]["skipped"] == two["data"]["skipped"] > 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
