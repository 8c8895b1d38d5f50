"""Weights & Biases and MLflow beside TensorBoard: the same values, the recipe, the final figures.

Each has a thread of its own, so that no step waits for a server; one that fails is left with a line, and the run goes
on. The libraries are optional and imported in that thread.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlparse

from trainer.errors import text_of
from trainer.recipe import Recipe, flatten
from trainer.saving.files import usable_json
from trainer.saving.run_folder import write_atomically

PATIENCE = 30.0  # seconds that a run's end waits for what is still to be sent
PROJECT = "trainer"  # where logging.wandb=true goes
MANY = 100  # parameters or metrics of one request to MLflow
LONGEST = 500  # characters of a parameter's value in MLflow
FINAL = ("best_epoch", "train_loss", "epochs", "steps", "seconds", "data_wait_fraction", "mfu")


class Sink(Protocol):
    """Where values go; every method may block, and may raise anything."""

    def open(self) -> None:
        """Begin a run there, or go on with the one that an earlier part of this run began."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step, by tag."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended like this; empty where it ended before its first epoch did."""


class WandbSink:
    """A run of Weights & Biases. Without an account on this machine it stays in the run folder, to be sent later."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def open(self) -> None:
        import wandb

        project = self.recipe.logging.wandb
        self._run = wandb.init(
            project=project if isinstance(project, str) else PROJECT,
            name=self.folder.name,
            id=known_id(self.folder, "wandb", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=self.folder,
            config=self.recipe.to_dict(),
            mode=None if "WANDB_MODE" in os.environ or has_account() else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update({**final_figures(result), "status": result.get("status", "failed")})
        self._run.finish(exit_code=0 if result.get("status") == "completed" else 1)


class MlflowSink:
    """A run of MLflow, in an experiment named like the recipe."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        where = self.recipe.logging.mlflow
        self._client = MlflowClient(tracking_uri=where if isinstance(where, str) else None)
        known = self._client.get_experiment_by_name(self.recipe.name)
        home = known.experiment_id if known else self._client.create_experiment(self.recipe.name)

        def begin() -> str:
            return str(self._client.create_run(home, run_name=self.folder.name).info.run_id)

        self._id = known_id(self.folder, "mlflow", begin)
        self._client.update_run(self._id, status="RUNNING")
        before = self._client.get_run(self._id).data.params  # of a run that goes on; MLflow refuses another value
        keys = flatten(self.recipe.to_dict())
        params = [Param(key, str(value)[:LONGEST]) for key, value in keys.items() if key not in before]
        for start in range(0, len(params), MANY):
            self._client.log_batch(self._id, params=params[start : start + MANY])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        for start in range(0, len(metrics), MANY):
            self._client.log_batch(self._id, metrics=metrics[start : start + MANY])

    def finish(self, result: Mapping[str, Any]) -> None:
        self.scalars({f"final/{key}": value for key, value in final_figures(result).items()}, result.get("steps", 0))
        status = {"completed": "FINISHED", "preempted": "KILLED"}.get(result.get("status", ""), "FAILED")
        self._client.set_terminated(self._id, status=status)


SINKS: dict[str, Callable[[Recipe, Path], Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink}


class Loggers:
    """The loggers that a recipe names; none is the usual case, and then nothing here does anything."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        wanted = [name for name in SINKS if getattr(recipe.logging, name)]
        self._feeds = [LoggerThread(name, SINKS[name](recipe, folder)) for name in wanted]
        self._result: Mapping[str, Any] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step; returns at once."""
        for feed in self._feeds:
            feed.put(values, step)
        self._tell()

    def result(self, result: Mapping[str, Any]) -> None:
        """What result.json holds now; the last one is the run's."""
        self._result = dict(result)

    def close(self) -> None:
        """Wait until all is sent, though not for ever."""
        for feed in self._feeds:
            feed.close(self._result)
        self._tell()
        self._feeds = []

    def _tell(self) -> None:
        for feed in self._feeds:
            if (line := feed.news()) is not None:
                self._say(f"warning: {line}")


class LoggerThread:
    """The thread that gives a sink its values in order. The first failure is its last."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._values: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._result: Mapping[str, Any] = {}
        self._failure: str | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"logging.{name}", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, float], step: int) -> None:
        if not self._failed:
            self._values.put((dict(values), step))

    def close(self, result: Mapping[str, Any]) -> None:
        """Send what is left and the end of the run; gives up after PATIENCE seconds."""
        self._result = result
        self._values.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._failure = f"it has not taken all values within {PATIENCE:g} s"

    def news(self) -> str | None:
        """What went wrong, once."""
        failure, self._failure = self._failure, None
        return failure and f"logging.{self._name} is left out from here on, and the run goes on ({failure})"

    def _work(self) -> None:
        try:
            self._sink.open()
            while (item := self._values.get()) is not None:
                self._sink.scalars(*item)
            self._sink.finish(self._result)
        except BaseException as error:  # whatever a library and its server may raise, SystemExit too
            self._failed = True
            self._failure = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"


def known_id(folder: Path, name: str, make: Callable[[], str]) -> str:
    """The logger's own name of the run: that of its earlier parts, else a fresh one, which is kept in the folder."""
    found = usable_json(folder / f"{name}.json").get("id")
    if isinstance(found, str) and found:
        return found
    fresh = make()
    write_atomically(folder / f"{name}.json", json.dumps({"id": fresh}) + "\n")
    return fresh


def final_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result.json that one sorts runs by."""
    speed, step = result.get("throughput") or {}, result.get("step_time_s") or {}
    wanted = [key for key in result if key.startswith(("val_", "best_"))]
    flat = {key: result.get(key) for key in dict.fromkeys((*wanted, *FINAL))}
    flat |= {"samples_per_sec": speed.get("samples_per_sec"), "step_time_s": step.get("mean")}
    return {key: float(value) for key, value in flat.items() if isinstance(value, int | float)}


def has_account() -> bool:
    """Whether Weights & Biases knows who is here, by a variable or by what `wandb login` wrote, and need not ask."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for file in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            if netrc(Path(file).expanduser()).authenticators(host):
                return True
    return False
