"""How a global batch is cut where memory is short."""

import pytest

from trainer.speed_test import pieces_that_fit


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
    ],
)
def test_pieces(rows, accumulate, per_image, room, multiple, expected):
    assert pieces_that_fit(rows, accumulate, per_image, room, multiple) == expected
