"""How a global batch is cut where memory is short."""

import re

import pytest

from tests.command_line import QUIET, ok, result, trainer
from trainer.recipe import load
from trainer.training.memory_needs import pieces_that_fit


@pytest.mark.parametrize(
    ("rows", "accumulate", "per_image", "room", "multiple", "expected"),
    [
        (64, 1, 1, 64, 1, 1),
        (64, 1, 1, 63, 1, 2),
        (64, 1, 1, 20, 1, 4),
        (64, 8, 1, 64, 1, 8),  # never fewer than the recipe says
        (60, 1, 1, 16, 1, 4),  # 60 / 4 = 15; only divisors count
        (64, 1, 1, 1, 2, 32),  # pairs stay together
        (64, 1, 1, 0, 1, 64),  # nothing fits: the smallest there is
        (64, 1, 1, -5, 1, 64),
        (2, 2, 1, 0, 2, None),  # a pair is no more to be parted
    ],
)
def test_pieces(rows, accumulate, per_image, room, multiple, expected):
    made = load(None, f"batch_size={rows}", f"augment.mixup={multiple - 1}")
    assert pieces_that_fit(made, 1, accumulate, per_image, room) == expected


def test_pieces_of_unequal_shards():
    made = load(None, "batch_size=66", "mode=ddp")
    assert pieces_that_fit(made, 4, 1, 1, 16) == 2, "17 + 17 + 16 + 16 images, in 9 + 8"
    assert pieces_that_fit(made, 4, 1, 1, 8) == 3, "66 is no multiple of 4 or 5"
    assert pieces_that_fit(made, 4, 7, 1, 1) == 11, "22 pieces of 4 shards are more than there are images"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["mode=single"], ["mode=pipeline", "devices=[cpu,cpu]", "model.name=cnn_gn"]])
def test_a_run_out_of_memory_says_what_takes_it_and_a_key_that_works(mode, tmp_path):
    words = ["recipe=digits", *mode, "max_steps=3", *QUIET]
    done = trainer(*words, f"output={tmp_path / 'full'}", env={"TRAINER_FAULT": "oom@0:2"})
    assert done.returncode == 6 and "weights, gradients and optimizer " in done.stderr, done.stderr
    assert ("batch of 96 " in done.stderr) == (mode == ["mode=single"])
    pieces = re.search(r"type (accumulate=2), ", done.stderr)
    assert pieces, done.stderr
    assert result(tmp_path / "full")["error"] in done.stderr
    ok(*words, pieces[1], f"output={tmp_path / 'fits'}")
