"""Compilation of a run: one graph per stage for training and one for evaluation, whatever else the
run does.
"""

import importlib
import json
from collections import Counter

import pytest
import torch

from tests.command_line import QUIET, losses, ok, result, trainer
from trainer.models.recompute import list_runs
from trainer.models.zoo import build
from trainer.recipe import load
from trainer.saving import checkpoint

WORDS = [
    "data.name=synthetic",
    "data.image_size=8",
    "data.samples=96",
    "data.val_samples=20",
    "model.name=cnn",
    "compile=true",
    "batch_size=32",
    "optimizer.lr=0.01",
    "threads=1",
    "data.workers=0",
    *QUIET,
]
CUT = ["pipeline.cuts=[4]", "pipeline.microbatches=2"]
ALL_ON = ["accumulate=2", "ema=0.9", "augment.mixup=0.2", "clip_grad_norm=1"]
EACH = None  # Equal blocks in sequence share one graph, without another one that recomputes.
WAYS = {  # words, and how many stages or units a rank compiles
    "single": (["mode=single"], 1),
    "ddp": (["mode=ddp", "nproc=2"], 1),
    "split": (["mode=split", "devices=[cpu,cpu]", CUT[0]], 2),
    "recomputed": (["mode=split", "devices=[cpu,cpu]", CUT[0], "recompute=true"], 2),
    "streams": (["mode=pipeline", "devices=[cpu,cpu]", *CUT], 2),
    "1f1b": (["mode=pipeline", "nproc=2", *CUT], 1),
    "gpipe": (["mode=pipeline", "nproc=2", "pipeline.schedule=gpipe", *CUT], 1),
    "interleaved1f1b": (
        ["mode=pipeline", "nproc=2", "pipeline.schedule=interleaved1f1b", CUT[1]],
        2,
    ),
    "sync_bn": (["mode=ddp", "nproc=2", "sync_bn=true"], 1),
    "local_sgd": (["mode=local_sgd", "nproc=2"], 1),
    "fsdp": (["mode=fsdp", "nproc=2"], 4),
    "single, anew": (["mode=single", "recompute=true"], EACH),
    "ddp, anew": (["mode=ddp", "nproc=2", "recompute=true", "sync_bn=true"], EACH),
    "fsdp, anew": (["mode=fsdp", "nproc=2", "recompute=true"], 4),
}
OFTEN = ("single", "1f1b", "single, anew")


def counted(path, *words, **env):
    """Return the graphs by rank and by whether they train, of a run whose compiler only counts."""
    path.unlink(missing_ok=True)
    run = trainer if env else ok
    run(
        *WORDS,
        "plugin=tests.training.compile_counter",
        *words,
        env={"TRAINER_TEST_COMPILED": str(path), **env},
    )
    graphs = [json.loads(line) for line in path.read_text().splitlines()]
    assert not any(graph["breaks"] or graph["dynamic"] for graph in graphs), graphs
    return Counter((graph["rank"], graph["training"]) for graph in graphs)


@pytest.mark.full(cases=["single"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [w if w in OFTEN else pytest.param(w, marks=pytest.mark.full) for w in WAYS]
)
def test_one_graph_a_stage_trains_and_one_evaluates(way, tmp_path, full):
    """The run has an evaluation between two epochs, accumulation, averages that are swapped in and
    mixed images, and is resumed.
    """
    ways, stages = WAYS[way]
    ranks = 2 if "nproc=2" in ways else 1
    stages = stages or len(
        list_runs(
            build(
                load(None, *WORDS).model,
                10,
                3,
                8,
            )
        )
    )
    expected = {
        (str(rank), training): stages for rank in range(ranks) for training in (True, False)
    }
    words = [*ways, *ALL_ON, f"output={tmp_path / 'run'}", "epochs=2"]
    if full or way == "single":
        assert counted(tmp_path / "graphs", *words, TRAINER_FAULT="kill@0:5") == expected
    assert counted(tmp_path / "graphs", *words, "resume=auto") == expected
    assert result(tmp_path / "run")["steps"] == 6 and len(losses(tmp_path / "run")) == 6
    first = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert first.position == (3, 0, 3), (
        "of before the first evaluation, which takes long to compile"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "images", ["data.channels=1", "data.channels=3", "data.channels=3 channels_last=true"]
)
def test_the_order_of_images_in_memory_is_known_before_the_first_batch(images, tmp_path):
    """DDP orders its buckets by passes on empty data, which are compiled as well."""
    words = [*images.split(), "mode=ddp", "nproc=2", f"output={tmp_path / 'run'}", "epochs=1"]
    assert set(counted(tmp_path / "graphs", *words).values()) == {1}


def test_where_results_have_to_repeat_the_compiler_holds_no_races(tmp_path, monkeypatch):
    """The compiler chooses kernels by their speed at this moment, and they round differently."""
    compiler = importlib.import_module("torch._inductor.config")
    from trainer.training import randomness

    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    monkeypatch.setattr(compiler, "deterministic", False)
    for words, expected in (((True, True), True), ((True, False), False), ((False, True), False)):
        with randomness.restore_global_state():
            randomness.seed_everything(1, *words)
            assert compiler.deterministic is expected
        assert compiler.deterministic is False, "a run in a program leaves no trace"
