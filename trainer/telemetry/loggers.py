"""Weights & Biases and MLflow beside TensorBoard: the same values, the recipe, the final figures.

Each has a thread of its own, so that no step waits for a server; `feeding` keeps the values of one that is away. The
libraries are optional and imported in that thread.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from trainer.recipe import Recipe, flatten
from trainer.saving.files import usable_json, write_atomically
from trainer.telemetry.feeding import LoggedStep, LoggerThread, Sink

PATIENCE, HURRY = 30.0, 10.0  # seconds that a run's end waits for what is still to be sent; that of a stopped one
ANSWER = 10.0  # seconds in which a server must take a connection
WANDB = "https://api.wandb.ai"  # where W&B is, unless WANDB_BASE_URL says so
PROJECT = "trainer"  # where logging.wandb=true goes
MANY, METRICS = 100, 1000  # parameters, and metrics, of one request to MLflow
LONGEST = 500  # characters of a parameter's value in MLflow
FINAL = ("best_epoch", "train_loss", "epochs", "steps", "seconds", "data_wait_fraction", "mfu")


class WandbSink:
    """A run of Weights & Biases. Without an account on this machine it stays in the run folder, to be sent later."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def open(self) -> str:
        import wandb

        project = self.recipe.logging.wandb if isinstance(self.recipe.logging.wandb, str) else PROJECT
        here = "" if "WANDB_MODE" in os.environ else why_offline()
        self._run = wandb.init(
            project=project,
            name=self.folder.name,
            id=known_id(self.folder, "wandb", project, lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=self.folder,
            config=self.recipe.to_dict(),
            mode="offline" if here else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        later = f"wandb sync {self.folder}/wandb/offline-run-*"
        return here and f"{here}; values stay in the run folder: {later} sends them"

    def scalars(self, points: Sequence[LoggedStep]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update({**final_figures(result), "status": result.get("status", "failed")})
        self._run.finish(exit_code=0 if result.get("status") == "completed" else 1)


class MlflowSink:
    """A run of MLflow, in an experiment named like the recipe."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def open(self) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        where = self.recipe.logging.mlflow
        self._client = MlflowClient(tracking_uri=where if isinstance(where, str) else None)
        address = str(self._client.tracking_uri)
        reach(address)
        known = self._client.get_experiment_by_name(self.recipe.name)
        home = known.experiment_id if known else self._client.create_experiment(self.recipe.name)

        def begin() -> str:
            return str(self._client.create_run(home, run_name=self.folder.name).info.run_id)

        self._id = known_id(self.folder, "mlflow", address.rpartition("@")[2], begin)
        self._client.update_run(self._id, status="RUNNING")
        before = self._client.get_run(self._id).data.params  # of a run that goes on; MLflow refuses another value
        keys = flatten(self.recipe.to_dict())
        params = [Param(key, str(value)[:LONGEST]) for key, value in keys.items() if key not in before]
        for start in range(0, len(params), MANY):
            self._client.log_batch(self._id, params=params[start : start + MANY])
        return ""

    def scalars(self, points: Sequence[LoggedStep]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(1000 * when), step) for values, step, when in points for tag, value in values.items()
        ]
        for start in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + METRICS])

    def finish(self, result: Mapping[str, Any]) -> None:
        figures = {f"final/{key}": value for key, value in final_figures(result).items()}
        self.scalars([LoggedStep(figures, result.get("steps", 0), time.time())])
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
        patience = HURRY if self._result.get("status") == "preempted" else PATIENCE
        for feed in self._feeds:
            feed.end(self._result, time.monotonic() + patience)
        for feed in self._feeds:
            feed.wait(patience)
        self._tell()
        self._feeds = []

    def _tell(self) -> None:
        for feed in self._feeds:
            for line in feed.news():
                self._say(line)


def known_id(folder: Path, name: str, where: str, make: Callable[[], str]) -> str:
    """The logger's own name of the run: that of its earlier parts there, else a fresh one, kept in the folder."""
    kept = usable_json(folder / f"{name}.json")
    name_there = kept.get("id")
    if isinstance(name_there, str) and name_there and kept.get("where", where) == where:
        return name_there
    fresh = make()
    write_atomically(folder / f"{name}.json", json.dumps({"id": fresh, "where": where}) + "\n")
    return fresh


def final_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result.json that one sorts runs by."""
    speed, step = result.get("throughput") or {}, result.get("step_time_s") or {}
    wanted = [key for key in result if key.startswith(("val_", "best_"))]
    flat = {key: result.get(key) for key in dict.fromkeys((*wanted, *FINAL))}
    flat |= {"samples_per_sec": speed.get("samples_per_sec"), "step_time_s": step.get("mean")}
    return {key: float(value) for key, value in flat.items() if isinstance(value, int | float)}


def why_offline() -> str:
    """Why nothing can be sent to Weights & Biases from here; empty where it can."""
    if not has_account():
        return "this machine has no account of Weights & Biases (wandb login adds one)"
    try:
        reach(os.environ.get("WANDB_BASE_URL") or WANDB)
    except OSError as error:
        return str(error)
    return ""


def reach(address: str) -> None:
    """Raises ConnectionError where a server does not answer, for which the libraries would wait for minutes."""
    there = urlparse(address)
    port = there.port or {"http": 80, "https": 443}.get(there.scheme)
    if port is None or there.hostname is None or getproxies().keys() - {"no"}:  # a file; a way that only they know
        return
    try:
        socket.create_connection((there.hostname, port), ANSWER).close()
    except OSError as error:
        raise ConnectionError(f"{there.hostname}:{port} does not answer: {error.strerror or error}") from None


def has_account() -> bool:
    """Whether Weights & Biases knows who is here, by a variable or by what `wandb login` wrote, and need not ask."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or WANDB).hostname or ""
    for file in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            if netrc(Path(file).expanduser()).authenticators(host):
                return True
    return False
