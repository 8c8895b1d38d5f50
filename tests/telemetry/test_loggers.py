"""W&B and MLflow: fed what TensorBoard is fed, beside the run and never in its way. With the real libraries where
they are installed, with stand-ins for the wiring everywhere."""

import glob
import json
import re
import socket
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.command_line import QUIET, ok, result, trainer
from trainer.errors import RecipeError, SetupError
from trainer.recipe import load
from trainer.recipe.checks import check_loggers
from trainer.saving.checkpoint import Position
from trainer.saving.run_folder import RunFolder
from trainer.telemetry import feeding, loggers
from trainer.telemetry.tracking import Tracker

SHORT = ["recipe=digits", "mode=single", "model.name=mlp", "max_steps=3", *QUIET]


class StandIn:
    """A library that remembers what it was given."""

    def __init__(self, recipe, folder):
        self.given = []
        type(self).last = self

    def open(self):
        self.given.append("open")

    def scalars(self, points):
        self.given += [(point.step, dict(point.values)) for point in points]

    def finish(self, result):
        self.given.append(result.get("status"))


@pytest.fixture
def track(tmp_path, monkeypatch):
    """Starts a tracker whose sink is the one given."""

    def start(sink, *words):
        monkeypatch.setitem(loggers.SINKS, "wandb", sink)
        recipe = load("digits", f"output={tmp_path / 'run'}", "logging.wandb=mine", *words)
        tracker = Tracker(recipe, RunFolder(recipe))
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
    assert StandIn.last.given == ["open", *((n, {"train/loss": 1 / n}) for n in range(1, 50)), "completed"]


@pytest.mark.parametrize("where", ["open", "scalars", "finish"])
def test_one_that_fails_is_one_warning_and_the_run_goes_on(track, where, capsys, monkeypatch):
    class Broken(StandIn):
        pass

    def fail(*_):
        raise SystemExit("the server\nsaid no")

    setattr(Broken, where, fail)
    monkeypatch.setattr(loggers, "PATIENCE", 0.1)
    monkeypatch.setattr(feeding.interrupts, "stuck", threading.Event())
    tracker = track(Broken)
    for step in range(1, 4):
        tracker.scalars({"train/loss": 1.0}, step)
        time.sleep(0.02)
    tracker.result({"status": "completed"})
    tracker.close()
    out = capsys.readouterr().out
    reason = "(SystemExit: the server said no)\n"
    first = "warning: logging.wandb does not answer: values are kept and sent again, and the run goes on " + reason
    last = "did not get the end of the run" if where == "finish" else "lacks 3 of 3 logged steps"
    assert out.count(f"warning: logging.wandb {last} {reason}") == 1 and out.count("warning") == 1 + (where != "finish")
    assert (first in out) == (where != "finish") and feeding.interrupts.stuck.is_set()


@pytest.mark.parametrize("where", ["open", "scalars"])
def test_a_server_that_is_away_for_a_while_gets_every_point_once_it_is_back(track, where, capsys, monkeypatch):
    class Away(StandIn):
        away, failed = threading.Event(), threading.Event()

        def answer(self):
            if self.away.is_set():
                self.failed.set()
                raise ConnectionError("nobody there")

        def open(self):
            self.answer()
            super().open()

        def scalars(self, points):
            super().scalars(points[:1])  # it took some, and lost the connection
            try:
                self.answer()
            except ConnectionError:
                self.given.pop()
                raise
            super().scalars(points[1:])

    monkeypatch.setattr(feeding, "FIRST", 0.01)
    if where == "open":
        Away.away.set()
    tracker = track(Away)
    for step in range(1, 500):
        tracker.scalars({"train/loss": 1 / step}, step)
        if step == 100:
            Away.away.set()
        if step == 300:
            assert Away.failed.wait(60)
            Away.away.clear()
    tracker.result({"status": "completed"})
    tracker.close()
    assert Away.last.given == ["open", *((n, {"train/loss": 1 / n}) for n in range(1, 500)), "completed"]
    out = capsys.readouterr().out
    assert out.count("logging.wandb does not answer") == out.count("logging.wandb answers again") == 1
    assert "lacks" not in out


def test_a_point_that_the_server_refuses_is_the_only_one_that_is_lost(track, capsys):
    class Refusal(Exception):
        def get_http_status_code(self):
            return 400

    class Picky(StandIn):
        def scalars(self, points):
            if any(point.step == 7 for point in points):
                raise Refusal("no sevens")
            super().scalars(points)

    tracker = track(Picky)
    for step in range(1, 50):
        tracker.scalars({"train/loss": 1 / step}, step)
    tracker.result({"status": "completed"})
    tracker.close()
    assert Picky.last.given == ["open", *((n, {"train/loss": 1 / n}) for n in range(1, 50) if n != 7), "completed"]
    assert re.search(r"warning: logging\.wandb .*\b1 of 49 .*\(Refusal: no sevens\)\n", capsys.readouterr().out)


def test_a_server_that_stays_away_costs_bounded_memory(track, capsys, monkeypatch):
    class Gone(StandIn):
        def open(self):
            raise ConnectionError("nobody there")

    monkeypatch.setattr(feeding, "KEPT", 10)
    monkeypatch.setattr(feeding.interrupts, "stuck", threading.Event())
    tracker = track(Gone)
    for step in range(1, 5000):
        tracker.scalars({"train/loss": 1 / step}, step)
    assert len(tracker._loggers._feeds[0]._waiting) == 10
    tracker.close()
    assert re.search(r"\b4,999 of 4,999 .*\(ConnectionError: nobody there\)", capsys.readouterr().out)


def test_one_that_hangs_holds_nothing_up(track, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "PATIENCE", 0.05)
    monkeypatch.setattr(loggers, "HURRY", 0.02)
    monkeypatch.setattr(feeding.interrupts, "stuck", threading.Event())
    go_on = threading.Event()

    class Hanging(StandIn):
        def open(self):
            go_on.wait(60)

    for status, patience in (("completed", "0.05"), ("preempted", "0.02")):
        tracker = track(Hanging, "resume=auto")
        tracker.scalars({"train/loss": 1.0}, 1)
        tracker.result({"status": status})
        tracker.close()
        assert re.search(rf"\b1 of 1 .*\b{patience} s\)", capsys.readouterr().out)
    go_on.set()
    assert feeding.interrupts.stuck.is_set()


def test_a_sink_says_where_the_values_go(track, capsys):
    class Elsewhere(StandIn):
        def open(self):
            return "elsewhere"

    track(Elsewhere).close()
    assert "\nlogging.wandb: elsewhere\n" in f"\n{capsys.readouterr().out}"


def test_wandb_is_given_the_recipe_the_values_and_the_end(tmp_path, monkeypatch):
    given = []

    def init(**words):
        given.append(words)
        return SimpleNamespace(
            log=lambda values, step: given.append((step, values)),
            summary=SimpleNamespace(update=given.append),
            finish=lambda exit_code: given.append(exit_code),
        )

    stand_in = ModuleType("wandb")
    stand_in.init, stand_in.Settings = init, lambda **words: words
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(loggers, "has_account", lambda: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    recipe = load("digits", "logging.wandb=faces")
    for _ in range(2):  # a run, and its continuation
        found = loggers.Loggers(recipe, tmp_path, print)
        found.scalars({"val/top1": 0.5}, 7)
        found.result({"status": "preempted", "val_top1": 0.5, "throughput": {"samples_per_sec": 9.0}, "steps": 7})
        found.close()
    first, values, summary, code, again, *_ = given
    assert (first["project"], first["mode"]) == ("faces", "offline")
    assert (first["name"], first["dir"]) == (tmp_path.name, tmp_path)
    assert first["config"]["optimizer"]["lr"] == recipe.optimizer.lr and values == (7, {"val/top1": 0.5})
    assert summary == {"val_top1": 0.5, "steps": 7.0, "samples_per_sec": 9.0, "status": "preempted"} and code == 1
    assert again["id"] == first["id"] and again["resume"] == "allow"


def test_an_account_is_a_variable_or_what_login_wrote(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not loggers.has_account()
    (tmp_path / ".netrc").write_text("machine other.host login user password x\n")
    assert not loggers.has_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert loggers.has_account()
    (tmp_path / ".netrc").write_text("[broken")
    assert not loggers.has_account()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert loggers.has_account()


def closed_port():
    """One at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_server_that_is_not_there_is_found_at_once(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    port = closed_port()
    with pytest.raises(ConnectionError, match=rf"^127\.0\.0\.1:{port} .*Connection refused$"):
        loggers.reach(f"http://somebody:secret@127.0.0.1:{port}/path")
    for elsewhere in ("file:/tmp/mlruns", "sqlite:///mlflow.db", "databricks", "mlruns", ""):
        loggers.reach(elsewhere)
    with socket.create_server(("127.0.0.1", 0)) as server:
        loggers.reach(f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(loggers, "has_account", lambda: True)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    assert re.fullmatch(rf"127\.0\.0\.1:{port} .*Connection refused", loggers.why_offline())


def test_a_run_is_known_where_it_was_begun(tmp_path):
    names = iter("abc")
    known = lambda where: loggers.known_id(tmp_path, "mlflow", where, lambda: next(names))  # noqa: E731
    assert [known("here"), known("here"), known("there"), known("there")] == ["a", "a", "b", "b"]
    (tmp_path / "mlflow.json").write_text('{"id": "of before"}')
    assert known("anywhere") == "of before"
    (tmp_path / "mlflow.json").write_text("[damaged")
    assert known("here") == "c"


@pytest.mark.parametrize("value", [5, ["a"], "", 1.5])
def test_what_is_no_project(value):
    with pytest.raises(RecipeError, match=r"logging\.wandb=.* true, .*project"):
        load({"extends": "digits", "logging": {"wandb": value}})


def test_a_project_on_the_command_line_is_its_letters():
    for text in ("5", "[a]", "1.5"):
        assert load("digits", f"logging.wandb={text}").logging.wandb == text
    with pytest.raises(RecipeError, match=r"logging\.wandb= "):
        load("digits", "logging.wandb=")


def test_one_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("trainer.recipe.checks.find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(SetupError, match=rf"logging\.{name} .*pip install {name}, .*logging\.{name}=null"):
            check_loggers(load("digits", f"logging.{name}=true"))
    monkeypatch.setattr("trainer.recipe.checks.find_spec", lambda name: SimpleNamespace(origin=None))  # a folder
    with pytest.raises(SetupError, match="pip install mlflow"):
        check_loggers(load("digits", "logging.mlflow=http://127.0.0.1:5000"))
    check_loggers(load("digits", "logging.mlflow=false"))


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_the_command_line_says_what_to_install(tmp_path):
    done = trainer(*SHORT, "logging.wandb=mine", f"output={tmp_path / 'run'}")
    assert (done.returncode, done.stdout) == (3, "") and not (tmp_path / "run").exists()
    assert re.fullmatch(r"trainer: error: logging\.wandb .*pip install wandb, .*logging\.wandb=null\n", done.stderr)


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: pip install .[loggers]")
def test_the_real_wandb_offline(tmp_path):
    ok(*SHORT, "logging.wandb=mine", f"output={tmp_path / 'run'}", env={"HOME": str(tmp_path), "WANDB_API_KEY": ""})
    [kept] = glob.glob(f"{tmp_path}/run/wandb/offline-run-*/run-*.wandb")
    content = Path(kept).read_bytes()
    for word in (b"train/loss", b"val/top1", b"samples_per_sec", b"optimizer", b"mine"):
        assert word in content
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"].encode() in content


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: pip install .[loggers]")
@pytest.mark.parametrize("answers", [True, False])
def test_a_run_ends_though_the_real_wandb_is_out_of_reach(tmp_path, answers):
    """One server takes connections and says nothing, the other is not there."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if answers else closed_port()
        own = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path)}
        done = ok(*SHORT, "logging.wandb=mine", f"output={tmp_path / 'run'}", env=own, timeout=120)
    if answers:
        assert re.search(r"warning: logging\.wandb .*\b\d of \d ", done.stdout)
    else:
        line = rf"logging\.wandb: 127\.0\.0\.1:{port} .*Connection refused.*: wandb sync "
        assert re.search(line + re.escape(f"{tmp_path}/run/wandb/offline-run-* "), done.stdout)
        assert glob.glob(f"{tmp_path}/run/wandb/offline-run-*/run-*.wandb")
    assert result(tmp_path / "run")["status"] == "completed"


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow: pip install .[loggers]")
def test_a_run_ends_though_the_real_mlflow_is_not_there(tmp_path):
    port = closed_port()
    done = ok(*SHORT, f"logging.mlflow=http://127.0.0.1:{port}", f"output={tmp_path / 'run'}", timeout=120)
    assert re.search(rf"\(ConnectionError: 127\.0\.0\.1:{port} .*Connection refused\)\n", done.stdout)
    assert result(tmp_path / "run")["status"] == "completed"


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow: pip install .[loggers]")
def test_the_real_mlflow_in_a_folder_and_continued(tmp_path, monkeypatch):
    where = f"file:{tmp_path / 'mlruns'}"
    words = [*SHORT, f"logging.mlflow={where}", f"output={tmp_path / 'run'}", "resume=auto"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        ok(*words, env={"MLFLOW_ALLOW_FILE_STORE": "true"})
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=where)
    known = json.loads((tmp_path / "run" / "mlflow.json").read_text())["id"]
    run = client.get_run(known)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run") and run.data.params["model.name"] == "mlp"
    assert run.data.metrics["final/val_top1"] == pytest.approx(result(tmp_path / "run")["val_top1"])
    history = client.get_metric_history(known, "train/loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert len(client.search_runs([run.info.experiment_id])) == 1
