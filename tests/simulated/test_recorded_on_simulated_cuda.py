"""Recorded pipelines of one process on simulated cards: no race, no wait in a step, the result of launched steps."""

import pytest

from tests.simulated.simcuda import runs
from tests.simulated.test_graphs_on_simulated_cuda import NOT_EVERY_STEP, alike, both
from trainer.models.balance import BlockCost
from trainer.modes.pipeline.stages import Staged

ONE, TWO, THREE = "devices=[cuda:0,cuda:0]", "devices=[cuda:0,cuda:1]", "devices=[cuda:0,cuda:1,cuda:2]"
PIPE = "mode=pipeline pipeline.microbatches=4"
RUNS = [
    f"{PIPE} model.name=cnn accumulate=2 clip_grad_norm=1 {ONE}",
    f"{PIPE} model.name=cnn clip_grad_norm=1 ema=0.9 {TWO}",
    f"{PIPE} model.name=cnn model.freeze=1 {TWO}",
]
MORE = [
    f"{PIPE} model.name=noisy precision=bf16 {ONE}",
    f"{PIPE} model.name=noisy accumulate=2 {TWO}",
    f"{PIPE} model.name=cnn optimizer.name=adamw {THREE}",
    f"{PIPE} model.name=mlp precision=fp16 clip_grad_norm=1 {TWO}",
    f"mode=pipeline pipeline.split_size=3 model.name=noisy {THREE}",
    f"mode=split model.name=noisy {ONE}",
    f"mode=split model.name=noisy optimizer.name=adamw accumulate=2 {TWO}",
    f"mode=split model.name=mlp precision=fp16 {THREE}",
]


def probe(self, traced, rows):
    """Cuts that are the same in every run."""
    return [BlockCost(1.0, 2.0, 8)] * (len(traced.cuts) + 1)


@pytest.fixture(autouse=True)
def three_cards(monkeypatch):
    monkeypatch.setattr(Staged, "probe", probe)
    monkeypatch.setattr(
        runs, "train_on_cuda", lambda words, folder, cards, real=runs.train_on_cuda: real(words, folder, 3)
    )


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, marks=[pytest.mark.slow] * (words != RUNS[2])) for words in RUNS),
        *(pytest.param(words, marks=pytest.mark.full if "noisy" in words else pytest.mark.slow) for words in MORE),
    ],
)
def test_a_run_with_replays_is_the_run_without(words):
    launched, replayed, count, said = both(f"{words} graphs=true")
    assert said == [] and replayed.errors == []
    assert alike(launched, replayed) and count > 8
    assert replayed.waits.inside(runs.IN_A_STEP, *NOT_EVERY_STEP) == {}
