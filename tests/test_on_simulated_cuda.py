"""The project on simulated CUDA devices: no race, no reuse, no mix-up, no wait in a step, and the maths of the CPU."""

import pytest
import torch

from tests.simcuda import runs

TWO, SAME, THREE = (f"devices=[{','.join(f'cuda:{k}' for k in cards)}]" for cards in ((0, 1), (0, 0), (0, 1, 2)))
EVERYTHING = (
    "clip_grad_norm=1 ema=0.9 accumulate=2 augment.mixup=0.2 augment.cutmix=0.2 augment.erase=0.5 augment.crop=pad "
    "augment.hflip=0.5 save.every_steps=2"
)
RUNS = [
    f"mode=single {EVERYTHING}",
    "mode=single model.name=mlp precision=fp16 clip_grad_norm=1 ema=0.9",
    "mode=single model.name=mlp augment.auto=trivial optimizer.name=adamw",
    f"mode=split {TWO} {EVERYTHING}",
    f"mode=split model.name=mlp precision=fp16 clip_grad_norm=1 {TWO}",
    f"mode=pipeline model.name=cnn pipeline.microbatches=3 pipeline.recompute=true pipeline.timeline=true {TWO}",
    f"mode=pipeline model.name=mlp precision=bf16 pipeline.split_size=5 clip_grad_norm=1 ema=0.9 {SAME}",
    f"mode=pipeline model.name=mlp precision=fp16 pipeline.microbatches=4 accumulate=2 {THREE}",
    f"mode=pipeline model.name=mlp batch_size=24 {TWO}",  # finds its own number of micro-batches
    f"mode=dp clip_grad_norm=1 ema=0.9 {TWO}",
    f"mode=dp model.name=mlp precision=bf16 {THREE}",
]
MORE = [
    f"mode=pipeline {EVERYTHING} pipeline.microbatches=4 {THREE}",
    f"mode=pipeline {EVERYTHING} pipeline.microbatches=2 {SAME}",
    f"mode=pipeline model.name=vit_tiny pipeline.split_size=7 {TWO}",
    f"mode=pipeline model.name=resnet8 data.channels=3 pipeline.microbatches=3 {TWO}",
    f"mode=split model.name=resnet8 data.channels=3 pipeline.recompute=true {THREE}",
    f"mode=dp {EVERYTHING} {THREE}",
    f"mode=dp model.name=mlp precision=fp16 clip_grad_norm=1 {TWO}",
    "mode=single model.name=cnn augment.auto=rand augment.crop=resized",
    "mode=single model.name=mlp augment.auto=autoaugment precision=bf16 accumulate=2",
]
LONG = [pytest.param(words, marks=pytest.mark.full("variants of the other runs")) for words in MORE]


@pytest.mark.parametrize("words", [*RUNS, *LONG])
def test_a_run_on_cuda_is_the_run_on_the_cpu(words):
    cuda = runs.on_cuda(words)
    assert cuda.errors == [] and cuda.result["status"] == "completed"
    cpu = runs.on_cpu(words)
    tolerance = 2e-2 if "bf16" in words or "fp16" in words else 1e-4
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.tensor(cuda.losses), torch.tensor(cpu.losses), **close)
    torch.testing.assert_close(cuda.weights, cpu.weights, **close)
    assert cuda.result["val_loss"] == pytest.approx(cpu.result["val_loss"], rel=tolerance)
    driven = {name for name in ("cuda:0", "cuda:1", "cuda:2") if name in words} or {"cuda:0"}
    assert cuda.result["peak_memory_bytes"].keys() == driven and all(cuda.result["peak_memory_bytes"].values())
