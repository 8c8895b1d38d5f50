"""Local devices of each rank, as tables."""

import pytest

from trainer.devices.assignment import assign_devices, number_devices
from trainer.errors import RecipeError
from trainer.recipe import load


@pytest.mark.parametrize(
    ("words", "local", "cuda", "expected"),
    [
        ([], 2, 0, [("cpu",), ("cpu",)]),
        ([], 2, 4, [("cuda:0",), ("cuda:1",)]),
        (["devices=[cuda:2,cuda:3]"], 2, 4, [("cuda:2",), ("cuda:3",)]),
        (["devices=[cuda]"], 1, 1, [("cuda:0",)]),
        (["devices=[cpu]"], 3, 4, [("cpu",)] * 3),
        (["devices=[cpu,cpu]"], 2, 0, [("cpu",), ("cpu",)]),
        # Cases of one process and all devices.
        (["mode=dp"], 1, 3, [("cuda:0", "cuda:1", "cuda:2")]),
        (["mode=split"], 1, 0, [("cpu", "cpu")]),
        (["mode=split", "pipeline.stages=3"], 1, 0, [("cpu",) * 3]),
        (["mode=split", "pipeline.stages=2"], 1, 4, [("cuda:0", "cuda:1")]),
        (["mode=pipeline"], 1, 2, [("cuda:0", "cuda:1")]),
        (["mode=pipeline", "devices=[cuda:0,cuda:0]"], 1, 1, [("cuda:0", "cuda:0")]),
        # several processes
        (["mode=pipeline"], 4, 4, [("cuda:0",), ("cuda:1",), ("cuda:2",), ("cuda:3",)]),
        (["mode=local_sgd", "devices=[cuda:0]"], 4, 2, [("cuda:0",)] * 4),
        (["mode=local_sgd"], 4, 2, [("cuda:0",), ("cuda:1",)] * 2),
        (["mode=hogwild"], 2, 2, [("cpu",)] * 2),
    ],
)
def test_devices(words, local, cuda, expected):
    assert assign_devices(load(None, *words), local, cuda) == expected


@pytest.mark.parametrize(("cuda", "drives"), [(0, "cpu"), (1, "cuda:0"), (2, "cuda:0")])
def test_one_process_on_each_node_has_one_device(cuda, drives):
    assert assign_devices(load(None, "mode=pipeline", "pipeline.stages=2"), 1, cuda, nodes=2) == [
        (drives,)
    ]


@pytest.mark.parametrize(
    ("words", "local", "cuda", "says"),
    [
        ([], 4, 2, "nproc=2"),
        (["devices=[cuda:5]"], 1, 2, "cuda:0 to cuda:1"),
        (["devices=[cuda:0]"], 1, 0, r"devices=\[cpu\]"),
        (["devices=[cpu,cpu]"], 1, 0, "nproc=2"),
        (["devices=[cpu,cpu]", "mode=single"], 1, 0, "mode=ddp"),
        (["mode=split"], 1, 1, r"devices=\[cuda:0,cuda:0\]"),
        (
            ["mode=split", "devices=[cpu,cpu]", "pipeline.stages=3"],
            1,
            0,
            r"cpu,cpu,cpu\] or pipeline.stages=2",
        ),
        (
            ["mode=pipeline", "devices=[cuda:0]"],
            2,
            1,
            r"2 processes .*\(cuda:0\).*nproc=1 .*mode=pipeline ",
        ),
        (["mode=hogwild", "devices=[cuda:0]"], 2, 1, r"mode=local_sgd devices=\[cuda:0\]"),
    ],
)
def test_devices_that_cannot_be(words, local, cuda, says):
    with pytest.raises(RecipeError, match=says):
        assign_devices(load(None, *words), local, cuda)


def test_every_device_has_a_name_of_its_own():
    assert list(number_devices(["cuda:0", "cuda:1"])) == ["cuda:0", "cuda:1"]
    assert list(number_devices(["cpu", "cpu"])) == ["cpu:0", "cpu:1"]
    assert list(number_devices(["cuda:0", "cuda:0"])) == ["cuda:0#0", "cuda:0#1"]
