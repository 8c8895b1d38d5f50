"""Weights & Biases and MLflow beside TensorBoard: the same values, the recipe, the final figures.

Both keep, send and try again in the background by themselves. They are optional and imported on first use.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import text_of
from trainer.processes import interrupts
from trainer.recipe import Recipe, flatten
from trainer.saving.files import usable_json, write_atomically

SOON = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}  # else it tries for minutes


class WandbRun:
    """A run of Weights & Biases. Without an account on this machine it stays in the run folder, to be sent later."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
        import wandb

        project = recipe.logging.wandb if isinstance(recipe.logging.wandb, str) else "trainer"
        known = "WANDB_MODE" in os.environ or wandb.login(prompt=False)  # without an account it would ask
        self._run = wandb.init(
            project=project, name=folder.name, id=known_id(folder, "wandb", project, lambda: uuid.uuid4().hex[:12]),
            resume="allow", dir=folder, config=recipe.to_dict(), mode=None if known else "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )  # fmt: skip
        if not known:
            say(f"logging.wandb: no account on this machine; wandb sync {folder}/wandb/offline-run-* sends the values")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update({**final_figures(result), "status": result.get("status", "failed")})
        self._run.finish(exit_code=0 if result.get("status") == "completed" else 1)


class MlflowRun:
    """A run of MLflow, in an experiment named like the recipe."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
        for variable, limit in SOON.items():
            os.environ.setdefault(variable, limit)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        where = recipe.logging.mlflow
        self._client = client = MlflowClient(tracking_uri=where if isinstance(where, str) else None)
        self._sent: deque[Any] = deque(maxlen=1000)
        known = client.get_experiment_by_name(recipe.name)
        home = known.experiment_id if known else client.create_experiment(recipe.name)
        address = str(client.tracking_uri).rpartition("@")[2]
        begin = lambda: str(client.create_run(home, run_name=folder.name).info.run_id)  # noqa: E731
        self._id = known_id(folder, "mlflow", address, begin)
        client.update_run(self._id, status="RUNNING")
        before = client.get_run(self._id).data.params  # of a run that goes on; MLflow refuses another value
        keys = flatten(recipe.to_dict())
        params = [Param(key, str(value)[:500]) for key, value in keys.items() if key not in before]
        for start in range(0, len(params), 100):  # a request takes no more
            client.log_batch(self._id, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(tag, value, int(1000 * time.time()), step) for tag, value in values.items()]
        self._sent.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def finish(self, result: Mapping[str, Any]) -> None:
        self.scalars({f"final/{key}": value for key, value in final_figures(result).items()}, result.get("steps", 0))
        try:
            for request in self._sent:
                request.wait()  # raises what went wrong meanwhile
        finally:
            status = {"completed": "FINISHED", "preempted": "KILLED"}.get(result.get("status", ""), "FAILED")
            self._client.set_terminated(self._id, status=status)


KINDS: dict[str, Callable[[Recipe, Path, Callable[[str], None]], Any]] = {"wandb": WandbRun, "mlflow": MlflowRun}


class Loggers:
    """The loggers that a recipe names; none is the usual case, and then nothing here does anything."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
        self._say, self._result, self._runs = say, dict[str, Any](), dict[str, Any]()
        for name, kind in KINDS.items():
            if getattr(recipe.logging, name):
                with self._or_told(name):
                    self._runs[name] = kind(recipe, folder, say)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step; returns at once."""
        self._each(lambda run: run.scalars(values, step))

    def result(self, result: Mapping[str, Any]) -> None:
        """What result.json holds now; the last one is the run's."""
        self._result = dict(result)

    def close(self) -> None:
        """Wait until all is sent."""
        self._each(lambda run: run.finish(self._result))
        self._runs = {}

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, run in [*self._runs.items()]:
            with self._or_told(name):
                call(run)

    @contextmanager
    def _or_told(self, name: str) -> Iterator[None]:
        """A library that fails is left out from here on, and told."""
        try:
            yield
        except (Exception, SystemExit) as error:
            interrupts.stuck.set()  # its library would wait for it at the end of this process
            self._runs.pop(name, None)
            reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
            self._say(f"warning: logging.{name} lacks values from here on ({reason})")


def known_id(folder: Path, name: str, where: str, make: Callable[[], str]) -> str:
    """The logger's own name of the run: that of its earlier parts there, else a fresh one, kept in the folder."""
    kept = usable_json(folder / f"{name}.json")
    if isinstance(kept.get("id"), str) and kept.get("where", where) == where:
        return str(kept["id"])
    fresh = make()
    write_atomically(folder / f"{name}.json", json.dumps({"id": fresh, "where": where}) + "\n")
    return fresh


def final_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result.json."""
    speed, step = result.get("throughput") or {}, result.get("step_time_s") or {}
    figures = {**result, "samples_per_sec": speed.get("samples_per_sec"), "step_time_s": step.get("mean")}
    return {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
