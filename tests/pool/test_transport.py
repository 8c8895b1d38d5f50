"""Items between processes: split into buffers, copied into a slot, and rebuilt."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from trainer.pool.transport import INITIAL_BYTES, fetch, new_slot, pack, pack_rows, store
from trainer.processes.memory_file import ALIGNMENT, MemoryFile


@pytest.fixture
def slot():
    slot = new_slot()
    yield slot
    slot.close()


def there_and_back(value, slot, copy, take=pack, start=0):
    extent = store(take(value), slot, start)
    return fetch(slot.reach(extent.end), extent, copy).open()


def equal(one, two):
    (own, created), (reference, arguments) = tree_flatten(one), tree_flatten(two)
    assert created == arguments
    assert all(isinstance(right, type(left)) for left, right in zip(own, reference, strict=True))
    for left, right in zip(own, reference, strict=True):
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(
                left, right.detach(), rtol=0, atol=0, equal_nan=True, check_stride=False
            )
        elif isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype and left.shape == right.shape
        else:
            assert left == right


TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
VALUES = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in [*TYPES, torch.complex64]},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "nan": torch.tensor([float("nan"), float("inf")]),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "gradient": torch.ones(3, requires_grad=True) * 2,
    "array": np.arange(12).reshape(3, 4),
    "slice": np.arange(12)[::3],
    "objects": np.array([1, "a", None], dtype=object),
    "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "text": "ä" * 100_000,
    "nested": {
        "a": [torch.ones(2), (np.zeros(3), {"b": torch.zeros(1, dtype=torch.int8)})],
        "c": "d",
    },
}


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "view"])
@pytest.mark.parametrize("name", VALUES)
def test_round_trip(name, copy, slot):
    value = VALUES[name]
    equal(there_and_back(value, slot, copy), value)
    equal(
        there_and_back(
            [value, value],
            slot,
            copy,
            pack_rows,
            start=ALIGNMENT * 3,
        ),
        [value, value],
    )


def test_rows_of_all_kinds_come_back_as_lists(slot):
    whole = torch.arange(12.0).reshape(4, 3)
    lone = torch.arange(3)
    rows = [
        (whole, [*whole]),
        (whole.t(), [*whole.t()]),
        (whole.numpy(), [*whole.numpy()]),
        (tuple(whole), [*whole]),
    ]
    rows += [(lone, [torch.tensor(i) for i in range(3)]), ([], [])]
    mixed = (
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        [torch.ones(1), 1],
    )
    rows += [(each, each) for each in (*mixed, [np.ones(2), np.ones(2, np.int32)])]
    for copy in (True, False):
        for argument, expected in rows:
            equal(there_and_back(argument, slot, copy, pack_rows), expected)


@pytest.mark.parametrize("shape", [(10,), (3, 40, 40), (3, 200, 200)], ids=["tiny", "small", "big"])
def test_many_rows_are_one_block(shape, slot):
    """Whichever way they are copied, which depends on their size."""
    rows = [torch.randn(shape) for _ in range(70)]
    parcel = pack_rows(rows)
    assert parcel.rows == 70 and len(parcel.buffers) == 1
    equal(there_and_back(rows, slot, True, pack_rows), rows)


def test_owned_buffers_survive_the_slot(slot):
    value = {"a": torch.arange(5), "b": [np.arange(5)]}
    own = there_and_back(value, slot, copy=True)
    views = there_and_back(value, slot, copy=False)
    rows = there_and_back(
        [torch.ones(2)] * 3,
        slot,
        copy=True,
        take=pack_rows,
    )
    slot.memory[:] = bytes(len(slot.memory))
    equal(own, value)
    equal(rows, [torch.ones(2)] * 3)
    assert views["a"].tolist() == [0] * 5, "a view sees what is written to the slot"
    rows[0].zero_()
    own["a"].add_(1), own["b"][0].fill(0)
    assert rows[1].tolist() == [1, 1], "each result has memory of its own"
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 3
    assert rows[0].untyped_storage().nbytes() == 8, "keeping one keeps one"


def test_a_slot_grows_in_both_processes(slot):
    """The other process's map follows; what looks at the old one stays valid."""
    reference = MemoryFile(os.dup(slot.descriptor))
    small = there_and_back(torch.ones(10), slot, copy=False)
    big = torch.arange(INITIAL_BYTES)
    extent = store(pack(big), slot, start=INITIAL_BYTES // 2)
    assert len(slot.memory) > INITIAL_BYTES and len(reference.memory) == INITIAL_BYTES
    equal(fetch(reference.reach(extent.end), extent, copy=True).open(), big)
    assert small.tolist() == [1] * 10
    reference.close()


def test_a_model_travels_with_its_ties(slot):
    model = nn.Sequential(
        nn.Linear(3, 3),
        nn.BatchNorm1d(3),
        nn.Linear(3, 3),
    )
    model[2].weight = model[0].weight
    copy = there_and_back(model, slot, copy=True)
    equal(dict(copy.state_dict()), dict(model.state_dict()))
    assert copy[2].weight is copy[0].weight and copy[0].weight.requires_grad
