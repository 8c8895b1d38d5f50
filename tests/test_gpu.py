"""What needs a CUDA device; skipped with a reason where there is none."""

from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import QUIET, free_port, losses, ok, result, torchrun, trainer
from tests.modes import test_parity as parity
from tests.modes.ways import EXACT, ONE_PROCESS

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
SAME = ["recipe=digits", "mode=single", "model.name=cnn_gn", "optimizer.lr=0.001", "max_steps=20", *QUIET]


def test_the_losses_of_the_cpu(tmp_path):
    ok(*SAME, f"output={tmp_path / 'cpu'}")
    ok(*SAME, f"output={tmp_path / 'cuda'}", env=GPU)
    assert result(tmp_path / "cuda")["devices"] == ["cuda:0"]
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
    assert result(tmp_path / "cuda")["peak_memory_bytes"]["cuda:0"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resnet50_with_everything_on(precision, tmp_path):
    words = [
        "recipe=resnet50",
        "mode=single",
        f"precision={precision}",
        "compile=true",
        "batch_size=64",
        "max_steps=12",
    ]
    done = ok(*words, *QUIET, f"output={tmp_path / 'run'}", env=GPU, timeout=600)
    assert "SYNTHETIC" in done.stdout and result(tmp_path / "run")["throughput"]["samples_per_sec"] > 100


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
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=4"],
        ["mode=split", "devices=[cuda:0,cuda:0]"],
    ],
    ids=" ".join,
)
def test_replayed_steps_are_the_launched_ones(words, tmp_path):
    given = {word.partition("=")[0] for word in words}
    words = [*(word for word in SAME if word.partition("=")[0] not in given), *words, "deterministic=true"]
    weights = {}
    for way in ("launched", "replayed"):
        done = ok(*words, f"graphs={str(way == 'replayed').lower()}", f"output={tmp_path / way}", env=GPU)
        assert result(tmp_path / way)["graphs"] == way, done.stdout
        weights[way] = load_file(tmp_path / way / "last.safetensors")
    assert losses(tmp_path / "replayed") == losses(tmp_path / "launched")
    for name, tensor in weights["launched"].items():
        assert torch.equal(tensor, weights["replayed"][name]), name


def test_a_model_that_waits_is_launched(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITS)
    words = [word for word in SAME if not word.startswith("model.name=")]
    words += ["plugin=waiting", "model.name=waits", "graphs=true", f"output={tmp_path / 'run'}"]
    done = ok(*words, env={**GPU, "PYTHONPATH": str(tmp_path)})
    assert result(tmp_path / "run")["graphs"] == "launched" and "waiting.py" in done.stdout


def test_more_ranks_than_gpus_names_the_right_count():
    done = trainer("recipe=digits", "nproc=2", env=GPU)
    assert done.returncode == 2 and "nproc=1" in done.stderr


@pytest.mark.parametrize(
    "mode",
    [
        ["mode=dp", "devices=[cuda:0,cuda:0]"],
        ["mode=split", "devices=[cuda:0,cuda:0]"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=4"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0,cuda:0]", "pipeline.split_size=20", "precision=bf16"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=auto", "pipeline.timeline=true"],
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
    done = ok("recipe=digits_local_sgd", "nproc=4", "devices=[cuda:0]", *QUIET, f"output={tmp_path / 'run'}", env=GPU)
    found = result(tmp_path / "run")
    assert found["world_size"] == 4 and found["val_top1"] > 0.95, done.stdout
    assert found["throughput"]["per_device"] == pytest.approx(found["throughput"]["samples_per_sec"])


OVER_NCCL = {name: words for name, words in EXACT.items() if name not in ONE_PROCESS}
OVER_NCCL["fsdp offload"] = ["mode=fsdp", "nproc=2", "fsdp.offload=true"]
FULL_FP32 = {**GPU, "NVIDIA_TF32_OVERRIDE": "0"}
TRAINED = [*parity.SMALL, *parity.SHALLOW, *parity.TWICE]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    ok(*TRAINED, "mode=single", f"output={folder}", env=FULL_FP32)
    return folder


@pytest.mark.parametrize("name", OVER_NCCL)
def test_ranks_on_one_card_over_nccl_train_as_single_does(name, single, tmp_path):
    """NCCL refuses two ranks of one host on one card: to it, each rank is on a host of its own."""
    (nproc,) = (word for word in OVER_NCCL[name] if word.startswith("nproc="))
    words = [*TRAINED, *OVER_NCCL[name], f"output={tmp_path / 'run'}"]
    words.remove(nproc)
    count, port = int(nproc.partition("=")[2]), free_port()
    with ExitStack() as closing:
        ranks = []
        for rank in range(count):
            node = [f"--nnodes={count}", f"--node_rank={rank}", "--nproc_per_node=1"]
            met = [*node, "--master_addr=127.0.0.1", f"--master_port={port}"]
            env = {**FULL_FP32, "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            ranks.append(closing.enter_context(torchrun(*words, arguments=met, env=env)))
        ended = [(rank.communicate(timeout=180)[0], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0] * count, ended
    assert losses(tmp_path / "run") == pytest.approx(losses(single), rel=parity.FP32)
    assert parity.norms(tmp_path / "run") == pytest.approx(parity.norms(single), rel=parity.FP32)
    apart = parity.distances(parity.tensors(tmp_path / "run"), parity.tensors(single))
    assert all(distance < parity.FP32 for distance in apart.values()), apart
