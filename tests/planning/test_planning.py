"""Plans against the real thing: models, optimizers, checkpoints, the profiler's memory events, torch's schedules."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from tests.commands import PROJECT, environment
from trainer import load_recipe, plan
from trainer.__main__ import answer
from trainer.data import Batch
from trainer.errors import RecipeError, SetupError
from trainer.models.zoo import build
from trainer.modes import create
from trainer.modes.pipeline.orders import Task, issue_order
from trainer.planning import amounts, schedules, summary
from trainer.planning.images import describe
from trainer.planning.layout import every_mode, lay_out
from trainer.planning.memory import footprint
from trainer.planning.shadow import Shadow
from trainer.processes import world
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe.words import split
from trainer.training.optimization import build_optimizer, optimizer_state

MODELS = {
    "resnet18": 64,
    "vit_tiny": 32,
    "cnn": 32,
    "mobilenet_v3_small": 64,
    "densenet121": 64,
}  # with an image's pixels
SAMPLE = [pytest.param(name, marks=pytest.mark.full if name == "densenet121" else ()) for name in MODELS]  # it is slow


def recipe_of(*words):
    """On synthetic images, on one CPU where the words do not say otherwise."""
    given = {word.partition("=")[0] for word in words}
    defaults = ["mode=single", "devices=[cpu]", "data.name=synthetic"]
    return load_recipe(None, *(word for word in defaults if word.partition("=")[0] not in given), *words)


def sized(name, *words):
    return recipe_of(f"model.name={name}", f"data.image_size={MODELS[name]}", "batch_size=16", *words)


def shadow_of(recipe):
    return Shadow(recipe, describe(recipe), "cpu")


def alone(devices=1):
    cpu = torch.device("cpu")
    return World(Place(), cpu, 1, ("cpu",) * devices, (cpu,) * devices)


def real(recipe, world=None):
    """The recipe's strategy with a real model and a batch."""
    images = describe(recipe)
    shape = (recipe.batch_size // recipe.accumulate, images.channels, images.size, images.size)
    strategy = create(recipe, world or alone())
    strategy.setup(build(recipe.model, images.classes, images.channels, images.size), shape)
    strategy.train()
    inputs = torch.randn(shape)
    if recipe.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return strategy, Batch(inputs, torch.zeros(shape[0], dtype=torch.int64), shape[0])


def measured_peak(work):
    """Most bytes that `work` has allocated at once, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- bytes against the real thing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.momentum=0.9", "optimizer.norm_weight_decay=0.0"],
        ["optimizer.momentum=0"],
        ["optimizer.name=adamw", "optimizer.lr=0.001", "ema=0.9"],
    ],
    ids=["momentum", "sgd", "adamw"],
)
def test_weights_and_optimizer_are_those_of_a_real_model(name, words):
    recipe = sized(name, *words)
    images, shadow = describe(recipe), shadow_of(recipe)
    model = build(recipe.model, images.classes, images.channels, images.size)
    parameters = dict(model.named_parameters())
    state = optimizer_state(build_optimizer(parameters, recipe.optimizer), parameters)
    own = shadow.resident(shadow.model)
    assert own["parameters"] == own["gradients"] == size(parameters.values())
    assert own["optimizer"] == size(state.values())
    assert own["buffers"] == size(model.buffers())
    assert own["ema"] == (size(model.state_dict().values()) if recipe.ema else 0)
    assert shadow.size == sum(p.numel() for p in model.parameters())


def test_nothing_is_allocated():
    shadow = shadow_of(recipe_of("model.name=resnet50", "data.image_size=224", "batch_size=256"))
    assert all(isinstance(tensor, FakeTensor) for tensor in shadow.model.state_dict().values())
    assert shadow.whole(256, gradients=True).peak > 20 * 2**30


@pytest.mark.parametrize("words", [["optimizer.name=adam", "optimizer.lr=0.01", "ema=0.9"], ["optimizer.momentum=0.9"]])
def test_disk_is_what_a_checkpoint_holds(tmp_path, words):
    words = ["mode=single", "devices=[cpu]", "max_steps=1", "logging.progress=false", *words]
    recipe = load_recipe("digits", *words, output=str(tmp_path / "run"))
    from trainer import train

    train(recipe)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    held = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held[path.stem] = size(file.get_tensor(name) for name in file.keys())  # noqa: SIM118
    found = plan(recipe)["disk"]
    assert found["checkpoint"] == held["model"] + held["optimizer"] + held.get("ema", 0)
    assert found["weights"] == held["model"]
    written = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors"))
    assert found["checkpoint"] + 2 * found["weights"] == pytest.approx(written, rel=0.15)  # headers, random states


# --- activations against the profiler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SAMPLE)
def test_activations_are_those_that_the_profiler_sees(name, precision):
    recipe = sized(name, f"precision={precision}")
    strategy, batch = real(recipe)
    strategy.forward_backward(batch, 1 / 16)
    shadow = shadow_of(recipe)
    again = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))  # gradients are there to be added to
    assert shadow.whole(16, gradients=True).peak == pytest.approx(again, rel=0.15)
    strategy.module.zero_grad()
    first = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    assert shadow.whole(16, gradients=False).peak == pytest.approx(first, rel=0.15)


@pytest.mark.parametrize(
    "words",
    [["channels_last=false"], ["augment.mixup=0.2", "loss.label_smoothing=0.1"], ["accumulate=4"]],
    ids=["contiguous", "mixup", "accumulate"],
)
def test_activations_under_options(words):
    recipe = sized("resnet18", *words)
    strategy, batch = real(recipe)
    rows = len(batch.inputs)
    if recipe.augment.mixup:
        batch = Batch(batch.inputs, torch.full((rows, 10), 0.1), rows)
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    (device,) = footprint(shadow_of(recipe), lay_out(recipe))
    assert device.activations == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny"])
def test_saved_bytes_are_those_that_autograd_keeps(name):
    recipe = sized(name)
    strategy, batch = real(recipe)
    own = {p.untyped_storage().data_ptr() for p in strategy.module.parameters()} | {
        batch.inputs.untyped_storage().data_ptr()
    }
    kept = {}

    def pack(tensor):
        key = tensor.untyped_storage().data_ptr()
        if key not in own:
            kept[key] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = strategy.loss(strategy.outputs(batch.inputs), batch.targets)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert loss.requires_grad
    assert shadow_of(recipe).whole(16, gradients=True).saved == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny"])
def test_a_pipeline_holds_what_the_profiler_sees(name, recompute):
    """All stages of a pipeline in one process, so what is measured is what the stages hold together."""
    words = ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.microbatches=4", f"pipeline.recompute={recompute}"]
    cut = {"resnet18": "layer2.1", "vit_tiny": "encoder.layers.encoder_layer_1"}[name]
    recipe = sized(name, *words, f"pipeline.cuts=[{cut}]")
    strategy, batch = real(recipe, alone(2))
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    shadow, layout = shadow_of(recipe), lay_out(recipe)
    stages = schedules.cut(shadow, layout).stages
    assert schedules.held(issue_order(2, 4), stages) == pytest.approx(peak, rel=0.15)


def test_split_holds_what_the_profiler_sees():
    recipe = sized("resnet18", "mode=split", "devices=[cpu,cpu]", "pipeline.cuts=[layer2.1]")
    strategy, batch = real(recipe, alone(2))
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    shadow, layout = shadow_of(recipe), lay_out(recipe)
    both = schedules.cut(shadow, layout).stages
    together = [Task("F", 0, 0), Task("F", 1, 0), Task("B", 1, 0), Task("B", 0, 0)]
    assert schedules.held(together, both) == pytest.approx(peak, rel=0.15)
    assert len(footprint(shadow, layout)) == 2


def test_devices_of_modes():
    """What a mode adds to, or takes from, a device."""
    recipe = recipe_of("model.name=cnn", "data.image_size=32", "batch_size=64", "precision=fp32", "ema=0.9")
    shadow = shadow_of(recipe)
    modes = {mode: footprint(shadow, layout) for mode, layout in every_mode(recipe, 2).items()}
    single, ddp = modes["single"][0], modes["ddp"][0]
    assert len(modes["ddp"]) == 2
    assert ddp.activations < single.activations
    assert ddp.peak == sum(vars(ddp)[key] for key in vars(ddp) if key not in ("device", "peak"))
    assert single.peak < sum(vars(single)[key] for key in vars(single) if key not in ("device", "peak"))
    for staged in ("split", "pipeline"):
        assert sum(device.parameters for device in modes[staged]) == single.parameters
        assert sum(device.optimizer for device in modes[staged]) == single.optimizer
        assert sum(device.ema for device in modes[staged]) == single.ema
    assert max(d.activations for d in modes["pipeline"]) < max(d.activations for d in modes["split"])


def test_replicas_of_data_parallel():
    recipe = recipe_of("model.name=cnn", "batch_size=30").replace(mode="dp", devices=["cuda:0", "cuda:1", "cuda:2"])
    first, *others = footprint(shadow_of(recipe), lay_out(recipe))
    assert first.optimizer and not any(device.optimizer for device in others)
    assert len({device.parameters for device in (first, *others)}) == 1
    assert first.images == 3 * others[0].images


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "virtual", "microbatches", "flying"),
    [
        ("split", 1, 1, [1, 1]),
        ("gpipe", 1, 8, [8, 8]),
        ("1f1b", 1, 8, [2, 1]),
        ("streams", 1, 8, [2, 1]),
        ("interleaved1f1b", 2, 8, [5, 3]),
        ("loopedbfs", 2, 8, [16, 16]),
        ("interleavedzerobubble", 2, 8, [4, 4]),
        ("zbv", 2, 8, [4, 4]),
        ("dualpipev", 2, 8, [5, 5]),
    ],
)
def test_orders_are_torchs(schedule, virtual, microbatches, flying):
    listed = schedules.pipeline_order(schedule, 2, virtual, microbatches)
    assert [schedules.in_flight(tasks) for tasks in listed] == flying
    done = [(task.stage, task.microbatch) for tasks in listed for task in tasks if task.kind == "F"]
    assert sorted(done) == [(stage, m) for stage in range(2 * virtual) for m in range(microbatches)]


def test_bubbles_of_equal_stages():
    found = {(row["schedule"], row["microbatches"]): row for row in schedules.bubbles(pipeline_of(4))}
    for schedule in ("gpipe", "1f1b"):
        assert found[schedule, 8]["bubble"] == pytest.approx(3 / 11)
    assert found["interleaved1f1b", 8]["bubble"] == pytest.approx(3 / 19)
    assert found["zbv", 8]["bubble"] < found["interleaved1f1b", 8]["bubble"]
    assert found["1f1b", 16]["in_flight"] == 4
    assert ("dualpipev", 4) not in found  # fewer micro-batches than stages


def pipeline_of(ranks, *words):
    return lay_out(
        recipe_of("model.name=resnet18", "batch_size=64", "data.image_size=64", *words).replace(mode="pipeline"), ranks
    )


def test_stages_add_up_and_share_the_work():
    words = ["mode=pipeline", "model.name=resnet18", "data.name=synthetic", "data.image_size=64", "batch_size=64"]
    found = plan(load_recipe(None, *words, "pipeline.microbatches=8"), nproc=2)
    pipe = found["pipeline"]
    assert pipe["balanced_by"] == "flops" and len(pipe["cuts"]) == 1
    flops = found["model"]["forward_flops_per_image"]
    assert sum(stage["forward_flops"] for stage in pipe["stages"]) == flops * pipe["rows"]
    assert sum(stage["parameters"] for stage in pipe["stages"]) == found["model"]["parameters"]
    assert max(stage["flops_share"] for stage in pipe["stages"]) < 0.6
    assert pipe["bubble_ideal"] == pytest.approx(1 / 9)
    assert found["communication"]["crossing_bytes"] == 2 * 8 * pipe["stages"][0]["sent_bytes"]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_what_crosses_a_cut(precision, width):
    words = ["mode=pipeline", "model.name=resnet18", "data.name=synthetic", "data.image_size=64", "batch_size=64"]
    words += ["pipeline.microbatches=8", "pipeline.cuts=[layer2.1]", f"precision={precision}"]
    found = plan(load_recipe(None, *words), nproc=2)
    assert found["pipeline"]["stages"][0]["sent_bytes"] == 8 * 128 * 8 * 8 * width


def test_replicas_of_pipelines_reduce_their_gradients():
    words = ["mode=pipeline", "model.name=cnn", "data.name=synthetic", "batch_size=64", "pipeline.stages=2"]
    found = plan(load_recipe(None, *words), nproc=4)
    assert found["batch"]["shards"] == 2
    largest = max(device["gradients"] for device in found["memory_per_device"])
    assert found["communication"]["all_reduce_bytes_per_device"] == largest


# --- the rest of the page ---------------------------------------------------------------------------------------------


def test_a_plan_for_more_devices_than_there_are():
    found = plan(
        load_recipe("resnet50", "devices=[cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5,cuda:6,cuda:7]"), memory="24GiB"
    )
    assert found["world_size"] == 8 and found["fits"] is True
    assert found["batch"]["per_shard"] == 32
    assert found["communication"]["all_reduce_bytes_per_device"] == 2 * 7 / 8 * 4 * 25_557_032
    assert found["steps"]["per_epoch"] is None  # no folder
    assert found["memory_limit"]["bytes"] == 24 * 2**30


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
    monkeypatch.setattr(world, "cuda_count", lambda: 1)
    recipe = load_recipe(None, "data.name=synthetic", "batch_size=96", *words)
    assert list(lay_out(recipe, nproc).devices) == devices


def test_steps_and_rates():
    found = plan(load_recipe("cifar10"), nproc=2)
    assert found["data"]["train_samples"] == 50_000
    assert found["steps"] == {"per_epoch": 390, "epochs": 16, "total": 6240}
    assert found["learning_rate"]["first"] == pytest.approx(0.001)
    assert plan(load_recipe("mnist_local_sgd"), nproc=4)["data"]["train_samples"] == 60_000
    assert plan(load_recipe("digits"), nproc=2)["data"]["train_samples"] == 1437


def test_averaging_is_spread_over_its_steps():
    words = ["mode=local_sgd", "model.name=cnn_gn", "data.name=synthetic"]
    weights = 4 * plan(load_recipe(None, *words), nproc=4)["model"]["parameters"]
    found = plan(load_recipe(None, *words, "local_sgd.every=10"), nproc=4)["communication"]
    assert found["all_reduce_bytes_per_device"] == round(1.5 * weights / 10)
    assert found["epoch_bytes_per_device"] == 1.5 * weights


def test_advice_fits():
    words = ["model.name=resnet18", "data.name=synthetic", "data.image_size=64", "batch_size=64"]
    recipe = load_recipe(None, "mode=ddp", *words)
    tight = plan(recipe, nproc=2, memory="200MiB")
    tried = {one["words"].split("=")[0]: one for one in tight["advice"]}
    assert not tight["fits"] and tried.keys() == {"accumulate", "batch_size", "mode"}
    for one in tight["advice"]:
        own = {word.partition("=")[0]: word for word in one["words"].split()}
        processes = own.pop("nproc", "nproc=2").removeprefix("nproc=")
        kept = [word for word in ["mode=ddp", *words] if word.partition("=")[0] not in own]
        again = plan(load_recipe(None, *kept, *own.values()), nproc=processes, memory="200MiB")
        assert again["fits"] and again["peak"] == one["peak"]
    pieces = int(tried["accumulate"]["words"].partition("=")[2])
    fewer = [n for n in range(1, pieces) if 32 % n == 0]
    assert not any(plan(recipe.replace(accumulate=n), nproc=2, memory="200MiB")["fits"] for n in fewer)
    assert plan(recipe, nproc=2, memory="1MiB")["advice"] == []


def test_every_mode_has_a_line():
    found = plan(load_recipe("digits"), nproc=4, every=True)["modes"]
    assert [row["mode"] for row in found] == ["single", "dp", "ddp", "split", "pipeline", "local_sgd", "hogwild"]
    assert all(row["peak"] and row["fits"] and not row["error"] for row in found)
    assert [row["world_size"] for row in found] == [1, 1, 4, 1, 4, 4, 4]
    crossed = plan(load_recipe("digits", "sync_bn=true"), nproc=2, every=True)["modes"]
    assert {row["mode"] for row in crossed if row["error"]} == {"dp", "pipeline", "local_sgd", "hogwild"}


def test_workers_that_share_a_card_add_up(monkeypatch):
    words = ["mode=local_sgd", "model.name=cnn", "data.name=synthetic", "devices=[cuda:0]"]
    found = plan(load_recipe(None, *words), nproc=4, memory="1GiB")
    assert found["peak"] == sum(device["peak"] for device in found["memory_per_device"])


# --- predictions ------------------------------------------------------------------------------------------------------


def run_folder(path, *words, **result):
    """A run folder as training leaves it, made up."""
    recipe = recipe_of("model.name=cnn", "devices=auto", *words)
    path.mkdir()
    (path / "recipe.yaml").write_text(recipe.to_yaml())
    step = {"data": 0.1, "compute": 0.8, "communication": 0.0, "bubble": 0.0, "optimizer": 0.1, "logging": 0.0}
    made = {
        "mode": recipe.mode,
        "world_size": 1,
        "devices": ["cpu"],
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "step_time_s": {"mean": 0.1},
        "data_wait_fraction": 0.1,
        "verdict": {"step": step},
        "pipeline": None,
        **result,
    }
    (path / "result.json").write_text(json.dumps(made))
    return str(path)


def of_cnn(mode, *words):
    return load_recipe(None, f"mode={mode}", "model.name=cnn", "data.name=synthetic", "batch_size=128", *words)


def test_more_devices_from_a_run_of_one(tmp_path):
    folder = run_folder(tmp_path / "run")
    found = plan(of_cnn("ddp"), nproc=8, measured=folder, bandwidth="10MB/s")
    gradients = 4 * found["model"]["parameters"]
    made = found["prediction"]
    assert made["compute_seconds"] == pytest.approx(0.08 / 8)
    assert made["communication_seconds"] == pytest.approx(2 * 7 / 8 * gradients / 10e6)
    assert made["optimizer_seconds"] == made["other_seconds"] == pytest.approx(0.01)
    assert made["step_seconds"] == pytest.approx(
        sum(made[f"{k}_seconds"] for k in ("compute", "communication", "optimizer", "other"))
    )
    assert found["predicted_samples_per_sec"] == pytest.approx(128 / made["step_seconds"])
    assert [row["devices"] for row in found["scaling"]] == [1, 2, 4, 8]
    assert found["scaling"][0]["samples_per_sec"] == pytest.approx(1280)
    assert found["scaling"][-1]["step_seconds"] == pytest.approx(made["step_seconds"])
    assert plan(of_cnn("single"), measured=folder)["predicted_samples_per_sec"] == pytest.approx(1280)


def test_communication_as_it_was_measured(tmp_path):
    step = {"data": 0.0, "compute": 0.7, "communication": 0.3, "bubble": 0.0, "optimizer": 0.0, "logging": 0.0}
    folder = run_folder(tmp_path / "run", "mode=ddp", world_size=2, verdict={"step": step})
    made = plan(of_cnn("ddp"), nproc=8, measured=folder)["prediction"]
    assert made["compute_seconds"] == pytest.approx(0.07 / 4)
    assert made["communication_seconds"] == pytest.approx(0.03 * (7 / 8) / (1 / 2))


def test_a_gpu_hides_communication(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run")
    cards = "devices=[cuda:0,cuda:1]"
    made = plan(of_cnn("ddp", cards), measured=folder, bandwidth="1GB/s")["prediction"]
    assert made["communication_seconds"] == 0
    made = plan(of_cnn("ddp", cards), measured=folder, bandwidth="10MB/s")["prediction"]
    whole = 4 * 391_466 / 10e6
    assert made["communication_seconds"] == pytest.approx(whole - 2 / 3 * 0.04, rel=1e-3)


def test_a_pipeline_from_a_run_of_one_device(tmp_path):
    folder = run_folder(tmp_path / "run")
    found = plan(of_cnn("pipeline", "pipeline.microbatches=8"), nproc=2, measured=folder, bandwidth="1GB/s")
    made, stages = found["prediction"], found["pipeline"]["stages"]
    slowest = max(stage["flops_share"] for stage in stages)
    assert made["compute_seconds"] > 0.08 * slowest  # its bound
    assert made["compute_seconds"] < 0.08
    split = plan(of_cnn("split", "devices=[cpu,cpu]"), measured=folder)["prediction"]
    assert split["compute_seconds"] == pytest.approx(0.08)


def test_a_pipeline_from_a_run_of_the_same(tmp_path):
    pipe = {"cuts": ["3"], "microbatches": 8, "split_size": 16, "stage_seconds": [0.04, 0.02]}
    folder = run_folder(tmp_path / "run", "mode=pipeline", world_size=2, pipeline=pipe)
    found = plan(of_cnn("pipeline", "pipeline.cuts=['3']"), nproc=2, measured=folder)
    assert found["pipeline"]["microbatches"] == 8
    # 1F1B: the first stage's 8 micro-batches, and its wait for the first to come back while it does another forward.
    assert found["prediction"]["compute_seconds"] == pytest.approx(0.04 + 0.02 / 8 - 0.04 / 8 / 3)


@pytest.mark.parametrize("mode", ["pipeline", "ddp"])
def test_measured_here(mode, full):
    if mode == "ddp" and not full:
        pytest.skip("a sample of the modes; --all measures both")
    words = [f"mode={mode}", "threads=1", "batch_size=96", "recipe=digits", "nproc=2", "measured=here", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "plan", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_samples_per_sec"] > 0
    assert found["prediction"]["compute_seconds"] > 0
    if mode == "pipeline":
        assert found["pipeline"]["balanced_by"] == "seconds"


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [("24GiB", 24 * 2**30), ("24GB", 24e9), ("512mib", 2**29), ("1.5TB", 1.5e12), ("8 GiB", 2**33)],
)
def test_memory(word, expected):
    assert amounts.memory(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"), [("10GB/s", 1e10), ("1GiB/s", 2**30), ("100Gbit/s", 12.5e9), ("25gb/s", 25e9)]
)
def test_bandwidth(word, expected):
    assert amounts.bandwidth(word) == expected


def test_shown():
    assert [amounts.shown(n) for n in (0, 999, 1024, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "5 MiB",
        "3.00 GiB",
    ]
    assert [amounts.operations(n) for n in (8.178e9, 12)] == ["8.18 GFLOP", "12 FLOP"]
    assert [amounts.duration(s) for s in (2, 0.0125)] == ["2.00 s", "12.5 ms"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["memory=24"], 2, "write memory=24GiB"),
        (["memory=much"], 2, "write memory=24GiB"),
        (["memory=0GiB"], 2, "above 0"),
        (["bandwidth=fast"], 2, "write bandwidth=10GB/s"),
        (["bandwidth=10GB"], 2, "write bandwidth=10GB/s"),
        (["measured=nowhere"], 3, "measured=here"),
        (["nproc=0"], 2, "nproc=0 must be a whole number"),
        (["nproc=2", "nproc=3"], 2, "given twice"),
        (["memory="], 2, "memory= is empty"),
        (["optimizer.lr=-1"], 2, "optimizer.lr"),
        (["epoch=3"], 2, "did you mean epochs"),
        (["mode=ddp", "nproc=7"], 2, "batch_size=96 does not divide"),
        (["mode=dp", "nproc=8"], 2, "mode=dp runs in 1 process"),
        (["mode=pipeline", "nproc=2", "pipeline.microbatches=7"], 2, "pipeline.microbatches=7"),
        (["mode=pipeline", "nproc=2", "pipeline.cuts=[nothing]"], 2, "not a usable cut"),
        (["mode=pipeline", "nproc=64"], 2, "usable cuts"),
        (["mode=dp", "sync_bn=true"], 2, "sync_bn=true is not for mode=dp"),
        (["model.name=resnet51"], 2, "did you mean model.name=resnet"),
        (["model.num_classes=3"], 2, "the data has 10 classes"),
        (["model.name=resnet18"], 2, "set data.channels=3"),
        (["model.name=resnet18", "data.channels=3", "model.weights=NONE"], 2, "is not published"),
        (["batch_size=9600", "nproc=2"], 2, "fewer than one global batch"),
        (["model.init_from=nowhere"], 4, "nowhere"),
        (["--jsonn"], 2, "not key=value"),
    ],
)
def test_what_is_wrong_is_one_line(words, code, text, capsys):
    assert answer(["plan", "recipe=digits", *words]) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_data_that_is_nowhere(capsys):
    assert answer(["plan", "data.name=imagefolder"]) == 3
    assert (
        answer(["plan", "data.name=imagefolder", "data.root=/not/here", "model.name=resnet18", "mode=ddp", "nproc=2"])
        == 0
    )
    assert "is not on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"step_time_s": None}, 3, "too short"),
        ({"mode": "dp"}, 2, "mode=dp"),
    ],
)
def test_a_run_that_does_not_tell(tmp_path, changes, code, text):
    mode = changes.get("mode", "single")
    folder = run_folder(tmp_path / "run", f"mode={mode}", **changes)
    with pytest.raises((RecipeError, SetupError), match=text) as raised:
        plan(of_cnn("ddp"), nproc=2, measured=folder)
    assert raised.value.code == code


def test_a_run_of_something_else(tmp_path):
    folder = run_folder(tmp_path / "run", "precision=bf16")
    with pytest.raises(RecipeError, match="precision=bf16"):
        plan(of_cnn("ddp"), nproc=2, measured=folder)
    other = run_folder(tmp_path / "other", "data.image_size=64")
    with pytest.raises(RecipeError, match=r"data\.image_size=64"):
        plan(of_cnn("ddp"), nproc=2, measured=other)
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(SetupError, match="cannot be read"):
        plan(of_cnn("ddp"), nproc=2, measured=folder)


def test_a_model_that_looks_at_values(capsys, tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(
        "from torch import nn\n"
        "from trainer import register_model\n\n\n"
        "class Looks(nn.Module):\n"
        "    def __init__(self, classes, channels):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(channels * 64, classes)\n\n"
        "    def forward(self, x):\n"
        "        return self.head(x.flatten(1)) * (2 if x.sum().item() > 0 else 1)\n\n\n"
        "@register_model('looks_at_values')\n"
        "def looks(classes, channels, size):\n"
        "    return Looks(classes, channels)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert answer(["plan", "recipe=digits", "plugin=looks", "model.name=looks_at_values"]) == 2
    assert "needs more than shapes" in capsys.readouterr().err


def test_the_page(capsys):
    assert answer(["plan", "recipe=digits", "nproc=2", "memory=4MiB", "bandwidth=1GB/s"]) == 0
    page = capsys.readouterr().out
    for text in ("1,437 training images", "DOES NOT FIT", "accumulate=2", "hogwild", "94,186 parameters", "all-reduce"):
        assert text in page
    assert "python -m trainer recipe=digits nproc=2\n" in page
    assert "torchrun --nproc_per_node=2 -m trainer recipe=digits" in page
    assert all(len(line) <= 120 for line in page.splitlines())


def test_the_page_of_a_pipeline(capsys):
    words = ["recipe=digits", "mode=pipeline", "nproc=2", "memory=24GiB"]
    assert answer(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert "fits: " in page and "ideal bubble" in page and "zbv" in page
    assert "mode=pipeline nproc=2\n" in page
    assert answer(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["schedule"] == "1f1b"


def test_what_is_wrong_is_said_before_torch_is_imported():
    script = "import sys\nfrom trainer.__main__ import answer\nanswer(['plan', 'recipe=digits', 'memory=24'])\n"
    script += "assert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(Path(PROJECT, "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(path, full):
    if not full and path.stem not in ("finetune", "digits_streams"):
        pytest.skip("a sample of the recipes; --all plans every one")
    found = plan(load_recipe(path.stem, *(["data.root=/not/here"] if path.stem == "finetune" else [])))
    assert found["memory_per_device"] and json.dumps(found)


@pytest.mark.parametrize(
    "name",
    [
        *("alexnet", "convnext_tiny", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5"),
        *("regnet_y_400mf", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11"),
        "vit_b_32",
    ],
)
@pytest.mark.full("long, a model of each family")
def test_torchvisions_families(name):
    pixels = 299 if name == "inception_v3" else 224
    recipe = recipe_of(f"model.name={name}", f"data.image_size={pixels}", "batch_size=4")
    images, shadow = describe(recipe), shadow_of(recipe)
    model = build(recipe.model, images.classes, images.channels, images.size)
    assert shadow.resident(shadow.model)["parameters"] == size(model.parameters())
    strategy, batch = real(recipe)
    strategy.forward_backward(batch, 1 / 4)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 4))
    assert shadow.whole(4, gradients=True).peak == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, []),
        (None, ["mode=single"]),
        ("digits", ["optimizer.lr=0.05", "devices=[cpu,cpu]", "mode=split", "data.root='007'", "ema=0.9"]),
        ("digits", ["model.init_from='a b, c.safetensors'", "save.every_epochs=null", "augment.crop_scale=[0.5, 1]"]),
        ("resnet50", ["mode=pipeline"]),
    ],
)
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "api"])
def test_the_commands_mean_the_recipe(name, words, typed):
    recipe = load_recipe(name, *words)
    given = [*([f"recipe={name}"] if name else []), *words] if typed else []
    if typed and not given:
        pytest.skip("nothing typed is the other case")
    for command in summary.commands(recipe, lay_out(recipe, 2 if recipe.processes == "many" else None), given):
        own, rest = split(shlex.split(command)[shlex.split(command).index("trainer") + 1 :], ("recipe", "nproc"))
        meant = recipe.replace(data__root="FOLDER") if name == "resnet50" else recipe
        assert (own or rest) and load_recipe(own.get("recipe"), *rest) == meant
