"""Several CUDA devices driven by one process, simulated: precision, random numbers, memory and
order of work.
"""

import json
import shutil

import pytest
import torch
from torch import nn

from tests.command_line import losses
from tests.simulated.simcuda import runs, simulated
from tests.strategies import staged
from trainer.data import Batch
from trainer.models import zoo
from trainer.modes.pipeline import stages, streams
from trainer.training.randomness import read_random_states, restore_random_states

CARDS = tuple(torch.device("cuda", index) for index in range(2))


def set_up(words, model, rows=16):
    return staged(model, CARDS, words, (rows, 4), classes=3)


def halves():
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    )


def batch(rows=16):
    return Batch(
        torch.randn(rows, 4).to(CARDS[0]),
        torch.zeros(rows, dtype=torch.int64).to(CARDS[0]),
        rows,
    )


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_replicas_compute_in_the_recipes_precision(precision, expected):
    collected = []
    with simulated(2) as machine:
        model = halves()
        model[0].register_forward_hook(
            lambda module, inputs, output: collected.append((output.device.index, output.dtype))
        )
        strategy = set_up(f"mode=dp precision={precision}", model)
        collected.clear()
        strategy.train()
        strategy.forward_backward(batch(), 1 / 16)
        assert sorted(collected, key=str) == [(0, expected), (1, expected)]
        assert not torch.is_autocast_enabled("cuda") and machine.errors == []


# Random numbers.


@pytest.fixture
def dropping(monkeypatch):
    """A model with dropout in each of its halves, by name."""

    def build(num_classes, channels, image_size):
        wide = channels * image_size**2
        halves = nn.Linear(wide, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5)
        return nn.Sequential(nn.Flatten(), *halves, nn.Linear(32, num_classes))

    monkeypatch.setitem(zoo.builders, "dropping", build)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "pipeline pipeline.microbatches=2", "dp"])
def test_a_run_goes_on_exactly_with_dropout_on_several_cards(mode, dropping, tmp_path):
    words = (
        f"mode={mode} model.name=dropping devices=[cuda:0,cuda:1] "
        "save.every_steps=2 data.samples=64"
    )
    whole = runs.train_on_cuda(words, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (last,) = (
        path for path in (tmp_path / "cut" / "checkpoints").iterdir() if path.name.endswith("00004")
    )
    shutil.rmtree(last)
    (tmp_path / "cut" / "result.json").write_text(json.dumps({"status": "preempted"}))
    cut = runs.train_on_cuda(f"{words} resume=auto", tmp_path / "cut")
    assert losses(tmp_path / "cut")[-2:] == whole.losses[-2:]
    assert len(set(whole.losses)) == 4
    torch.testing.assert_close(cut.weights, whole.weights, rtol=0, atol=0)
    assert cut.errors == []


def test_a_generator_for_each_card_is_saved_and_older_checkpoints_go_on():
    with simulated(3) as machine:
        torch.manual_seed(1)
        cards = [torch.device("cuda", index) for index in (2, 0, 2)]
        torch.rand(3, device=cards[0])
        states = read_random_states(cards)
        drawn = [torch.rand(4, device=card).cpu() for card in cards]
        assert restore_random_states(states, cards) == []
        torch.testing.assert_close(
            [torch.rand(4, device=card).cpu() for card in cards],
            drawn,
            rtol=0,
            atol=0,
        )
        elsewhere = [torch.device("cuda", index) for index in (0, 1)]  # other cards in their place
        assert restore_random_states(states, elsewhere) == []
        torch.testing.assert_close(
            [torch.rand(4, device=card).cpu() for card in elsewhere],
            drawn[:2],
            rtol=0,
            atol=0,
        )
        old = {key: value for key, value in states.items() if key != "cuda:1"}
        assert restore_random_states(old, cards) == [cards[1]]
        assert torch.equal(torch.rand(4, device=cards[0]).cpu(), drawn[0])
        assert machine.errors == []


# Memory and order of work.


@pytest.mark.slow
def test_trials_of_plans_leave_no_streams_and_no_memory(monkeypatch):
    monkeypatch.setattr(stages, "MAX_TRIAL_STEPS", 2)
    with simulated(2) as machine:
        strategy = set_up("mode=pipeline", halves(), rows=16)
        assert len(strategy.tuned["trials"]) > 1
        # Default ones, a stage's, two of an edge each way.
        assert len(machine.streams) == 2 + 2 + 2 * 2
        for card in range(2):
            allocated = torch.cuda.memory_allocated(card)
            assert (
                torch.cuda.memory_reserved(card)
                == torch.cuda.max_memory_allocated(card)
                == allocated
                > 0
            )


def test_the_order_of_work_is_found_once_for_a_plan(monkeypatch):
    asked = []

    def counted(*counts):
        asked.append(counts)
        return real(*counts)

    real = streams.compute_issue_order
    monkeypatch.setattr(streams, "compute_issue_order", counted)
    with simulated(2):
        strategy = set_up("mode=pipeline pipeline.microbatches=4", halves())
        for rows in (16, 16, 3, 16):
            strategy.forward_backward(batch(rows), 1 / rows)
    assert asked == [(2, 4), (2, 3)]
