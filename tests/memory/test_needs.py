"""Numbers that fit, and bytes of shards, as small tables."""

import pytest
from torch import nn

from trainer.memory.needs import (
    compute_unit_sizes,
    count_gathered,
    count_teacher_bytes,
    find_fewest,
    find_fewest_pieces,
)


@pytest.mark.parametrize(
    ("most", "first_that_fits", "expected"),
    [(0, 0, 0), (5, 0, 0), (5, 1, 1), (5, 3, 3), (5, 5, 5), (5, 6, 5)],
)
def test_the_smallest_number_that_fits(most, first_that_fits, expected):
    assert find_fewest(most, lambda number: number >= first_that_fits) == expected


def test_sizes_of_units_add_up_to_the_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    sizes = compute_unit_sizes(model, ["0", "1"])
    assert sizes == [4 * 36, 4 * 16, 4 * 25]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7], 7),  # a model without units is gathered whole
        ([7, 10, 20, 10, 50], 97),  # three units of 50 would be more than the model
        ([7, 20, 20, 20, 20], 67),
    ],
)
def test_a_pass_gathers_the_root_and_three_units_at_a_time(sizes, expected):
    assert count_gathered(sizes) == expected


@pytest.mark.parametrize(("shards", "expected"), [(1, 100), (4, 100), (5, 20), (8, 13)])
def test_a_teacher_is_sharded_if_it_is_larger_than_a_shard_of_the_student(shards, expected):
    """A shard of the student has weights of 100 bytes, gradients and two optimizer states."""
    assert count_teacher_bytes(100, 100, shards) == expected


@pytest.mark.parametrize(
    ("rows", "room", "batch_norm", "tried", "expected"),
    [
        ({1: 16, 2: 8, 4: 4, 8: 2, 16: 1}, 16, False, [2, 4, 8, 16], 1),
        (
            {1: 16, 2: 8, 4: 4, 8: 2, 16: 1},
            8,
            False,
            [2, 4, 8],
            2,
        ),  # 16 rows are not expected to fit
        ({1: 16, 2: 8, 4: 4, 8: 2, 16: 1}, 3, False, [2, 4], 8),
        ({1: 16, 2: 8, 4: 4, 8: 2, 16: 1}, 1, False, [2], None),
        ({1: 7, 7: 1}, 4, False, [1, 7], 7),
        ({1: 7, 7: 1}, 4, True, [7], None),
        ({1: 1}, 4, True, [1], 1),
    ],
)
def test_the_fewest_pieces_that_fit(rows, room, batch_norm, tried, expected):
    """Memory is proportional to the rows; `room` rows fit."""
    trials = []

    def measure_load(number):
        trials.append(rows[number])
        return rows[number] / room

    assert find_fewest_pieces(rows, measure_load, batch_norm) == expected
    assert trials == tried
