"""W&B and MLflow receive what TensorBoard receives and never block the run.

The real libraries are used if installed, and stand-ins always.
"""

import glob
import json
import re
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import PROJECT, QUIET, free_port, latest, ok, result
from trainer.errors import SetupError
from trainer.recipe import load
from trainer.recipe.checks import check_loggers
from trainer.saving.checkpoint import Position
from trainer.saving.journal import OTHER
from trainer.saving.run_folder import RunFolder
from trainer.telemetry import loggers
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.tracking import Tracker

WANDB, MLFLOW = (
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install .[loggers]")
    for name in ("wandb", "mlflow")
)
SHORT = ["recipe=digits", "mode=single", "model.name=mlp", "max_steps=3", *QUIET]


class StandIn:
    """A library that remembers what it was given."""

    def __init__(self, recipe, folder, say):
        self.given = []
        type(self).last = self

    def scalars(self, values, step):
        self.given.append((step, dict(values)))

    def finish(self, result):
        self.given.append(result.get("status"))


@pytest.fixture
def track(tmp_path, monkeypatch):
    """Start a tracker with the given library."""
    monkeypatch.setattr(loggers.interrupts, "skips_shutdown", threading.Event())

    def start(kind, *words):
        monkeypatch.setitem(loggers.KINDS, "wandb", kind)
        recipe = load("digits", f"output={tmp_path / 'run'}", "logging.wandb=mine", *words)
        tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
        tracker.start(Position(0, 0, 0), 10, "top1")
        return tracker

    return start


@pytest.mark.parametrize("words", [(), ("logging.tensorboard=false",)])
def test_all_values_arrive_in_order_and_how_it_ended(track, words):
    tracker = track(StandIn, *words)
    for step in range(1, 50):
        tracker.scalars({"train/loss": 1 / step}, step)
    tracker.result({"status": "running"})
    tracker.result({"status": "completed"})
    tracker.close()
    assert StandIn.last.given == [*((n, {"train/loss": 1 / n}) for n in range(1, 50)), "completed"]


@pytest.mark.parametrize("where", ["__init__", "scalars", "finish"])
def test_one_that_fails_is_one_warning_and_the_run_goes_on(track, where, capsys):
    def fail(*_):
        raise SystemExit("server\ngone")

    tracker = track(type("Broken", (StandIn,), {where: fail}))
    for step in range(1, 4):
        tracker.scalars({"train/loss": 1.0}, step)
    tracker.result({"status": "completed"})
    tracker.close()
    out = capsys.readouterr().out
    assert out.count("warning: logging.wandb lacks") == 1
    assert "(SystemExit: server gone)\n" in out
    assert loggers.interrupts.skips_shutdown.is_set(), (
        "the library would wait at the end of the process"
    )


def test_wandb_receives_the_recipe_the_values_and_the_end(tmp_path, monkeypatch):
    arguments = []

    def init(**words):
        arguments.append(words)
        return SimpleNamespace(
            log=lambda values, step: arguments.append((step, values)),
            summary=SimpleNamespace(update=arguments.append),
            finish=lambda exit_code: arguments.append(exit_code),
        )

    stand_in = SimpleNamespace(init=init, Settings=dict, login=lambda prompt: prompt)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    recipe = load("digits", "logging.wandb=faces")
    for _ in range(2):  # a run, and its continuation
        actual = loggers.Loggers(recipe, tmp_path, print)
        actual.scalars({"val/top1": 0.5}, 7)
        actual.result(
            {
                "status": "preempted",
                "val_top1": 0.5,
                "throughput": {"samples_per_sec": 9.0},
                "steps": 7,
            }
        )
        actual.close()
    first, values, summary, code, again, *_ = arguments
    assert (first["project"], first["mode"]) == ("faces", "offline")
    assert (first["name"], first["dir"]) == (tmp_path.name, tmp_path)
    assert first["config"]["optimizer"]["lr"] == recipe.optimizer.lr
    assert values == (
        7,
        {"val/top1": 0.5},
    )
    assert summary == {"val_top1": 0.5, "steps": 7.0, "samples_per_sec": 9.0, "status": "preempted"}
    assert code == 1
    assert again["id"] == first["id"] and again["resume"] == "allow"


def test_one_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("trainer.recipe.checks.find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(
            SetupError, match=rf"logging\.{name} .*pip install {name}, .*logging\.{name}=null"
        ):
            check_loggers(load("digits", f"logging.{name}=true"))
    # A folder.
    monkeypatch.setattr(
        "trainer.recipe.checks.find_spec", lambda name: SimpleNamespace(origin=None)
    )
    with pytest.raises(SetupError, match="install mlflow"):
        check_loggers(load("digits", "logging.mlflow=http://127.0.0.1:5000"))
    check_loggers(load("digits", "logging.mlflow=false"))


@WANDB
def test_the_real_wandb_offline(tmp_path):
    ok(
        *SHORT,
        "logging.wandb=mine",
        f"output={tmp_path / 'run'}",
        env={"HOME": str(tmp_path), "WANDB_API_KEY": ""},
    )
    [kept] = glob.glob(f"{tmp_path}/run/wandb/offline-run-*/run-*.wandb")
    content = Path(kept).read_bytes()
    for word in (b"train/loss", b"val/top1", b"samples_per_sec", b"optimizer", b"mine"):
        assert word in content
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"].encode() in content


@pytest.mark.parametrize(
    ("library", "answers"),
    [
        pytest.param("wandb", True, marks=WANDB),
        pytest.param("wandb", False, marks=WANDB),
        pytest.param("mlflow", False, marks=MLFLOW),
    ],
)
def test_a_run_ends_though_the_real_one_is_out_of_reach(tmp_path, library, answers):
    """One server accepts connections and says nothing, and the others do not exist."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1] if answers else free_port()}"
        own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path)}
        word = f"logging.{library}={'mine' if library == 'wandb' else address}"
        completed = ok(*SHORT, word, f"output={tmp_path / 'run'}", env=own, timeout=120)
    assert len(re.findall(rf"warning: logging\.{library} lacks .*\(.+\)\n", completed.stdout)) == 1
    assert result(tmp_path / "run")["status"] == "completed"


@MLFLOW
def test_the_real_mlflow_in_a_folder_and_continued(tmp_path, monkeypatch):
    where = f"file:{tmp_path / 'mlruns'}"
    words = [*SHORT, f"logging.mlflow={where}", f"output={tmp_path / 'run'}", "resume=auto"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        ok(*words, env={"MLFLOW_ALLOW_FILE_STORE": "true"})
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=where)
    known_names = json.loads((tmp_path / "run" / "mlflow.json").read_text())["id"]
    run = client.get_run(known_names)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["model.name"] == "mlp"
    assert run.data.metrics["final/val_top1"] == pytest.approx(result(tmp_path / "run")["val_top1"])
    history = client.get_metric_history(known_names, "train/loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert len(client.search_runs([run.info.experiment_id])) == 1


SLOW_WANDB = """
import time
Settings = dict
def login(prompt):
    return True
def init(**settings):
    time.sleep(5)
    return Run()
class Run:
    summary = {}
    def log(self, values, step):
        pass
    def finish(self, exit_code):
        time.sleep(5)
"""


@pytest.mark.slow
def test_ranks_wait_for_a_server_that_rank_0_asks_for_longer_than_they_may_be_silent(tmp_path):
    (tmp_path / "wandb.py").write_text(SLOW_WANDB)
    variables = {"PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    words = ["mode=ddp", "nproc=2", "timeout=1", "logging.wandb=mine", f"output={tmp_path / 'run'}"]
    ok(*latest(*SHORT, *words), env=variables)
