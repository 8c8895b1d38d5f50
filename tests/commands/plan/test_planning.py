"""The command `plan` as a whole: its predictions, the suggested arguments, and refusals."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import PROJECT
from tests.commands.plan.plans import cnn_recipe, fixed_speed
from trainer import load_recipe, plan
from trainer.__main__ import answer
from trainer.commands.plan import summary
from trainer.commands.plan.planned_layout import lay_out
from trainer.data import open_datasets
from trainer.errors import RecipeError
from trainer.processes import resources
from trainer.recipe import MODES, TRAITS
from trainer.recipe.recipe_files import split_arguments


@pytest.mark.slow
def test_a_plan_for_more_devices_than_there_are():
    cards = ",".join(f"cuda:{n}" for n in range(8))
    planned = plan(load_recipe("resnet50", f"devices=[{cards}]"), memory="24GiB")
    assert planned["world_size"] == 8 and planned["fits"] is True
    assert planned["batch"]["per_shard"] == 32
    assert planned["communication"]["all_reduce_bytes_per_device"] == 2 * 7 / 8 * 4 * 25_557_032
    compressed = plan(load_recipe("resnet50", "ddp.compress=bf16"), nproc=8)["communication"]
    assert compressed["all_reduce_bytes_per_device"] == 2 * 7 / 8 * 2 * 25_557_032
    assert planned["steps"]["per_epoch"] is None  # no folder
    assert planned["memory_limit"]["bytes"] == 24 * 2**30


@pytest.mark.parametrize(
    ("words", "nproc", "devices"),
    [
        (["mode=ddp"], 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (["mode=split"], None, ["cuda:0", "cuda:1"]),
        (["mode=pipeline", "pipeline.stages=3"], 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (["mode=single"], None, ["cuda:0"]),
        (["mode=hogwild"], 2, ["cpu:0", "cpu:1"]),
        (["mode=local_sgd", "devices=[cuda]"], 2, ["cuda:0#0", "cuda:0#1"]),
    ],
)
def test_a_machine_with_one_gpu_plans_for_more(monkeypatch, words, nproc, devices):
    monkeypatch.setattr(resources, "count_cuda_devices", lambda *_: 1)
    recipe = load_recipe(None, "data.name=synthetic", "batch_size=96", *words)
    assert list(lay_out(recipe, nproc).devices) == devices


KEYS = {
    "": "recipe mode world_size devices model data batch steps memory_per_device memory_limit peak "
    "peak_without_recompute fits advice pipeline communication disk prediction "
    "predicted_samples_per_sec commands needs_folder assumptions modes",
    "model": "name parameters forward_flops_per_image precision",
    "data": "name train_samples val_samples classes channels image_size source",
    "batch": "global shards per_shard shares per_device accumulate per_pass microbatch",
    "steps": "per_epoch epochs total",
    "memory_limit": "bytes usable source",
    "pipeline": "schedule microbatches rows cuts balanced_by stages bubble_ideal",
    "communication": (
        "all_reduce_bytes_per_device crossing_bytes every_steps epoch_bytes_per_device seconds"
    ),
    "disk": "checkpoint weights folder",
    "memory_per_device": (
        "device parameters gradients optimizer ema buffers images activations peak teacher"
    ),
    "modes": "mode world_size devices peak activations fits traffic bubble error",
    "prediction": "step_seconds compute_seconds communication_seconds optimizer_seconds "
    "other_seconds bubble "
    "samples_per_sec",
}


@pytest.mark.slow
def test_the_keys_are_an_interface(monkeypatch):
    fixed_speed(monkeypatch)
    planned = plan(
        cnn_recipe("pipeline"),
        nproc=2,
        memory="24GiB",
        bandwidth="1GB/s",
        measured="here",
        every=True,
    )
    for part, keys in KEYS.items():
        rows = planned[part] if part else planned
        assert all(
            [*row] == keys.split() for row in (rows if isinstance(rows, list) else [rows])
        ), part
    assert json.loads(json.dumps(planned, allow_nan=False)) == planned


@pytest.mark.slow
def test_plan_accepts_the_arguments_of_train():
    actual = [
        plan(recipe)
        for recipe in ("digits", Path("digits"), load_recipe("digits"), {"data.name": "digits"})
    ]
    assert [each["data"] for each in actual] == [actual[0]["data"]] * 4


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        (None, {}, r"^plan\(\) .*\bplan\('digits'\)$"),
        ("digits", {"memory": [24]}, r"^memory= .*'24GiB', .*\blist$"),
        ("digits", {"measured": 5}, r"^measured=5 .*\bmeasured=here\b"),
    ],
)
def test_arguments_that_a_program_may_not_use(recipe, options, says):
    with pytest.raises(RecipeError, match=says):
        plan(recipe, **options)


def test_steps():
    planned = plan(load_recipe("cifar10"), nproc=2)
    assert planned["data"]["train_samples"] == 50_000
    assert planned["steps"] == {"per_epoch": 390, "epochs": 16, "total": 6240}
    assert plan(load_recipe("mnist_local_sgd"), nproc=4)["data"]["train_samples"] == 60_000
    assert plan(load_recipe("digits"), nproc=2)["data"]["train_samples"] == 1437


def test_images_of_a_fold_and_a_fraction():
    """cifar10 has 5,000 images of each class, of which a fold holds out 1,666 or 1,667."""
    for fold, held_out in (("1/3", 16_667), ("3/3", 16_666)):
        data = plan(load_recipe("cifar10", f"data.fold={fold}", "data.fraction=0.1"))["data"]
        assert data["val_samples"] == held_out
        assert data["train_samples"] == pytest.approx(3333, abs=1)
    recipe = load_recipe("digits", "data.fold=1/3", "data.fraction=0.1")
    actual = open_datasets(recipe)
    data = plan(recipe)["data"]
    assert (data["train_samples"], data["val_samples"]) == (len(actual.train), len(actual.val))


def test_averaging_is_spread_over_its_steps():
    words = ["mode=local_sgd", "model.name=cnn_gn", "data.name=synthetic"]
    weights = 4 * plan(load_recipe(None, *words), nproc=4)["model"]["parameters"]
    actual = plan(load_recipe(None, *words, "local_sgd.every=10"), nproc=4)["communication"]
    assert actual["all_reduce_bytes_per_device"] == round(1.5 * weights / 10)
    # In float64.
    assert actual["epoch_bytes_per_device"] == 3 * weights
    streams = ["local_sgd.every=10", "local_sgd.delay=2", "local_sgd.compress=bf16"]
    actual = plan(load_recipe(None, *words, *streams), nproc=4)["communication"]
    assert actual["all_reduce_bytes_per_device"] == round(1.5 * weights / 10 / 2)


@pytest.mark.slow
def test_every_mode_has_a_line():
    actual = plan(load_recipe("digits"), nproc=4, every=True)["modes"]
    assert [row["mode"] for row in actual] == [*MODES]
    assert all(row["peak"] and row["fits"] and not row["error"] for row in actual)
    for row in actual:
        assert row["world_size"] == (1 if TRAITS[row["mode"]].processes == "one" else 4)
    crossed = plan(load_recipe("digits", "sync_bn=true"), nproc=2, every=True)["modes"]
    refusing = {mode for mode, traits in TRAITS.items() if "sync_bn" in traits.refuses}
    assert {row["mode"] for row in crossed if row["error"]} == refusing


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["memory=24"], 2, r"memory=24 .*\bmemory=24GiB\b"),
        (["memory=0GiB"], 2, r"memory=0GiB .*\b0: .*\bmemory=24GiB\b"),
        (["bandwidth=10GB"], 2, r"bandwidth=10GB .*\bbandwidth=10GB/s"),
        (["nproc=0"], 2, r"nproc=0 .*\b1 to 4096\b"),
        (["mode=local_sgd", "nproc=7"], 2, r"batch_size=96 .*\b7 processes\b"),
        (
            ["mode=pipeline", "nproc=2", "pipeline.cuts=[nothing]"],
            2,
            r"pipeline\.cuts=\[nothing\]: nothing .*\b0, 3, 4, 7\b",
        ),
        (["mode=pipeline", "nproc=64"], 2, r"64 stages .*\b63 cuts\b.*\bpipeline\.stages\b"),
        (["model.num_classes=3"], 2, r"model\.num_classes=3, .*\b10 classes\b"),
        (["model.name=inception_v3"], 2, r"model\.name=inception_v3 .*\bdata\.channels=3\n"),
        (
            ["model.name=resnet18", "data.channels=3", "model.weights=NOSUCH"],
            2,
            r"model\.weights=NOSUCH .*\bresnet18\b.*\bIMAGENET1K_V1, DEFAULT\b",
        ),
        (["batch_size=9600", "nproc=2"], 2, r"1437 .*\(batch_size=9600\); .*batch_size=1436\b"),
        (["model.init_from=nowhere"], 4, r"'nowhere' .*\bruns/nowhere: "),
    ],
)
def test_an_error_is_one_line(words, code, text, capsys):
    assert answer(["plan", "recipe=digits", *words]) == code
    captured = capsys.readouterr()
    assert re.search(text, captured.err)
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.slow
def test_data_that_is_nowhere(capsys):
    assert answer(["plan", "data.name=imagefolder"]) == 3
    words = [
        "data.name=imagefolder",
        "data.root=/not/here",
        "model.name=resnet18",
        "mode=ddp",
        "nproc=2",
    ]
    assert answer(["plan", *words]) == 0
    assert "/not/here" in capsys.readouterr().out


@pytest.mark.slow(cases=["finetune"])
@pytest.mark.parametrize(
    "path", sorted(Path(PROJECT, "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_has_a_plan(path, full):
    if not full and path.stem not in ("finetune", "digits_streams"):
        pytest.skip("a sample of the recipes; --all plans every one")
    planned = plan(
        load_recipe(path.stem, *(["data.root=/not/here"] if "finetune" in path.stem else []))
    )
    assert planned["memory_per_device"] and json.dumps(planned)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, []),
        (None, ["mode=single"]),
        (
            "digits",
            ["optimizer.lr=0.05", "devices=[cpu,cpu]", "mode=split", "data.root='007'", "ema=0.9"],
        ),
        (
            "digits",
            [
                "model.init_from='a b, c.safetensors'",
                "save.every_epochs=null",
                "augment.crop_scale=[0.5, 1]",
            ],
        ),
        ("resnet50", ["mode=pipeline"]),
    ],
)
def test_the_commands_mean_the_recipe(name, words):
    """The recipe is the same for typed arguments and for a program."""
    recipe = load_recipe(name, *words)
    layout = lay_out(recipe, 2 if recipe.processes == "many" else None)
    typed = [f"recipe={name}"] if name else []
    for command in (
        *summary.list_commands(recipe, layout, [*typed, *words]),
        *summary.list_commands(recipe, layout, []),
    ):
        own, rest = split_arguments(
            shlex.split(command)[shlex.split(command).index("trainer") + 1 :], ("recipe", "nproc")
        )
        meant = recipe.replace(data__root="FOLDER") if name == "resnet50" else recipe
        assert own or rest
        assert load_recipe(own.get("recipe"), *rest).to_dict() == meant.to_dict()


@pytest.mark.slow
def test_a_model_of_one_size_is_refused_at_another_size_of_training():
    words = ["data.name=synthetic", "model.name=vit_tiny", "data.image_size=32", "mode=single"]
    with pytest.raises(RecipeError, match=r"data\.train_size=null"):
        plan(load_recipe(None, *words, "data.train_size=24"))
    plan(load_recipe(None, *words, "data.train_size=32"))
