"""The metadata of weights, which is not trusted."""

from __future__ import annotations

import json

import pytest

from trainer.errors import CheckpointError
from trainer.recipe import load
from trainer.training.trained import Trained, read_recipe

FACTS = {
    "classes": '["a", "b"]',
    "mean": "[0.5]",
    "std": "[0.2]",
    "image_size": "8",
    "channels": "1",
}


def prepared(path, told, *words):
    return Trained(
        path,
        {},
        told,
        load(None),
        load(None, *words),
    ).preparation()


@pytest.mark.parametrize(
    "damage",
    [
        {"classes": "[" * 9999},
        {"classes": "5"},
        {"mean": '["x"]'},
        {"std": "[1, 2]"},
        {"image_size": "-1"},
        {"channels": "99999999999"},
        {"channels": ""},
        {"mean": "NaN"},
        {"shorter_side": "-1"},
        {"shorter_side": "x"},
        {"mean": "[NaN]"},
        {"mean": "[1e300]"},
        {"std": "[0]"},
        {"std": "[-1]"},
        {"std": "[Infinity]"},
        {"image_size": "0"},
        {"image_size": "65536"},
        {"image_size": "9" * 5000},
        {"shorter_side": "65536"},
        {"shorter_side": "17"},
        {"shorter_side": "7"},
        {"mean": "[" * 9999 + "]" * 9999},
        {"classes": '["a"' + ',"b"' * 2**20 + "]"},
        {"classes": "["},
        {"inputs": '["load", [1, 8, 8]]'},
        {"inputs": '["float32", [1, 99999999, 99999999]]'},
        {"inputs": '["float32", [1, -8, 8]]'},
        {"inputs": "[" * 9999},
        {"inputs": '["float32", [1, 16, 16]]'},
        {"mean": "[]", "inputs": '["float32", [-8]]'},
    ],
)
def test_image_metadata_of_weights_is_not_trusted(tmp_path, damage):
    classes, how = prepared(tmp_path, FACTS)
    assert (classes, how.channels, how.image_size) == (("a", "b"), 1, 8)
    with pytest.raises(CheckpointError, match="is damaged: "):
        prepared(tmp_path, FACTS | damage)


@pytest.mark.parametrize(
    ("told", "asked", "shorter"),
    [({}, None, 256), ({"shorter_side": "224"}, None, 224), ({"shorter_side": "256"}, 64, 64)],
)
def test_weights_tell_how_much_is_cut_off(tmp_path, told, asked, shorter):
    """Older weights do not say that, and could be trained on photos only for this many pixels."""
    words = [f"data.image_size={asked}"] if asked else []
    assert (
        prepared(tmp_path, FACTS | {"image_size": "224"} | told, *words)[1].shorter_side == shorter
    )


@pytest.mark.parametrize(
    "told",
    [
        {"threads": 10**9},
        {"batch_size": 10**12},
        {"data": {"image_size": 65536}},
        {"model": {"num_classes": 2**40}},
        "[",
        "5",
        "{}x",
        {"epochs": "many"},
        "[" * 9999,
        {"model": 7},
    ],
)
def test_a_recipe_in_weights_has_bounds_and_a_damaged_one_is_one_line(tmp_path, told):
    with pytest.raises(CheckpointError, match=r" recipe\b") as caught:
        read_recipe(tmp_path, {"recipe": told if isinstance(told, str) else json.dumps(told)})
    assert "\n" not in str(caught.value)


def test_typed_statistics_replace_only_their_own(tmp_path):
    facts = FACTS | {"classes": json.dumps([*map(str, range(10))])}

    def read(*words):
        recipe = load("digits", *words)
        data = Trained(tmp_path, {}, facts, load("digits"), recipe).data(recipe)
        return data.mean, data.std

    assert read() == ((0.5,), (0.2,))
    assert read("data.std=[0.7]") == ((0.5,), (0.7,))
    assert read("data.mean=[0.1]", "data.std=[0.7]") == ((0.1,), (0.7,))
