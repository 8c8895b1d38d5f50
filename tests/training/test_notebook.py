"""A real Jupyter kernel trains: in itself, and in processes that it starts."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest

from tests import warm
from tests.command_line import environment, result

nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel ipywidgets")
nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel ipywidgets")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel ipywidgets")

PREPARED = """
import torch, trainer
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 2))

class Mine(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((1, 4, 4), float(index % 2)), index % 2

@trainer.register_model("noted")
def noted(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))

def hear(report):
    report.log("epoch", report.epoch)

quick = dict(batch_size=20, devices=["cpu"], logging__verdict=False, data__workers=0)
"""
HERE = """
found = trainer.train(model=Net(), data=(Mine(), Mine(), 2), epochs=2, mode="single",
    output="here", **quick)
found["status"], found["epochs"]
"""
IN_OTHERS = """
net = Net()
before = net[1].weight.detach().clone()
found = trainer.train(
    model=net, data=(Mine(), Mine(), 2), epochs=2, mode="ddp", nproc=2, output="others",
    on_epoch=lambda end: end.log("epoch", end.epoch), **quick
)
found["world_size"], found["logged"]["epoch"], torch.equal(before, net[1].weight)
"""
REGISTERED = """
trainer.train("digits", model="noted", mode="ddp", nproc=2, max_steps=1, output="noted",
    devices=["cpu"])["steps"]
"""
WRONG = """
try:
    trainer.train("digits", epoch=2)
except trainer.errors.RecipeError as error:
    print(error)
"""

TOLD = """
trainer.train("digits", epoch=2)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory):
    """Return the outputs of each cell by its name, and the kernel's folder.

    The last cell may raise an exception.
    """
    folder = tmp_path_factory.mktemp("notebook")
    sources = {
        "here": HERE,
        "others": IN_OTHERS,
        "registered": REGISTERED,
        "wrong": WRONG,
        "told": TOLD,
    }
    book = nbformat.v4.new_notebook(
        cells=[*map(nbformat.v4.new_code_cell, (PREPARED, *sources.values()))]
    )
    book.cells[-1].metadata["tags"] = ["raises-exception"]
    client = nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(folder)}}
    )
    with mock.patch.dict(
        os.environ, environment(IPYTHONDIR=str(folder), JUPYTER_RUNTIME_DIR=str(folder))
    ):
        warm.start_all_warm()  # the kernel and what it starts
        try:
            client.execute()
        finally:
            warm.start_requested_warm()
    return {name: cell.outputs for name, cell in zip(sources, book.cells[1:], strict=True)}, folder


def value(outputs) -> str:
    return next(
        output.data["text/plain"] for output in outputs if output.output_type == "execute_result"
    )


def printed(outputs) -> str:
    return "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def test_a_kernel_trains_in_itself_and_in_processes_with_its_classes(cells):
    outputs, folder = cells
    assert value(outputs["here"]) == "('completed', 2)"
    assert value(outputs["others"]) == "(2, 2.0, False)"
    assert "trainer 0.2.0" in printed(outputs["here"])
    for run, mode in (("here", "single"), ("others", "ddp")):
        assert "2/2" in printed(outputs[run]), "what the ranks print is the cell's output"
        assert result(Path(folder, run))["mode"] == mode
    assert value(outputs["registered"]) == "1", "a model that it registers is known to them"


def test_an_error_is_a_sentence(cells):
    line = printed(cells[0]["wrong"])
    assert re.fullmatch(r"digits: epoch .*\bepochs\?\n", line)
    [shown] = cells[0]["told"]
    assert shown.traceback == [f"RecipeError: {line.rstrip()}"], "and nothing around it"
