"""Weights & Biases and MLflow beside TensorBoard: the same values, the recipe, the final figures.

Each has a thread of its own, so that no step waits for a server; one that fails is left with a line, and the run goes
on. The libraries are optional and imported in that thread.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlparse
from urllib.request import getproxies

from trainer.errors import text_of
from trainer.processes import interrupts
from trainer.recipe import Recipe, flatten
from trainer.saving.files import usable_json
from trainer.saving.run_folder import write_atomically

PATIENCE, HURRY = 30.0, 10.0  # seconds that a run's end waits for what is still to be sent; that of a stopped one
ANSWER = 10.0  # seconds in which a server must take a connection
WANDB = "https://api.wandb.ai"  # where W&B is, unless WANDB_BASE_URL says so
PROJECT = "trainer"  # where logging.wandb=true goes
MANY = 100  # parameters or metrics of one request to MLflow
LONGEST = 500  # characters of a parameter's value in MLflow
FINAL = ("best_epoch", "train_loss", "epochs", "steps", "seconds", "data_wait_fraction", "mfu")


class Sink(Protocol):
    """Where values go; every method may block, and may raise anything."""

    def open(self) -> str:
        """Begin a run there, or go on with the one that an earlier part of this run began.

        Returns:
            What people are to know of where the values go; empty where they go where they were asked to.
        """

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step, by tag."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended like this; empty where it ended before its first epoch did."""


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

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

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
            feed.end(self._result)
        patience = HURRY if self._result.get("status") == "preempted" else PATIENCE
        until = time.monotonic() + patience
        for feed in self._feeds:
            feed.wait(until, patience)
        self._tell()
        self._feeds = []

    def _tell(self) -> None:
        for feed in self._feeds:
            for line in feed.news():
                self._say(line)


class LoggerThread:
    """The thread that gives a sink its values in order. The first failure is its last."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._values: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._news: SimpleQueue[str] = SimpleQueue()
        self._result: Mapping[str, Any] = {}
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"logging.{name}", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, float], step: int) -> None:
        if not self._failed:
            self._values.put((dict(values), step))

    def end(self, result: Mapping[str, Any]) -> None:
        """After what is left the end of the run is to be sent."""
        self._result = result
        self._values.put(None)

    def wait(self, until: float, patience: float) -> None:
        """Wait for that, and give up at a time of the monotonic clock, which is after `patience` seconds."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it has not taken all values within {patience:g} s")

    def news(self) -> Iterator[str]:
        """What people are to know, once."""
        while not self._news.empty():
            yield self._news.get()

    def _fail(self, reason: str) -> None:
        self._failed = True
        interrupts.stuck.set()  # its library would wait for it at the end of this process
        self._news.put(f"warning: logging.{self._name} is left out from here on, and the run goes on ({reason})")

    def _work(self) -> None:
        try:
            if note := self._sink.open():
                self._news.put(f"logging.{self._name}: {note}")
            while (item := self._values.get()) is not None:
                self._sink.scalars(*item)
            self._sink.finish(self._result)
        except BaseException as error:  # whatever a library and its server may raise, SystemExit too
            self._fail(f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}")


def known_id(folder: Path, name: str, where: str, make: Callable[[], str]) -> str:
    """The logger's own name of the run: that of its earlier parts there, else a fresh one, kept in the folder."""
    kept = usable_json(folder / f"{name}.json")
    found = kept.get("id")
    if isinstance(found, str) and found and kept.get("where", where) == where:
        return found
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
        return "no account is known on this machine (wandb login makes one known)"
    try:
        reach(os.environ.get("WANDB_BASE_URL") or WANDB)
    except OSError as error:
        return str(error)
    return ""


def reach(address: str) -> None:
    """Knock at a server, for which the libraries themselves would wait for minutes.

    Raises:
        ConnectionError: it does not answer.
    """
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
