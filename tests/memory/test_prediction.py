"""Memory on each device of a mode, space on disk, and suggestions if they are too small."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from tests import warm
from tests.command_line import PROJECT, environment
from tests.commands.plan.plans import create_fake_model, recipe_of, size
from trainer import load_recipe, plan, train
from trainer.commands.plan.planned_layout import lay_out, lay_out_modes
from trainer.devices.cards import Cards
from trainer.memory import prediction
from trainer.memory.prediction import BUFFERS, CONTEXT, footprint
from trainer.recipe.layout import Layout
from trainer.telemetry.readable import format_size
from trainer.versions import torch_has


@pytest.mark.slow(cases=["words0"])
@pytest.mark.parametrize(
    "words", [["optimizer.name=adam", "optimizer.lr=0.01", "ema=0.9"], ["optimizer.momentum=0.9"]]
)
def test_planned_disk_space_is_the_size_of_a_checkpoint(tmp_path, words):
    words = ["mode=single", "devices=[cpu]", "max_steps=1", "logging.progress=false", *words]
    recipe = load_recipe("digits", *words, output=str(tmp_path / "run"))
    train(recipe)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    kept = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kept[path.stem] = size(file.get_tensor(name) for name in file.keys())  # noqa: SIM118
    actual = plan(recipe)["disk"]
    assert actual["checkpoint"] == kept["model"] + kept["optimizer"] + kept.get("ema", 0)
    assert actual["weights"] == kept["model"]
    written = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors"))
    # headers, random states.
    assert actual["checkpoint"] + 2 * actual["weights"] == pytest.approx(written, rel=0.15)


@pytest.mark.slow
def test_devices_of_modes():
    """Modes add memory to a device or remove some."""
    recipe = recipe_of(
        "model.name=cnn", "data.image_size=32", "batch_size=64", "precision=fp32", "ema=0.9"
    )
    fake = create_fake_model(recipe)
    modes = {mode: footprint(fake, layout) for mode, layout in lay_out_modes(recipe, 2).items()}
    single = modes["single"][0]
    ddp = modes["ddp"][0]
    assert len(modes["ddp"]) == 2
    assert ddp.activations < single.activations
    assert ddp.peak == sum(vars(ddp)[key] for key in vars(ddp) if key not in ("device", "peak"))
    assert single.peak < sum(
        vars(single)[key] for key in vars(single) if key not in ("device", "peak")
    )
    for staged in ("split", "pipeline"):
        assert sum(device.parameters for device in modes[staged]) == single.parameters
        assert sum(device.optimizer for device in modes[staged]) == single.optimizer
        assert sum(device.ema for device in modes[staged]) == single.ema
    assert max(d.activations for d in modes["pipeline"]) < max(
        d.activations for d in modes["split"]
    )


def test_replicas_of_data_parallel():
    recipe = recipe_of("model.name=cnn", "batch_size=30").replace(
        mode="dp", devices=["cuda:0", "cuda:1", "cuda:2"]
    )
    first, *others = footprint(create_fake_model(recipe), lay_out(recipe))
    assert first.optimizer and not any(device.optimizer for device in others)
    assert len({device.parameters for device in (first, *others)}) == 1
    assert first.images == 3 * others[0].images


ALL = ["accumulate", "recompute", "precision"]


@pytest.mark.full(cases=["mode1-8MiB-keys1"])
@pytest.mark.slow(cases=["mode2-1020MiB-keys2"])
@pytest.mark.parametrize(
    ("mode", "memory", "keys"),
    [
        pytest.param(
            ["mode=ddp", "devices=[cpu]"], "12MiB", ["accumulate"], marks=pytest.mark.slow
        ),
        pytest.param(["mode=pipeline", "devices=[cpu]"], "8MiB", ALL, marks=pytest.mark.slow),
        (["mode=fsdp", "devices=[cuda:0,cuda:1]"], "1020MiB", ALL),
    ],
)
def test_advice_fits(mode, memory, keys):
    words = [
        *mode,
        "model.name=resnet8",
        "data.name=synthetic",
        "data.image_size=32",
        "batch_size=64",
    ]
    tight = plan(load_recipe(None, *words), nproc=2, memory=memory)
    assert not tight["fits"]
    assert [one["words"].partition("=")[0] for one in tight["advice"]] == keys
    for one in tight["advice"]:
        again = plan(
            load_recipe(None, *words, one["words"]),
            nproc=2,
            memory=memory,
        )
        assert again["fits"] and again["peak"] == one["peak"] and not again["advice"]


@pytest.mark.slow
def test_workers_that_share_a_card_add_up():
    words = ["mode=local_sgd", "model.name=cnn", "data.name=synthetic", "devices=[cuda:0]"]
    planned = plan(load_recipe(None, *words), nproc=4, memory="1GiB")
    assert planned["peak"] == sum(device["peak"] for device in planned["memory_per_device"])


def test_the_outer_optimizer_of_local_sgd_is_counted():
    words = ["mode=local_sgd", "model.name=cnn", "data.name=synthetic", "devices=[cpu]"]
    more = ["local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9"]
    actual = [plan(load_recipe(None, *words, *more[:copies]), nproc=2) for copies in range(3)]
    weights = 4 * actual[0]["model"]["parameters"]
    for copies, each in enumerate(actual):
        assert each["peak"] == actual[0]["peak"] + copies * weights
        assert each["disk"]["checkpoint"] == actual[0]["disk"]["checkpoint"] + copies * weights


@pytest.mark.slow
def test_memory_of_cuda_and_nccl_is_subtracted():
    words = ["model.name=mlp", "data.name=synthetic", "data.image_size=8", "batch_size=96"]

    def usable(mode, nproc, memory, *more):
        planned = plan(
            load_recipe(None, f"mode={mode}", *words, *more),
            nproc=nproc,
            memory=memory,
        )
        return planned["memory_limit"]["usable"]

    gib = 2**30
    context = 600 * 2**20
    buffers = 400 * 2**20
    assert usable("ddp", 2, "80GiB") == 0.9 * 80 * gib  # a tenth is more
    assert usable("ddp", 2, "4GiB") == 4 * gib - context - buffers
    assert usable("single", None, "4GiB") == 4 * gib - context
    ways = 1 + torch_has("gradients through a group of their own")
    assert usable("pipeline", 2, "4GiB") == 4 * gib - context - (1 + ways) * buffers
    stages = ["pipeline.stages=2", "pipeline.microbatches=2"]
    assert usable("pipeline", 4, "4GiB", *stages) == 4 * gib - context - (2 + ways) * buffers
    assert usable("local_sgd", 3, "8GiB", "devices=[cuda:0]") == 8 * gib - 3 * context
    assert usable("ddp", 2, "4GiB", "devices=[cpu]") == 0.9 * 4 * gib
    assert usable("hogwild", 2, "4GiB") == 0.9 * 4 * gib
    assert usable("single", None, "512MiB") == 0


def test_of_mixed_cards_the_smallest_has_to_hold_it(monkeypatch):
    sizes = {
        0: 80 * 2**30,
        1: 16 * 2**30,
        2: 80 * 2**30,
    }
    monkeypatch.setattr(prediction.cards, "detect", lambda: Cards(len(sizes)))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=sizes[index]),
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda index: {1: "Tesla T4"}.get(index, "NVIDIA A100")
    )
    recipe = load_recipe(None, "mode=ddp")

    def own(*devices):
        return prediction.own_memory(Layout(recipe, len(devices), devices), len(devices))

    size, card = own("cuda:0", "cuda:1", "cuda:2")
    assert size == 16 * 2**30 and card.startswith("Tesla T4, ")
    size, card = own("cuda:0", "cuda:2")
    assert own("cuda:0#0", "cuda:0#1") == (size, card)
    assert size == 80 * 2**30
    assert card.startswith("NVIDIA A100, ")
    assert own("cuda:4", "cuda:5")[0] == 16 * 2**30, "cards that are elsewhere are as those here"
    monkeypatch.setattr(prediction.cards, "detect", Cards)
    assert own("cuda:0") is None


SHARDED = ["model.name=vit_tiny", "data.image_size=32"]
MORE = {
    "images": (2, ["batch_size=16"]),
    "kept": (2, ["batch_size=4", "fsdp.reshard=false"]),
}
CARDS = ["batch_size=8", "devices=[cuda:0,cuda:1]", "fsdp.offload=true"]
MORE |= {"on the host": (2, CARDS), "on the host, accumulated": (2, [*CARDS, "accumulate=2"])}
MORE |= {
    "accumulated": (2, ["batch_size=8", "accumulate=2"]),
    "2x2": (4, ["batch_size=8", "fsdp.shards=2"]),
}
WAYS = [
    pytest.param(
        *way,
        id=name,
        marks=pytest.mark.full,
    )
    for name, way in MORE.items()
]
WAYS += [pytest.param(2, ["batch_size=4"], id="weights")]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "words"), WAYS)
def test_ranks_hold_their_share_and_their_peak_is_planned(count, words, tmp_path):
    """Peak memory is measured by the storages that are alive in a real step.

    Only rank 0 has a row of the position embedding.
    """
    script = PROJECT / "tests" / "commands" / "plan" / "sharded_memory.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={count}",
        str(script),
    ]
    command += [str(tmp_path), *SHARDED, *words]
    cards = {"TRAINER_TEST_CARDS": str(count)} if "fsdp.offload=true" in words else {}
    completed = warm.run(
        command,
        env=environment(**cards),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.returncode == 0, completed.stderr
    recipe = recipe_of("mode=fsdp", "data.val_samples=8", "optimizer.name=adamw", *SHARDED, *words)
    (planned, *_) = plan(recipe, nproc=count)["memory_per_device"]
    for rank in range(count):
        kept = json.loads((tmp_path / f"{rank}.json").read_text())
        share = kept["whole"] / (recipe.fsdp.shards or count)
        assert kept["parameters"] == kept["gradients"] <= 1.05 * share
        assert kept["optimizer"] <= 2 * 1.05 * share
        assert planned["peak"] == pytest.approx(kept["peak"], rel=0.1)


@pytest.mark.full("a run like it is in test_on_simulated_cuda.py")
def test_shards_that_are_too_large_for_their_cards_go_to_the_host():
    words = [
        "mode=fsdp",
        "devices=[cuda:0,cuda:1]",
        "model.name=vit_b_16",
        "optimizer.name=adamw",
        "batch_size=2",
    ]
    card, host = (plan(recipe_of(*words, *more), nproc=2) for more in ([], ["fsdp.offload=true"]))
    kept = card["memory_per_device"][0]
    shards = kept["parameters"] + kept["gradients"] + kept["optimizer"]
    assert host["peak"] <= card["peak"] - kept["parameters"] - kept["optimizer"]
    assert any(
        format_size(shards) in note and "fsdp.offload" in note for note in host["assumptions"]
    )
    room = (card["peak"] + host["peak"]) // 2 + CONTEXT + BUFFERS
    full = plan(recipe_of(*words), nproc=2, memory=room)
    assert not full["fits"]
    assert plan(recipe_of(*words, "fsdp.offload=true"), nproc=2, memory=room)["fits"]
    assert host["peak"] in [
        advice["peak"] for advice in full["advice"] if advice["words"] == "fsdp.offload=true"
    ]
