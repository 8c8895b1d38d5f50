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
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import trainer
from tests import warm
from tests.command_line import PROJECT, environment, result
from tests.data.photo_folders import photo_set
from trainer import EpochReport, train
from trainer.errors import Interrupted, NotFiniteError, RecipeError, SetupError
from trainer.processes import stacks
from trainer.processes.torch_context import plain_context

pytestmark = pytest.mark.usefixtures("warm_commands")
QUIET = {
    "logging__progress": False,
    "logging__verdict": False,
    "logging__tensorboard": False,
    "devices": ["cpu"],
}
SHORT = {**QUIET, "mode": "single", "model": "mlp", "max_steps": 2, "epochs": 1}
IMAGES = torch.rand(40, 1, 4, 4)
DATA = TensorDataset(
    IMAGES,
    (IMAGES.mean((1, 2, 3)) > 0.5).long(),
)


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


OWN = {**SHORT, "model": net, "data": (DATA, DATA), "batch_size": 20}
LONG = {**OWN, "max_steps": None, "epochs": 9}


def test_a_recipe_by_its_name_with_words_and_keywords(tmp_path):
    trained = train("digits", "optimizer.lr=0.2", **SHORT, batch_size=32, output=tmp_path / "run")
    assert (trained["recipe"], trained["mode"], trained["steps"], trained["batch_size"]) == (
        "digits",
        "single",
        2,
        32,
    )
    again = trainer.load_recipe(tmp_path / "run")
    assert (again.optimizer.lr, again.model.name) == (0.2, "mlp")
    assert trained == result(tmp_path / "run")


@pytest.mark.parametrize(
    ("recipe", "keywords", "pattern"),
    [
        ("digitz", {}, r"recipe=digitz: .*\brecipe=digits\b"),
        ("digits", {"epoch": 2}, r"digits: epoch .*\bepochs\b"),
        (
            "digits",
            {"model": "mlpp", "mode": "single"},
            r"model\.name=mlpp .*\bmlp\b",
        ),
        ("digits", {"nproc": "two"}, r"nproc=two .*\b1\b"),
        ("digits", {"on_epoch": 1}, r"on_epoch= .*\bint$"),
        (None, {"model": 3}, r"model= .*\btorch\.nn\.Module\b.*\bint$"),
        (
            None,
            {"data": DATA},
            r"data= .*\bTensorDataset: .*\brandom_split\b",
        ),
        (
            None,
            {"data": {"train": DATA, "unsupervised": DATA}},
            r"data= .*\btrain, unsupervised\b.*\bvalidation\b",
        ),
        (
            None,
            {"data": (DATA, DATA), "optimizer": torch.optim.SGD},
            r"optimizer=SGD .*\boptimizer\.name=",
        ),
        (
            None,
            {"data": (DATA, DATA), "batch_size": 64, "mode": "single"},
            r"40 .*\bbatch_size=64\b.*\bbatch_size=40\b",
        ),
        (None, {"data": DATA.tensors}, r"data= .*\bdata=\(\(inputs, targets\), "),
        ("digits", {"plugin": 5}, r"plugin= .*\bplugin='my_module'.*\bint$"),
        (
            None,
            {"net": net()},
            r"net=Sequential .*\bmodel=net, data=",
        ),
        (
            None,
            {"train_set": DATA},
            r"train_set=TensorDataset .*\bmodel=net, data=",
        ),
        (
            None,
            {"callbacks": [print]},
            r"callbacks=print .*\bmodel=net, data=",
        ),
    ],
)
def test_an_invalid_call_is_one_line(tmp_path, monkeypatch, recipe, keywords, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RecipeError, SetupError)) as error:
        train(recipe, **{"devices": ["cpu"], **keywords})
    assert re.match(pattern, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_of_photos_is_data(tmp_path, kind):
    photo_set(tmp_path / "photos", {"cat": 4, "dog": 4})
    words = {
        **SHORT,
        "data__image_size": 16,
        "batch_size": 2,
        "data__workers": 0,
        "output": tmp_path / "run",
    }
    trained = train("digits", data=kind(tmp_path / "photos"), **words)
    assert trained["data"]["name"] == "imagefolder" and trained["data"]["train_samples"] == 6


@pytest.mark.parametrize("word", [net(), "nproc=2"])
def test_words_are_a_recipes(word):
    with pytest.raises(RecipeError, match=r"'epochs=2'.*nproc=.*keywords"):
        train("digits", word)


def test_a_module_has_the_last_weights_afterwards(tmp_path):
    model = net()
    before = model[1].weight.detach().clone()
    trained = train(**OWN | {"model": model}, output=tmp_path / "run")
    counts = {"train_samples": 40, "val_samples": 40, "skipped": 0, "uncached": 0}
    assert trained["data"] == {"name": "TensorDataset", "synthetic": False, **counts}
    assert not torch.equal(model[1].weight, before)
    with torch.no_grad():
        right = (model.eval()(IMAGES).argmax(1) == DATA.tensors[1]).float().mean().item()
    assert right == pytest.approx(trained["val_top1"])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_was_not_finite_is_named(kind, tmp_path):
    """A finite loss with an infinite gradient is no matter of the learning rate alone."""

    def infinite(tensor):
        return tensor * torch.inf

    def spoilt():
        model = net()
        if kind == "loss":
            model.register_forward_hook(lambda module, inputs, output: infinite(output))
        else:
            model[1].bias.register_hook(infinite)
        return model

    with pytest.raises(NotFiniteError, match=f"^a {kind} was not finite"):
        train(**OWN | {"model": spoilt}, output=tmp_path / "run")


def test_a_run_without_a_recipe_is_called_after_its_model_and_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = train(**OWN | {"model": net()})
    assert trained["recipe"] == "Sequential-TensorDataset"
    assert Path(trained["output"]).name.startswith("Sequential-TensorDataset-single-")
    assert trainer.load_recipe(model__name="timm:resnet50").name == "timm_resnet50-digits"


def test_a_failed_run_leaves_the_module_alone_and_no_worker(tmp_path):
    model = net()
    before = model[1].weight.detach().clone()

    def fail(report):
        raise ZeroDivisionError("mine")

    words = {
        **OWN,
        "model": model,
        "data": (Photos(), Photos(), 2),
        "data__workers": 1,
        "output": tmp_path / "run",
    }
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        train(**words, on_epoch=fail)
    assert error.traceback and multiprocessing.active_children() == []
    assert torch.equal(model[1].weight, before)
    assert result(tmp_path / "run")["status"] == "failed"


def test_a_callback_gets_each_epoch_and_any_false_value_completes_the_run(tmp_path):
    """The numbers are NumPy's; Python's own are in test_callbacks."""
    heard = []

    def stop(report):
        heard.append(report)
        return np.bool_(report.step < 3)

    trained = train(**LONG, output=tmp_path / "run", on_epoch=stop)
    assert (trained["status"], trained["exit_code"], trained["steps"], trained["epochs"]) == (
        "completed",
        0,
        4,
        2,
    )
    assert (tmp_path / "run" / "last.safetensors").is_file() and trained["ended_by"] == "callback"
    assert [(report.epoch, report.epochs, report.step) for report in heard] == [
        (1, 9, 2),
        (2, 9, 4),
    ]
    assert isinstance(heard[0], EpochReport)
    assert heard[-1].metrics["top1"] == trained["val_top1"] and heard[0].best
    assert [report.train_loss for report in heard] == trained["losses"]


def test_ctrl_c_saves_and_comes_back_as_an_error(tmp_path):
    words = {**LONG, "logging__every_steps": 1, "output": tmp_path / "run"}
    with pytest.raises(Interrupted, match=r"Ctrl-C.*\bstep \d"):
        train(
            **words,
            on_epoch=lambda report: (
                os.kill(os.getpid(), signal.SIGINT) if report.epoch == 1 else None
            ),
        )
    assert result(tmp_path / "run")["status"] == "preempted"
    trained = train(**words, resume="auto")
    assert (trained["status"], trained["epochs"], trained["steps"]) == ("completed", 9, 18)


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


@pytest.mark.slow(cases=["mode1"])
@pytest.mark.parametrize("mode", [{"mode": "single"}, {"mode": "split", "devices": ["cpu", "cpu"]}])
def test_tied_weights_stay_tied_and_are_continued(tmp_path, mode):
    model = Tied()
    before = model.first.weight.detach().clone()
    words = {**LONG, **mode, "epochs": 2, "model": model, "output": tmp_path / "run"}
    train(**words, on_epoch=lambda report: False)
    assert model.second.weight is model.first.weight
    assert not torch.equal(model.first.weight, before)
    trained = train(**words, resume="auto")
    assert (trained["epochs"], trained["status"]) == (2, "completed")


def test_one_run_at_a_time_in_a_process(tmp_path):
    def elsewhere(output):
        """The error of a run in another thread."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(train, "digits", **SHORT, output=tmp_path / output).exception()

    messages = []
    train(
        "digits",
        **SHORT,
        output=tmp_path / "first",
        on_epoch=lambda report: messages.append(elsewhere("second")),
    )
    assert isinstance(messages[0], RecipeError) and "train()" in str(messages[0])
    assert elsewhere("third") is None and result(tmp_path / "third")["status"] == "completed"


def test_the_process_is_as_it_was(tmp_path):
    before = torch.get_num_threads()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = set(threading.enumerate())
    drawn = (random.getstate(), torch.get_rng_state())
    torch.set_num_threads(before + 2)
    try:

        async def within():
            return train("digits", **SHORT, threads=1, deterministic=True, output=tmp_path / "run")[
                "steps"
            ]

        assert asyncio.run(within()) == 2
        assert torch.get_num_threads() == before + 2
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert set(threading.enumerate()) <= threads
        assert stacks.append("of the program, not of the run") is None
        assert random.getstate() == drawn[0]
        assert torch.equal(torch.get_rng_state(), drawn[1])
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
quiet = dict(mode="ddp", nproc=2, devices=["cpu"], batch_size=20, data__workers=0,
    logging__verdict=False)
net = Net()
before = net[1].weight.detach().clone()

def hear(report):
    report.log(f"heard{report.epoch}", os.getpid())
    return report.epoch < 2

idle = dict(pipeline__split_size=2)
found = trainer.train(model=net, data=(Mine(), Mine(), 2), epochs=5, output="one", on_epoch=hear,
    **idle, **quiet)
assert (found["world_size"], found["epochs"], found["status"]) == (2, 2, "completed"), found
assert found["logged"].keys() == {"heard1", "heard2"}, found
assert os.getpid() not in found["logged"].values(), found
assert not torch.equal(net[1].weight, before)

assert trainer.predict(net, torch.ones(3, 1, 4, 4), devices=["cpu"]).shape == (3, 2)

def fail(report):
    raise KeyError("mine")

try:
    trainer.train(model=Net, data=lambda: (Mine(), Mine(), ["a", "b"]), epochs=5, output="two",
        on_epoch=fail, **quiet)
except trainer.errors.TrainerError as error:
    print("raised", error)

try:
    trainer.train(
        model=Net, data=(Mine(), Mine(), 2), epochs=500, output="three", **quiet,
        # twice: at once
        on_epoch=lambda report: os.kill(caller, signal.SIGINT) if report.epoch == 1 else None,
    )
except trainer.errors.Interrupted as error:
    print("interrupted", error)
"""


@pytest.mark.slow
def test_classes_of_stdin_travel_to_other_processes_and_calls_come_back(tmp_path):
    completed = warm.run(
        [sys.executable, "-"],
        input=STDIN,
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0 and re.search(
        r"raised .*KeyError: 'mine'", completed.stdout
    ), completed.stdout + completed.stderr
    assert completed.stdout.count("unused: ") == 1
    assert re.search(r"interrupted .*Ctrl-C.* step ", completed.stdout), (
        completed.stdout + completed.stderr
    )
    assert result(tmp_path / "three")["status"] == "preempted"
    assert "Traceback" not in completed.stdout, completed.stdout
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
    output="run", devices=["cpu"], logging__verdict=False, pipeline__microbatches=2,
    on_epoch=heard.append if rank == 0 else None,
)
torch.manual_seed(0)
first = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
with open(f"rank{rank}.txt", "w") as file:
    print(len(heard), torch.allclose(net[1].weight, first[1].weight), file=file)
os._exit(0)  # gloo may abort in the interpreter's own end
"""


def test_rank_0_of_a_script_under_torchrun_gets_the_callback_and_its_weights_count(tmp_path):
    (tmp_path / "script.py").write_text(UNDER_TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "script.py",
    ]
    completed = warm.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == [
        "1 True\n",
        "0 True\n",
    ]
    assert completed.stdout.count("unused: ") == 1, "rank 0 alone reports keys that do nothing"


@pytest.mark.full("reads torch for a minute; .ci/run runs it where mypy has just done so")
def test_a_users_script_is_typed():
    script = PROJECT / "tests" / "training" / "typed_script.py"
    pytest.importorskip("mypy", reason="pip install mypy")
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    completed = subprocess.run(
        command, cwd=PROJECT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert completed.returncode == 0, completed.stdout


class Spoiling(TorchFunctionMode):
    """A user's strategy that sees each call and changes one."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        return out + 1 if function is nn.functional.linear else out


@contextmanager
def switched(get, set_, value):
    before = get()
    set_(value)
    try:
        yield
        assert get() == value, "and it is the caller's again"
    finally:
        set_(before)


@contextmanager
def raising():
    with warnings.catch_warnings(action="error"), np.errstate(all="raise"):
        yield


def test_a_callers_filters_of_warnings_still_hold_for_those_that_would_raise_and_all_others():
    def messages_within(*filters):
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            for action, pattern, category in reversed(filters):
                warnings.filterwarnings(action, pattern, category)
            before = [*warnings.filters]
            with plain_context():
                for message, category in (
                    ("noise", UserWarning),
                    ("worth", UserWarning),
                    ("old", FutureWarning),
                ):
                    warnings.warn(message, category, stacklevel=1)
            assert warnings.filters == before, "and they are the caller's again"
        return [str(warning.message) for warning in caught]

    everything = ("error", "", Warning)
    assert messages_within(everything) == ["noise", "worth", "old"], "none is raised"
    assert messages_within(("ignore", "noi.e", UserWarning), everything) == ["worth", "old"]
    assert messages_within(("ignore", "", FutureWarning), ("error", "worth", UserWarning)) == [
        "noise",
        "worth",
    ]
    assert messages_within(
        ("error", "noise", UserWarning), ("ignore", "", UserWarning), everything
    ) == ["noise", "old"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        warnings.filterwarnings("ignore", module=r"tests\.")
        with plain_context(), warnings.catch_warnings(record=True) as caught:
            warnings.warn("of this module", UserWarning, stacklevel=1)
    assert not caught


CONTEXTS = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "torch.device": lambda: torch.device("meta"),
    "default device": lambda: switched(
        torch.get_default_device, torch.set_default_device, torch.device("meta")
    ),
    "default dtype": lambda: switched(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "deterministic": lambda: switched(
        torch.get_deterministic_debug_mode, lambda mode: torch.set_deterministic_debug_mode(mode), 2
    ),
    "threads": lambda: switched(torch.get_num_threads, torch.set_num_threads, 2),
    "anomaly": torch.autograd.detect_anomaly,
    "function mode": Spoiling,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "warnings": raising,
}
FAST = ("autocast", "inference_mode", "torch.device", "default dtype")
UINT8 = (torch.rand(4, 1, 8, 8) * 255).byte()


def everything(context, folder):
    """Return the results of all functions that a program may call in a context: two steps, and the
    trained model.
    """
    with context():
        trained = train("digits", **SHORT, output=folder)
        loaded = trainer.load(folder)
        labelled = loaded.predict(UINT8)
        evaluated = loaded.evaluate("devices=[cpu]")
    weights = (folder / "last.safetensors").read_bytes()
    return (
        trained["val_loss"],
        weights,
        [answer.probabilities for answer in labelled],
        evaluated["val_loss"],
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return everything(nullcontext, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONTEXTS],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_callers_context_changes_nothing(name, plain, tmp_path):
    assert everything(CONTEXTS[name], tmp_path / "run") == plain
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_a_module_made_under_inference_mode_gets_its_weights(tmp_path):
    with torch.inference_mode():
        model = net()
        before = model[1].weight.clone()
        train(**{**OWN, "model": model}, output=tmp_path / "run")
    assert not torch.equal(model[1].weight, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["inference_mode", "torch.device", "default dtype", "fake tensors", "function mode"]
)
def test_nor_does_it_where_processes_are_started(name, tmp_path):
    model = net()
    rows = IMAGES.reshape(40, 16)[:6]
    expected = model(rows).detach()
    each = [*rows]
    streamed = [*expected]
    ones = [torch.ones(0, 3), torch.ones(2)]
    with CONTEXTS[name]():
        outputs = trainer.predict(model, rows, devices=["cpu"])
        if name != "fake tensors":  # a stream's items are copied in the caller's own context
            streamed = [*trainer.predict(model, iter(each), devices=["cpu"])]
        with trainer.DevicePool(["cpu"], torch.neg) as pool:
            jobs = [pool.submit(torch.neg, one) for one in ones]
            negated = [job.result() for job in jobs]
            negated += [*pool.map(ones)] if name != "fake tensors" else negated
        ddp = {**OWN, "model": model, "mode": "ddp", "nproc": 2}
        trained = train(**ddp, output=tmp_path / "ddp")
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(torch.stack(streamed), expected)
    assert all(map(torch.equal, negated, [-one for one in ones] * 2))
    assert trained["status"] == "completed" and not any(p.is_meta for p in model.parameters())
