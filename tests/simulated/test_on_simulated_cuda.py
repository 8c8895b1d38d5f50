"""The project on simulated CUDA devices: no race, no reuse, no mix-up, no wait in a step, and the
maths of the CPU.
"""

import math
import re
from unittest import mock

import pytest
import torch
from PIL import Image

from tests.command_line import QUIET, ok, result, scalars, suggested, trainer
from tests.simulated.simcuda import Card, ranks, runs, simulated, waits
from tests.simulated.simcuda import scenes as uses
from tests.strategies import create_strategy
from trainer.commands.doctor import Findings, check_cards
from trainer.commands.plan import plan, summary
from trainer.commands.predict.labelling import Forward, Labeller, Preparation
from trainer.data import Batch, open_datasets
from trainer.devices.assignment import prediction_devices, resolve_devices
from trainer.devices.precision import is_emulated
from trainer.distributed.world import World
from trainer.errors import TrainerError
from trainer.memory.device import total_memory
from trainer.memory.prediction import own_memory
from trainer.models.partition import trace
from trainer.models.zoo import build
from trainer.modes import Strategy
from trainer.pool.device_pool import check_devices
from trainer.processes.rank import Place
from trainer.recipe import ModelRecipe, load
from trainer.recipe.layout import Layout
from trainer.tasks import Classification
from trainer.telemetry.flops import look_up_peak_flops
from trainer.telemetry.verdict import Setting, StepParts, judge
from trainer.training.setup import build_speed_recipe

CARD = torch.device("cuda", 0)

TWO, SAME, THREE = (
    f"devices=[{','.join(f'cuda:{k}' for k in cards)}]" for cards in ((0, 1), (0, 0), (0, 1, 2))
)
EVERYTHING = (
    "clip_grad_norm=1 ema=0.9 accumulate=2 augment.mixup=0.2 augment.cutmix=0.2 augment.erase=0.5 "
    "augment.crop=pad augment.hflip=0.5 save.every_steps=1"
)
RUNS = [
    f"mode=dp model.name=mlp precision=bf16 {THREE}",
    f"mode=split {TWO} {EVERYTHING}",
    "mode=single model.name=mlp augment.auto=trivial augment.crop=resized optimizer.name=adamw",
    "mode=pipeline model.name=mlp precision=bf16 pipeline.split_size=5 clip_grad_norm=1 ema=0.9 "
    f"{SAME}",
    f"mode=single {EVERYTHING}",
    "mode=single model.name=mlp precision=fp16 clip_grad_norm=1 ema=0.9",
    f"mode=split model.name=mlp precision=fp16 clip_grad_norm=1 {TWO}",
    "mode=pipeline model.name=cnn pipeline.microbatches=3 recompute=true pipeline.timeline=true "
    f"{TWO}",
    f"mode=pipeline model.name=mlp precision=fp16 pipeline.microbatches=4 accumulate=2 {THREE}",
    f"mode=pipeline model.name=mlp batch_size=24 {TWO}",  # finds its own number of micro-batches
    f"mode=dp clip_grad_norm=1 ema=0.9 {TWO}",
    f"mode=dp model.name=cnn_gn recompute=true {TWO}",
    "mode=single model.name=cnn recompute=true graphs=auto",
    "mode=single model.name=mlp optimizer.name=muon optimizer.weight_decay=0.1 "
    "optimizer.layer_decay=0.5",
    "mode=single model.name=cnn_gn optimizer.name=muon precision=fp16",
    f"mode=split optimizer.name=adamw precision=fp16 {TWO}",
    f"mode=pipeline model.freeze=2 pipeline.cuts=[7] pipeline.microbatches=4 {TWO}",
]
MORE = [
    f"mode=pipeline {EVERYTHING} pipeline.microbatches=2 {SAME}",
    f"mode=pipeline model.name=vit_tiny pipeline.split_size=7 {TWO}",
    f"mode=pipeline model.name=resnet8 data.channels=3 pipeline.microbatches=3 {TWO}",
    f"mode=dp {EVERYTHING} {THREE}",
    "mode=single model.name=mlp augment.auto=autoaugment precision=bf16 accumulate=2",
]
LONG = [pytest.param(words, marks=pytest.mark.full("variants of the other runs")) for words in MORE]


@pytest.mark.full(
    but=[
        "mode=dp clip_grad_norm=1 ema=0.9 devices=[cuda:0,cuda:1]",
        "mode=dp model.name=mlp precision=bf16 devices=[cuda:0,cuda:1,cuda:2]",
        "mode=pipeline model.name=mlp batch_size=24 devices=[cuda:0,cuda:1]",
        "mode=single model.name=mlp precision=fp16 clip_grad_norm=1 ema=0.9",
        "mode=split optimizer.name=adamw precision=fp16 devices=[cuda:0,cuda:1]",
    ]
)
@pytest.mark.slow(
    cases=[
        "words1",
        "mode=dp model.name=mlp precision=bf16 devices=[cuda:0,cuda:1,cuda:2]",
        "words3",
    ]
)
@pytest.mark.parametrize(
    "words", [*RUNS[:4], *(pytest.param(w, marks=pytest.mark.slow) for w in RUNS[4:]), *LONG]
)
def test_a_run_on_cuda_is_the_run_on_the_cpu(words):
    """And no training step waits for a device; steps that are logged and meetings of ranks may."""
    cuda = runs.on_cuda(words)
    assert cuda.errors == [] and cuda.result["status"] == "completed"
    assert cuda.waits_in_steps() == {}
    assert cuda.held == [True] and 0 < cuda.result["launch_bound_fraction"] <= 1
    cpu = runs.on_cpu(words)
    assert cpu.result["launch_bound_fraction"] is None
    assert cpu.result["verdict"]["step"]["launches"] == 0
    tolerance = 2e-2 if "bf16" in words or "fp16" in words else 1e-4
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(
        torch.tensor(cuda.losses),
        torch.tensor(cpu.losses),
        **close,
    )
    torch.testing.assert_close(cuda.weights, cpu.weights, **close)
    assert cuda.result["val_loss"] == pytest.approx(cpu.result["val_loss"], rel=tolerance)
    driven = {name for name in ("cuda:0", "cuda:1", "cuda:2") if name in words} or {"cuda:0"}
    assert cuda.result["peak_memory_bytes"].keys() == driven
    assert all(cuda.result["peak_memory_bytes"].values())


@pytest.mark.parametrize("words", ["mode=single devices=[cpu]", "mode=hogwild"])
def test_a_run_on_the_cpu_of_a_machine_with_cards(words):
    finished = runs.on_cuda(f"{words} model.name=mlp logging.tensorboard=true")
    assert finished.result["devices"] == ["cpu"] and finished.errors == []


# Waits of the host.


def test_a_wait_in_a_step_is_counted(monkeypatch):
    plain = Strategy.backward

    def backward(self, loss):
        loss.item()
        plain(self, loss)

    monkeypatch.setattr(Strategy, "backward", backward)
    # Frames of this file count as the project's in this test.
    monkeypatch.setattr(waits, "HOME", __file__)
    with simulated(1) as machine:
        strategy = create_strategy(
            load(None, "mode=single"),
            World(Place(), CARD, 1, ("cuda:0",)),
            (2, 4),
            classes=3,
        )
        strategy.setup(torch.nn.Linear(4, 3))
        strategy.forward_backward(
            Batch(
                torch.ones(2, 4).to(CARD),
                torch.zeros(2).long().to(CARD),
                2,
            ),
            0.5,
        )
    ((wait, count),) = (
        (wait, count) for wait, count in machine.waits.seen.items() if wait.kind == "item"
    )
    assert wait.function.endswith("backward") and count == 1


# --- commands other than training.


@pytest.mark.slow
def test_other_commands_use_cards(tmp_path):
    """Apart from training in one process: timers, probes, predictions, plans, the doctor,
    refusals.
    """
    folder = tmp_path
    for card in range(4):
        for split in ("train", "val"):
            (folder / split / f"class{card % 2}").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (40 * card,) * 3).save(
                folder / split / f"class{card % 2}" / f"{card}.png"
            )
    photos = (
        f"data.name=imagefolder data.root={folder} data.channels=3 "
        "data.image_size=96 data.workers=0 batch_size=2"
    )
    trained = runs.train_on_cuda(
        f"mode=single model.name=mlp {photos} logging.tensorboard=true", folder / "run"
    )
    shown = scalars(folder / "run")["speed/launch_bound_pct"]
    assert trained.errors == []
    assert [step for step, _ in shown] == [1, 2]
    assert all(0 < value <= 100 for _, value in shown)
    recorded = "mode=single model.name=mlp graphs=true data.samples=80 epochs=2"
    assert runs.train_on_cuda(recorded, folder / "recorded").errors == []
    with runs.alone(), simulated(2) as machine:
        for use in (
            uses.timed,
            uses.sent,
            uses.communicated,
            uses.probed,
            uses.broken,
        ):
            use(machine)
        machine.broken.clear()
        labels(machine)
        without_memory(machine)
        assert prediction_devices("auto", 2, 8) == resolve_devices(["cuda", "cuda:1"], 2)
        assert check_devices(["cuda", "cpu"])[0] == CARD
        for refuse, *argument in (
            (resolve_devices, ["cuda:2"], 2),
            (resolve_devices, ["cuda:0"], 0),
            (check_devices, ["cuda:2"]),
        ):
            with pytest.raises(TrainerError, match="not here"):
                refuse(*argument)
        data = open_datasets(load(None, *runs.BASE.split()))
        build_speed_recipe(load(None, *runs.BASE.split()), data, print)
        assert total_memory(CARD) > 0
        for mode, nproc in (("dp", None), ("ddp", 2), ("pipeline", None)):
            recipe = load(None, *runs.BASE.split(), f"mode={mode}").replace(model__name="mlp")
            # Simulated CUDA is a mode of the caller's, which the command itself would leave.
            with mock.patch.object(summary, "summarize", summary.summarize.__wrapped__):
                assert plan(recipe, nproc, every=mode == "dp")
            for measured in (StepParts(1.0), StepParts(1.0, communication=0.5)):
                judge(measured, {"steps": 1.0}, recipe, Setting(nproc or 1, gpu=True))
        assert machine.errors == []


def labels(machine):
    """Assert that a prediction worker on a card has the labels of the CPU."""
    preparation = Preparation(8, 8, 1, (0.5,), (0.5,))
    torch.manual_seed(0)
    model = build(ModelRecipe(name="cnn"), 10, 1, 8)
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    collected = []
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        worker = Labeller(
            model,
            preparation,
            load(None, "precision=fp32", "threads=1"),
            Classification(load(None), ()),
            None,
        )
        worker.setup(device)
        collected.append(worker.batch(list(images)))
    assert [one.classes for one in collected[0]] == [one.classes for one in collected[1]]
    torch.testing.assert_close(
        *(torch.tensor([one.probabilities for one in rows]) for rows in collected)
    )
    forward = Forward(build(ModelRecipe(name="mlp"), 10, 1, 8))
    forward.setup(torch.device("cuda", 1))
    assert forward.batch(list(images.float())).device.index == 1
    assert machine.errors == []


def without_memory(machine):
    """Assert that the trial of a plan that does not fit frees its memory."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    strategy = uses.strategy_on((0, 1), "mode=pipeline pipeline.microbatches=4")
    strategy.forward_backward = full
    before = machine.emptied
    strategy.model = build(ModelRecipe(name="mlp"), 10, 1, 4)
    strategy.traced = trace(strategy.model, "mlp")
    assert strategy.trial(strategy.plan).seconds == math.inf
    assert machine.emptied == before + 1


@pytest.mark.full("28 runs of ranks")
def test_ranks_on_cuda_are_ranks_on_the_cpu():
    """ddp, fsdp, pipelines and local SGD over two ranks, on a card each and on one; gloo in NCCL's
    place.
    """
    for case, candidate in ranks.both().items():
        assert candidate["errors"] == [[], []] and candidate["held"] == [[True], [True]], case
        assert candidate["graphs"] == ("replayed" if "graphs" in case else "launched"), case
        assert candidate["cuda"] == pytest.approx(candidate["cpu"], rel=1e-4), case
        waits = {tuple(place) for place in candidate["waits"]} - ranks.ALLOWED.get(case, set())
        assert waits == set(), case


@pytest.mark.slow(cases=["mode=pipeline-0:3-1"])
@pytest.mark.parametrize(
    ("words", "hung", "timeout"),
    [
        (["mode=single"], "0:3", 1),
        (["mode=pipeline", "pipeline.schedule=streams", "pipeline.microbatches=2"], "0:3", 1),
        pytest.param(["mode=ddp", "nproc=2"], "1:3", 15, marks=pytest.mark.full("waits for ranks")),
        pytest.param(
            ["mode=ddp", "nproc=2", "graphs=true"],
            "1:7",
            15,
            marks=pytest.mark.full("waits for ranks"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_device_that_never_ends_its_work_ends_the_run(words, hung, timeout, tmp_path):
    """No rank waits for it, and no signal is needed."""
    words = [
        *words,
        "recipe=digits",
        "plugin=tests.simulated.simcuda.plugin",
        "model.name=mlp",
        "max_steps=9",
    ]
    env = {"TRAINER_TEST_HUNG": hung}
    completed = trainer(*words, f"timeout={timeout}", f"output={tmp_path / 'run'}", *QUIET, env=env)
    assert completed.returncode == 7, completed.stdout + completed.stderr
    assert re.search(rf"cuda:{hung[0]} .*\btimeout={timeout}\b", completed.stderr)
    assert "Traceback" not in completed.stderr
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_a_card_that_is_full_leaves_its_shards_on_the_host(tmp_path):
    words = [
        "recipe=digits",
        "plugin=tests.simulated.simcuda.plugin",
        "model.name=mlp",
        "max_steps=3",
        *QUIET,
    ]
    words += ["mode=fsdp", "nproc=2", "channels_last=false"]
    full = trainer(*words, f"output={tmp_path / 'full'}", env={"TRAINER_FAULT": "oom@0:2"})
    assert full.returncode == 6 and "fsdp.offload=true" in suggested(full.stderr), full.stderr
    ok(*words, "fsdp.offload=true", f"output={tmp_path / 'run'}")
    sharding = result(tmp_path / "run")["facts"]["sharding"]
    assert "host" in sharding and "fsdp.offload" not in sharding
    again = trainer(
        *words,
        "fsdp.offload=true",
        f"output={tmp_path / 'again'}",
        env={"TRAINER_FAULT": "oom@0:2"},
    )
    assert "fsdp.offload" not in again.stderr, again.stderr
    assert re.search(r"\boptimizer .*\b0 B\b", again.stderr), again.stderr


# Cards that are unlike each other, and reach each other through the host alone.

UNLIKE = (
    Card(),
    Card(
        "Tesla T4",
        15 << 30,
        (7, 5),
        peers=False,
    ),
)


@pytest.mark.full("starts from nothing")
def test_unequal_cards_are_reported_correctly():
    """The smallest memory counts if all must have enough."""
    with runs.alone(), simulated(UNLIKE) as machine:
        report = Findings()
        check_cards(report)
        text = report.text()
        for line in (
            "HBM3, 80.0 of 80.0 GiB free",
            "T4, 15.0 of 15.0 GiB free",
            "right in all 2 ways",
        ):
            assert line in text, text
        assert text.count("computes correctly") == 2
        assert (
            own_memory(
                Layout(
                    load(None, "mode=ddp"),
                    2,
                    ("cuda:0", "cuda:1"),
                ),
                2,
            )[0]
            == 15 << 30
        )
        old = torch.device("cuda", 1)
        assert is_emulated("bf16", old) and not is_emulated("bf16", CARD)
        assert not is_emulated("fp16", old)
        assert look_up_peak_flops(CARD, "fp16") == 989e12
        assert look_up_peak_flops(torch.device("cuda", 1), "fp16") == 65e12
        assert (
            uses.strategy_on((0, 1), "mode=pipeline pipeline.microbatches=4").find_free_bytes()
            <= 15 << 30
        )
        assert machine.errors == []


@pytest.mark.parametrize(
    "mode", ["split", pytest.param("pipeline", marks=pytest.mark.full("one of two alike"))]
)
def test_a_model_on_unlike_cards_is_the_model_on_the_cpu(mode, tmp_path):
    words = f"mode={mode} pipeline.cuts=[7] model.name=cnn {TWO}"
    cuda = runs.train_on_cuda(words, tmp_path / "cuda", UNLIKE)
    assert cuda.errors == []
    assert cuda.losses == pytest.approx(runs.on_cpu(words).losses, rel=1e-4)
