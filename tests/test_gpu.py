"""Tests that need a CUDA device; they are skipped with a reason without one."""

import csv
import io
from contextlib import ExitStack
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.command_line import QUIET, free_port, latest, losses, ok, result, torchrun, trainer
from tests.data.photo_folders import scene
from tests.modes import ways
from tests.modes.ways import EXACT, ONE_PROCESS
from trainer.data.gpu_decoding import load_decoder
from trainer.data.photos.jpeg import decode_jpeg

pytestmark = pytest.mark.gpu
GPU = {"CUDA_VISIBLE_DEVICES": "0"}
WAITS = """
import trainer
from torch import nn

@trainer.register_model("waits")
class Waits(nn.Module):
    def __init__(self, num_classes, channels, image_size):
        super().__init__()
        self.layer = nn.Linear(channels * image_size**2, num_classes)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        return out if float(out.detach().sum()) > 0 else 2 * out
"""
SAME = [
    "recipe=digits",
    "mode=single",
    "model.name=cnn_gn",
    "optimizer.lr=0.001",
    "max_steps=20",
    *QUIET,
]


def assert_same_bits(*folders):
    first, second = (load_file(folder / "last.safetensors") for folder in folders)
    assert losses(folders[0]) == losses(folders[1])
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def both_ways(words, folder):
    """The folders of two runs: one launches its steps, the other replays them."""
    for way in ("launched", "replayed"):
        completed = ok(
            *words,
            f"graphs={str(way == 'replayed').lower()}",
            f"output={folder / way}",
            env=GPU,
            timeout=300,
        )
        assert result(folder / way)["graphs"] == way, completed.stdout
    return folder / "launched", folder / "replayed"


def test_the_losses_of_the_cpu(tmp_path):
    ok(*SAME, f"output={tmp_path / 'cpu'}")
    ok(*SAME, f"output={tmp_path / 'cuda'}", env=GPU)
    assert result(tmp_path / "cuda")["devices"] == ["cuda:0"]
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
    assert result(tmp_path / "cuda")["peak_memory_bytes"]["cuda:0"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resnet50_with_everything_on(precision, tmp_path):
    """The sums of its steps have no fixed order, but the passes that compare its blocks must have
    one.
    """
    words = [
        "recipe=resnet50",
        "mode=single",
        f"precision={precision}",
        "compile=true",
        "recompute=true",
        "batch_size=64",
        "max_steps=12",
    ]
    completed = ok(*words, *QUIET, f"output={tmp_path / 'run'}", env=GPU, timeout=600)
    assert "SYNTHETIC" in completed.stdout
    assert result(tmp_path / "run")["throughput"]["samples_per_sec"] > 100


def test_killed_and_resumed_is_byte_equal_with_deterministic_kernels(tmp_path):
    words = [*SAME, "deterministic=true", "save.every_steps=5"]
    ok(*words, f"output={tmp_path / 'whole'}", env=GPU)
    trainer(*words, f"output={tmp_path / 'cut'}", env={**GPU, "TRAINER_FAULT": "kill@0:12"})
    ok(*words, f"output={tmp_path / 'cut'}", "resume=auto", env=GPU)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=resnet20", "precision=bf16", "ema=0.99", "clip_grad_norm=5"],
        ["model.name=vit_tiny", "optimizer.name=adamw", "accumulate=2"],
        ["model.name=cnn", "optimizer.name=muon", "precision=bf16"],
        ["model.name=cnn", "precision=fp16"],
        ["model.name=cnn_gn", "recompute=true"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=4"],
        ["mode=split", "devices=[cuda:0,cuda:0]"],
    ],
    ids=" ".join,
)
def test_replayed_steps_are_the_launched_ones(words, tmp_path):
    arguments = {word.partition("=")[0] for word in words}
    words = [
        *(word for word in SAME if word.partition("=")[0] not in arguments),
        *words,
        "deterministic=true",
    ]
    assert_same_bits(*both_ways(words, tmp_path))


def test_a_student_is_replayed_with_its_teacher(tmp_path):
    ok(*SAME, f"output={tmp_path / 'teacher'}", env=GPU)
    words = [
        *SAME,
        f"distill.teacher={tmp_path / 'teacher'}",
        "augment.mixup=0.4",
        "deterministic=true",
    ]
    assert_same_bits(*both_ways(words, tmp_path))


def test_replayed_steps_of_a_compiled_model_are_its_launched_ones(tmp_path):
    words = latest(*SAME, "model.name=resnet8", "compile=true", "deterministic=true")
    launched, replayed = both_ways(words, tmp_path)
    assert losses(replayed) == pytest.approx(losses(launched), rel=1e-5)


BIG = [
    "mode=single",
    "data.name=synthetic",
    "data.val_samples=32",
    "model.num_classes=10",
    "optimizer.lr=0.001",
    "data.image_size=224",
    "max_steps=2",
    "epochs=1",
    "deterministic=true",
    "graphs=false",
    *QUIET,
]


@pytest.mark.parametrize("more", [[], ["graphs=true"], ["compile=true"]], ids=" ".join)
def test_recomputing_activations_needs_less_memory_of_a_card(more, tmp_path):
    words = latest(
        *BIG, "model.name=resnet18", "batch_size=64", "data.samples=640", "max_steps=10", *more
    )
    for way in ("true", "false"):
        ok(*words, f"recompute={way}", f"output={tmp_path / way}", env=FULL_FP32, timeout=300)
    if "compile=true" in more:  # Blocks are compiled one at a time: other kernels.
        assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-4)
    else:
        assert_same_bits(tmp_path / "true", tmp_path / "false")
    kept, all_kept = (
        result(tmp_path / way)["peak_memory_bytes"]["cuda:0"] for way in ("true", "false")
    )
    assert kept < 0.85 * all_kept, f"{kept / 2**30:.2f} GiB of {all_kept / 2**30:.2f}"


@pytest.fixture(scope="module")
def too_many():
    """Images of 224 px for which ResNet-18 needs more memory than the card has: about 22 MiB each
    for 16 images.
    """
    return torch.cuda.get_device_properties(0).total_memory // 2**24 // 256 * 256


def test_the_fewest_pieces_that_fit_a_card(too_many, tmp_path):
    words = [*BIG, "model.name=resnet18", f"batch_size={too_many}", f"data.samples={2 * too_many}"]
    ok(*words, "accumulate=auto", f"output={tmp_path / 'auto'}", env=GPU, timeout=300)
    run_result = result(tmp_path / "auto")
    pieces = [n for n in range(1, too_many + 1) if too_many % n == 0]
    assert run_result["accumulate"] > 1
    ok(
        *words,
        f"accumulate={run_result['accumulate']}",
        f"output={tmp_path / 'typed'}",
        env=GPU,
        timeout=300,
    )
    assert_same_bits(tmp_path / "typed", tmp_path / "auto")
    fewer = pieces[pieces.index(run_result["accumulate"]) - 1]
    short = trainer(
        *words, f"accumulate={fewer}", f"output={tmp_path / 'fewer'}", env=GPU, timeout=300
    )
    assert short.returncode == 6 and "accumulate=auto" in short.stderr


def test_the_fewest_blocks_that_make_a_step_fit_are_recomputed(too_many, tmp_path):
    words = [*BIG, "model.name=resnet18", f"batch_size={too_many}", f"data.samples={2 * too_many}"]
    ok(*words, "recompute=auto", f"output={tmp_path / 'auto'}", env=GPU, timeout=300)
    count, of, all_of_them, _ = result(tmp_path / "auto")["recompute"].split()
    assert of == "of" and 0 < int(count) < int(all_of_them)
    peak = result(tmp_path / "auto")["peak_memory_bytes"]["cuda:0"]
    assert 0.6 < peak / torch.cuda.get_device_properties(0).total_memory < 1
    short = trainer(*words, "recompute=false", f"output={tmp_path / 'kept'}", env=GPU, timeout=300)
    assert short.returncode == 6 and "recompute" in short.stderr


@pytest.mark.parametrize("more", [[], ["graphs=true"]], ids=" ".join)
def test_images_of_six_channels_that_are_not_square(more, tmp_path):
    pixels = np.random.default_rng(0)
    for split, label, number in product(
        ("train", "val"),
        ("a", "b"),
        range(16),
    ):
        folder = tmp_path / "fields" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        np.save(
            folder / f"{number}.npy",
            pixels.integers(
                0,
                2000 + 4000 * (label == "b"),
                (48, 64, 6),
                "uint16",
            ),
        )
    words = [
        "mode=single",
        "data.name=imagefolder",
        f"data.root={tmp_path / 'fields'}",
        "data.channels=6",
        "data.pixel_range=[0,10000]",
        "data.image_size=[32,48]",
        "batch_size=8",
        "model.name=cnn_gn",
    ]
    words += ["optimizer.lr=0.001", "epochs=4", *QUIET]
    ok(*words, f"output={tmp_path / 'cpu'}")
    ok(*words, *more, f"output={tmp_path / 'cuda'}", env=GPU)
    assert len(losses(tmp_path / "cpu")) == 16
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-3)


def test_a_model_that_waits_is_launched(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITS)
    words = [word for word in SAME if not word.startswith("model.name=")]
    words += ["plugin=waiting", "model.name=waits", "graphs=true", f"output={tmp_path / 'run'}"]
    completed = ok(*words, env={**GPU, "PYTHONPATH": str(tmp_path)})
    assert result(tmp_path / "run")["graphs"] == "launched" and "waiting.py" in completed.stdout


def test_more_ranks_than_gpus_names_the_right_count():
    completed = trainer("recipe=digits", "nproc=2", env=GPU)
    assert completed.returncode == 2 and "nproc=1" in completed.stderr


@pytest.mark.parametrize(
    "mode",
    [
        ["mode=dp", "devices=[cuda:0,cuda:0]"],
        ["mode=split", "devices=[cuda:0,cuda:0]"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=4"],
        [
            "mode=pipeline",
            "devices=[cuda:0,cuda:0,cuda:0]",
            "pipeline.split_size=20",
            "precision=bf16",
        ],
        [
            "mode=pipeline",
            "devices=[cuda:0,cuda:0]",
            "pipeline.microbatches=auto",
            "pipeline.timeline=true",
        ],
    ],
    ids=lambda words: " ".join(words),
)
def test_modes_of_one_process_on_one_card(mode, tmp_path):
    extra = [word for word in mode if word.startswith("precision")]
    ok(*SAME, *extra, f"output={tmp_path / 'single'}", env=GPU)
    words = [word for word in SAME if not word.startswith("mode=")]
    ok(*words, *mode, f"output={tmp_path / 'run'}", env=GPU)
    tolerance = 2e-2 if extra else 1e-3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "single"), rel=tolerance)
    assert len(result(tmp_path / "run")["devices"]) >= 2


def test_four_workers_of_local_sgd_on_one_card(tmp_path):
    completed = ok(
        "recipe=digits_local_sgd",
        "nproc=4",
        "devices=[cuda:0]",
        *QUIET,
        f"output={tmp_path / 'run'}",
        env=GPU,
    )
    run_result = result(tmp_path / "run")
    assert run_result["world_size"] == 4 and run_result["val_top1"] > 0.95, completed.stdout
    assert run_result["throughput"]["per_device"] == pytest.approx(
        run_result["throughput"]["samples_per_sec"]
    )


OVER_NCCL = {name: words for name, words in EXACT.items() if name not in ONE_PROCESS}
OVER_NCCL["ddp unequal"] = ["mode=ddp", "nproc=2", "shares=[3,1]"]
OVER_NCCL["ddp recomputed"] = ["mode=ddp", "nproc=2", "recompute=true", "accumulate=2"]
OVER_NCCL["fsdp unequal"] = ["mode=fsdp", "nproc=2", "shares=[3,1]", "recompute=true"]
for name in ("ddp", "fsdp", "1f1b", "interleaved1f1b"):
    OVER_NCCL[f"{name} replayed"] = [*EXACT[name], "graphs=true"]
OVER_NCCL["fsdp offload"] = ["mode=fsdp", "nproc=2", "fsdp.offload=true"]
FULL_FP32 = {**GPU, "NVIDIA_TF32_OVERRIDE": "0"}
TRAINED = [*ways.SMALL, *ways.SHALLOW, *ways.TWICE]


def over_nccl(run, words, count):
    """NCCL refuses two ranks of one host on one card: to it, each rank is on a host of its own."""
    port = free_port()
    with ExitStack() as closing:
        ranks = []
        for rank in range(count):
            node = [f"--nnodes={count}", f"--node_rank={rank}", "--nproc_per_node=1"]
            met = [*node, "--master_addr=127.0.0.1", f"--master_port={port}"]
            env = {**FULL_FP32, "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            ranks.append(
                closing.enter_context(torchrun(*words, f"output={run}", arguments=met, env=env))
            )
        ended = [(rank.communicate(timeout=180)[0], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0] * count, ended


def assert_same(run, single):
    assert losses(run) == pytest.approx(losses(single), rel=ways.FP32)
    assert ways.norms(run) == pytest.approx(ways.norms(single), rel=ways.FP32)
    apart = ways.distances(ways.tensors(run), ways.tensors(single))
    assert all(distance < ways.FP32 for distance in apart.values()), apart


@pytest.fixture(scope="module")
def trained():
    return []


@pytest.fixture
def single(trained, tmp_path_factory):
    """Return the run of the first test that asks, which may use the card by then."""
    if not trained:
        folder = tmp_path_factory.mktemp("single") / "run"
        ok(*TRAINED, "mode=single", f"output={folder}", env=FULL_FP32)
        trained.append(folder)
    return trained[0]


@pytest.mark.parametrize("name", OVER_NCCL)
def test_ranks_on_one_card_over_nccl_train_as_single_does(name, single, tmp_path):
    (nproc,) = (word for word in OVER_NCCL[name] if word.startswith("nproc="))
    words = [*TRAINED, *(word for word in OVER_NCCL[name] if word != nproc)]
    over_nccl(tmp_path / "run", words, int(nproc.partition("=")[2]))
    assert_same(tmp_path / "run", single)
    assert result(tmp_path / "run")["graphs"] == (
        "replayed" if "graphs=true" in words else "launched"
    )


@pytest.mark.parametrize("offload", ["false", "true"])
def test_matrices_in_shards_over_nccl(offload, tmp_path):
    words = [*TRAINED, "optimizer.name=muon"]
    ok(*words, "mode=single", f"output={tmp_path / 'single'}", env=FULL_FP32)
    over_nccl(tmp_path / "run", [*words, "mode=fsdp", f"fsdp.offload={offload}"], 2)
    # The iteration is in bf16, which amplifies rounding.
    expected = pytest.approx(losses(tmp_path / "single"), rel=2e-3)
    assert losses(tmp_path / "run") == expected


@pytest.mark.parametrize(
    "more",
    [["data.samples=32"], ["data.samples=160", "max_steps=8", "graphs=true"]],
    ids=["eager", "replayed"],
)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_gradients_of_several_messages_over_nccl(mode, more, tmp_path):
    """ViT-B/16: 330 MB of gradients, which are sent in a dozen buckets or units."""
    # The events contain the gradient norms.
    words = [word for word in BIG if word != "logging.tensorboard=false"]
    words += ["model.name=vit_b_16", "batch_size=16", "save.every_epochs=1", "ema=0.9"]
    words = latest(*words, *more)
    ok(*words, f"output={tmp_path / 'single'}", env=FULL_FP32)
    over_nccl(tmp_path / "run", [*words[1:], f"mode={mode}"], 2)
    assert_same(tmp_path / "run", tmp_path / "single")
    way = "replayed" if "graphs=true" in more else "launched"
    assert result(tmp_path / "run")["graphs"] == way


def test_a_large_teacher_in_shards_over_nccl(tmp_path):
    ok(
        *ways.SMALL,
        "model.name=resnet20",
        "data.samples=320",
        "epochs=1",
        f"output={tmp_path / 'teacher'}",
        env=GPU,
    )
    words = [*TRAINED, f"distill.teacher={tmp_path / 'teacher'}"]
    ok(*words, "mode=single", f"output={tmp_path / 'single'}", env=FULL_FP32)
    over_nccl(tmp_path / "run", [*words, "mode=fsdp"], 2)
    assert_same(tmp_path / "run", tmp_path / "single")


# Photos that a GPU decodes.

JPEGS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full color": {"subsampling": 0},
    "restarts": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", JPEGS)
def test_a_gpu_decodes_nearly_the_pixels_of_a_cpu(kind, channels):
    file = io.BytesIO()
    Image.fromarray(scene()).save(file, "JPEG", quality=90, **JPEGS[kind])
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    decode = load_decoder(torch.device("cuda", 0), channels)
    on_gpu = [image.cpu().int() for image in decode([data, data])]
    difference = (on_gpu[0] - decode_jpeg(data, channels).int()).abs().float()
    print(f"{kind}, {channels} channels: {difference.mean():.3f}, at most {difference.max():.0f}")
    assert torch.equal(*on_gpu) and difference.mean() <= 2


def test_a_run_whose_photos_the_gpu_decodes_learns_as_one_of_the_workers(tmp_path):
    for part, number in product(("train", "val"), range(32)):
        folder = tmp_path / "photos" / part / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.roll(scene(160 + number, 200), 90 * (number % 2), axis=2)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=60)
    words = ["data.name=imagefolder", f"data.root={tmp_path / 'photos'}", "data.image_size=128"]
    words += ["model.name=cnn_gn", "batch_size=8", "epochs=3", "augment.crop=resized", *QUIET]
    for where in ("cpu", "gpu"):
        ok(*words, f"data.decode={where}", f"output={tmp_path / where}", env=GPU)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=0.05)
    probabilities = []
    for where in ("cpu", "gpu"):
        folder = tmp_path / f"labels of the {where}"
        words = ["predict.split=val", "precision=fp32", f"data.decode={where}", f"output={folder}"]
        ok("predict", str(tmp_path / "gpu"), *words, env=GPU)
        rows = [*csv.DictReader((folder / "predictions.csv").open())]
        probabilities.append([float(row["probability"]) for row in rows])
    # The decoders differ a little.
    assert probabilities[0] != probabilities[1]
    assert probabilities[0] == pytest.approx(probabilities[1], abs=0.05)
