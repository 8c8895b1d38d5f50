"""`train` from programs: recipes by name, plain torch objects, callbacks, other processes."""

import asyncio
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import trainer
from tests import warm
from tests.command_line import PROJECT, environment, result
from tests.data.photo_folders import photo_set
from trainer import EpochReport, train
from trainer.errors import Interrupted, RecipeError, SetupError
from trainer.processes import stacks

pytestmark = pytest.mark.usefixtures("warm_commands")
QUIET = {"logging__progress": False, "logging__verdict": False, "logging__tensorboard": False, "devices": ["cpu"]}
SHORT = {**QUIET, "mode": "single", "model": "mlp", "max_steps": 2, "epochs": 1}
IMAGES = torch.rand(40, 1, 4, 4)
DATA = TensorDataset(IMAGES, (IMAGES.mean((1, 2, 3)) > 0.5).long())


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


OWN = {**SHORT, "model": net, "data": (DATA, DATA), "batch_size": 20}
LONG = {**OWN, "max_steps": None, "epochs": 9}


def test_a_recipe_by_its_name_with_words_and_keywords(tmp_path):
    found = train("digits", "optimizer.lr=0.2", **SHORT, batch_size=32, output=tmp_path / "run")
    assert (found["recipe"], found["mode"], found["steps"], found["batch_size"]) == ("digits", "single", 2, 32)
    again = trainer.load_recipe(tmp_path / "run")
    assert (again.optimizer.lr, again.model.name) == (0.2, "mlp")
    assert found == result(tmp_path / "run")


@pytest.mark.parametrize(
    ("recipe", "keywords", "line"),
    [
        ("digitz", {}, "recipe=digitz: no such recipe or file; did you mean recipe=digits?"),
        ("digits", {"epoch": 2}, "digits: epoch is not a key; did you mean epochs?"),
        ("digits", {"model": "mlpp", "mode": "single"}, "model.name=mlpp is not a model; did you mean mlp?"),
        ("digits", {"nproc": "two"}, "nproc=two must be a whole number"),
        ("digits", {"on_epoch": 1}, "on_epoch= is a function of one report, not int"),
        (None, {"model": 3}, "model= is a torch.nn.Module, a function that makes one, or a name"),
        (None, {"data": DATA}, "data= is TensorDataset: it is (training set, held-out set), and may have class nam"),
        (None, {"data": {"train": DATA, "unsupervised": DATA}}, "data= has train, unsupervised, where it needs "),
        (None, {"data": (DATA, DATA), "optimizer": torch.optim.SGD}, "optimizer=SGD is not a value for a recipe: set"),
        (None, {"data": (DATA, DATA), "batch_size": 64, "mode": "single"}, "40 training images are fewer than one glo"),
        (None, {"data": DATA.tensors}, "data= has tensors side by side, where each set is a pair"),
        ("digits", {"plugin": 5}, "plugin= is a module's name, as in plugin='my_module', not int"),
        (None, {"net": net()}, "net=Sequential is not a key: what is no recipe's is model=net, data="),
        (None, {"train_set": DATA}, "train_set=TensorDataset is not a key: what is no recipe's is model=net, data="),
        (None, {"callbacks": [print]}, "callbacks=print is not a key: what is no recipe's is model=net, data="),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, recipe, keywords, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RecipeError, SetupError)) as error:
        train(recipe, **{"devices": ["cpu"], **keywords})
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_of_photos_is_data(tmp_path, kind):
    photo_set(tmp_path / "photos", {"cat": 4, "dog": 4})
    words = {**SHORT, "data__image_size": 16, "batch_size": 2, "data__workers": 0, "output": tmp_path / "run"}
    found = train("digits", data=kind(tmp_path / "photos"), **words)
    assert found["data"]["name"] == "imagefolder" and found["data"]["train_samples"] == 6


@pytest.mark.parametrize("word", [net(), "nproc=2"])
def test_words_are_a_recipes(word):
    with pytest.raises(RecipeError, match=r"'epochs=2'.*nproc= .*keywords"):
        train("digits", word)


def test_a_module_has_the_last_weights_afterwards(tmp_path):
    model = net()
    before = model[1].weight.detach().clone()
    found = train(**OWN | {"model": model}, output=tmp_path / "run")
    counts = {"train_samples": 40, "val_samples": 40, "skipped": 0, "uncached": 0}
    assert found["data"] == {"name": "TensorDataset", "synthetic": False, **counts}
    assert not torch.equal(model[1].weight, before)
    with torch.no_grad():
        right = (model.eval()(IMAGES).argmax(1) == DATA.tensors[1]).float().mean().item()
    assert right == pytest.approx(found["val_top1"])


def test_a_run_without_a_recipe_is_called_after_its_model_and_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = train(**OWN | {"model": net()})
    assert found["recipe"] == "Sequential-TensorDataset"
    assert Path(found["output"]).name.startswith("Sequential-TensorDataset-single-")
    assert trainer.load_recipe(model__name="timm:resnet50").name == "timm_resnet50-digits"


def test_a_failed_run_leaves_the_module_alone_and_no_worker(tmp_path):
    model = net()
    before = model[1].weight.detach().clone()

    def fail(report):
        raise ZeroDivisionError("mine")

    words = {**OWN, "model": model, "data": (Photos(), Photos(), 2), "data__workers": 1, "output": tmp_path / "run"}
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        train(**words, on_epoch=fail)
    assert error.traceback and multiprocessing.active_children() == []
    assert torch.equal(model[1].weight, before)
    assert result(tmp_path / "run")["status"] == "failed"


def test_a_call_hears_of_each_epoch_and_any_kind_of_false_ends_the_run_as_a_completed_one(tmp_path):
    """Of NumPy here; Python's own in test_callbacks."""
    heard = []

    def stop(report):
        heard.append(report)
        return np.bool_(report.step < 3)

    found = train(**LONG, output=tmp_path / "run", on_epoch=stop)
    assert (found["status"], found["exit_code"], found["steps"], found["epochs"]) == ("completed", 0, 4, 2)
    assert (tmp_path / "run" / "last.safetensors").is_file() and found["ended_by"] == "callback"
    assert [(report.epoch, report.epochs, report.step) for report in heard] == [(1, 9, 2), (2, 9, 4)]
    assert isinstance(heard[0], EpochReport)
    assert heard[-1].metrics["top1"] == found["val_top1"] and heard[0].best
    assert [report.train_loss for report in heard] == found["losses"]


def test_ctrl_c_saves_and_comes_back_as_an_error(tmp_path):
    words = {**LONG, "logging__every_steps": 1, "output": tmp_path / "run"}
    with pytest.raises(Interrupted, match=r"Ctrl-C.*\bstep \d"):
        train(**words, on_epoch=lambda report: os.kill(os.getpid(), signal.SIGINT) if report.epoch == 1 else None)
    assert result(tmp_path / "run")["status"] == "preempted"
    found = train(**words, resume="auto")
    assert (found["status"], found["epochs"], found["steps"]) == ("completed", 9, 18)


class Photos(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"image": IMAGES[index], "label": int(DATA.tensors[1][index])}


class Tied(nn.Module):
    """Two layers of the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())


@pytest.mark.parametrize("mode", [{"mode": "single"}, {"mode": "split", "devices": ["cpu", "cpu"]}])
def test_tied_weights_stay_tied_and_are_continued(tmp_path, mode):
    model = Tied()
    before = model.first.weight.detach().clone()
    words = {**LONG, **mode, "epochs": 2, "model": model, "output": tmp_path / "run"}
    train(**words, on_epoch=lambda report: False)
    assert model.second.weight is model.first.weight and not torch.equal(model.first.weight, before)
    found = train(**words, resume="auto")
    assert (found["epochs"], found["status"]) == (2, "completed")


def test_one_run_at_a_time_in_a_process(tmp_path):
    def elsewhere(output):
        """The error of a run in another thread."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(train, "digits", **SHORT, output=tmp_path / output).exception()

    told = []
    train("digits", **SHORT, output=tmp_path / "first", on_epoch=lambda report: told.append(elsewhere("second")))
    assert isinstance(told[0], RecipeError) and "train()" in str(told[0])
    assert elsewhere("third") is None and result(tmp_path / "third")["status"] == "completed"


def test_the_process_is_as_it_was(tmp_path):
    before, handlers = torch.get_num_threads(), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads, drawn = set(threading.enumerate()), (random.getstate(), torch.get_rng_state())
    torch.set_num_threads(before + 2)
    try:

        async def within():
            return train("digits", **SHORT, threads=1, deterministic=True, output=tmp_path / "run")["steps"]

        assert asyncio.run(within()) == 2
        assert torch.get_num_threads() == before + 2
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert set(threading.enumerate()) <= threads
        assert stacks.append("of the program, not of the run") is None
        assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before)


STDIN = """
import os, signal, torch, trainer
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 2))

class Mine(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"pixel_values": torch.full((1, 4, 4), float(index % 2)), "labels": index % 2}

caller = os.getpid()
quiet = dict(mode="ddp", nproc=2, devices=["cpu"], batch_size=20, data__workers=0, logging__verdict=False)
net = Net()
before = net[1].weight.detach().clone()

def hear(report):
    report.log(f"heard{report.epoch}", os.getpid())
    return report.epoch < 2

found = trainer.train(model=net, data=(Mine(), Mine(), 2), epochs=5, output="one", on_epoch=hear, **quiet)
assert (found["world_size"], found["epochs"], found["status"]) == (2, 2, "completed"), found
assert found["logged"].keys() == {"heard1", "heard2"} and os.getpid() not in found["logged"].values(), found
assert not torch.equal(net[1].weight, before)

assert trainer.predict(net, torch.ones(3, 1, 4, 4), devices=["cpu"]).shape == (3, 2)

def fail(report):
    raise KeyError("mine")

try:
    trainer.train(model=Net, data=lambda: (Mine(), Mine(), ["a", "b"]), epochs=5, output="two", on_epoch=fail, **quiet)
except trainer.errors.TrainerError as error:
    print("raised", error)

try:
    trainer.train(
        model=Net, data=(Mine(), Mine(), 2), epochs=500, output="three", **quiet,
        on_epoch=lambda report: os.kill(caller, signal.SIGINT) if report.epoch == 1 else None,  # twice: at once
    )
except trainer.errors.Interrupted as error:
    print("interrupted", error)
"""


@pytest.mark.slow
def test_classes_of_stdin_travel_to_other_processes_and_calls_come_back(tmp_path):
    done = warm.run(
        [sys.executable, "-"], input=STDIN, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and re.search(r"raised .*KeyError: 'mine'", done.stdout), done.stdout + done.stderr
    assert re.search(r"interrupted .*Ctrl-C.* step ", done.stdout), done.stdout + done.stderr
    assert result(tmp_path / "three")["status"] == "preempted"
    assert "Traceback" not in done.stdout, done.stdout
    two = result(tmp_path / "two")
    assert two["status"] == "failed" and "KeyError: 'mine'" in two["error"]


def test_a_callback_that_cannot_run_where_rank_0_does_is_refused(tmp_path):
    words = {**SHORT, "mode": "ddp", "nproc": 2, "output": tmp_path / "run"}
    with pytest.raises(RecipeError, match=r"on_epoch=.*mode=single"):
        train("digits", **words, on_epoch=threading.Lock().acquire)
    assert not (tmp_path / "run").exists()


UNDER_TORCHRUN = """
import os, torch, trainer
from torch import nn
from torch.utils.data import TensorDataset

rank, heard = int(os.environ["RANK"]), []
data = TensorDataset(torch.ones(40, 1, 4, 4), torch.arange(40) % 2)
torch.manual_seed(rank)  # a program that does not think of it draws other weights on each
net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
trainer.train(
    model=net, data=(data, data), mode="local_sgd", epochs=1, optimizer__lr=1e-12, batch_size=20,
    output="run", devices=["cpu"], logging__verdict=False, on_epoch=heard.append if rank == 0 else None,
)
torch.manual_seed(0)
first = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
with open(f"rank{rank}.txt", "w") as file:
    print(len(heard), torch.allclose(net[1].weight, first[1].weight), file=file)
os._exit(0)  # gloo may abort in the interpreter's own end
"""


def test_in_a_script_that_torchrun_runs_rank_0_hears_and_its_weights_count(tmp_path):
    (tmp_path / "script.py").write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "script.py"]
    done = warm.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["1 True\n", "0 True\n"]


@pytest.mark.full("reads torch for a minute; .ci/run runs it where mypy has just done so")
def test_a_users_script_is_typed():
    script = PROJECT / "tests" / "training" / "typed_script.py"
    pytest.importorskip("mypy", reason="pip install mypy")
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
