"""Numbers become tensors for every NumPy type. A message reports anything that is no number."""

import warnings

import numpy as np
import pytest
import torch

from trainer.data.tensors import as_targets, as_tensor
from trainer.errors import RecipeError

WHOLE = np.arange(24).reshape(2, 3, 4)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS = {
    "flipped": WHOLE[..., ::-1],
    "transposed": WHOLE.transpose(2, 0, 1),
    "big-endian and flipped": WHOLE.astype(">f8")[::-1],
    "read-only": read_only(WHOLE),
    "a number": WHOLE.astype(">i8")[1, 1, 1],
    "an array of none": np.array(7, ">u2"),
    "bool": (WHOLE > 5)[::-1],
    "nothing masked": np.ma.array(WHOLE)[::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_layout(layout):
    array = LAYOUTS[layout]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = [make(array) for make in (as_tensor, as_targets)]
    assert all(each.shape == array.shape and each.tolist() == array.tolist() for each in actual)


def test_memory_is_shared_where_torch_can_share_it():
    array = np.zeros(3)
    as_tensor(array)[1] = 5
    assert array[1] == 5


def test_unsigned_targets_are_numbers_that_torch_computes_with():
    """Inputs stay what they are: the model is the user's."""
    for kind in ("u2", ">u2", "u4", "u8"):
        labels = np.array([3, 0, 65535], kind)
        assert as_targets(labels).max() == 65535 and int(as_targets(labels[0])) == 3
        assert as_tensor(labels).dtype == getattr(torch, labels.dtype.name)
    with pytest.raises(RecipeError, match=r"2\*\*63"):
        as_targets(np.array([1, 2**63], np.uint64))


@pytest.mark.parametrize(
    "value",
    [
        np.array(["cat", "dog"]),
        "cat",
        np.array([...]),
        None,
        np.ma.array([1, 2], mask=[0, 1]),
        [[1, 2], [3]],
    ],
    ids=repr,
)
def test_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(RecipeError, match=r"number|masked") as caught:
        as_tensor(value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
