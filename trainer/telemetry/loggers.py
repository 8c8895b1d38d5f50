"""Log the values of TensorBoard, the recipe and final numbers to Weights & Biases and MLflow.

Both libraries store values, send them in the background and retry by themselves. They are optional,
and imported on first use.
"""

import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import SetupError, describe, load_extra
from trainer.processes import interrupts
from trainer.processes.terminal import Say
from trainer.recipe import Recipe, flatten
from trainer.saving.files import Json, read_json_or_empty, write_atomically

# Environment variables of MLflow, with values for those that the user has not set.
MLFLOW_LIMITS = {
    # Limit the time of each request and its retries. By default, MLflow retries for minutes if its
    # server is out of reach.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    # With several threads, steps would be stored out of order.
    "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",
}


class WandbRun:
    """Run of Weights & Biases.

    Without an account on this machine, the values stay in the run folder and can be sent later.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        say: Say,
    ) -> None:
        wandb = load_extra("logging.wandb", "wandb")
        project = "trainer"
        if isinstance(recipe.logging.wandb, str):
            project = recipe.logging.wandb
        # Without an account, wandb.init would ask for one at the terminal.
        has_account = "WANDB_MODE" in os.environ or wandb.login(prompt=False)
        run_id = load_or_create_id(folder, "wandb", project, lambda: uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=folder,
            config=recipe.to_dict(),
            mode=None if has_account else "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        if not has_account:
            say(
                "logging.wandb: no account on this machine; wandb sync "
                f"{folder}/wandb/offline-run-* sends the values"
            )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(
            {**collect_final_figures(result), "status": result.get("status", "failed")}
        )
        self._run.finish(exit_code=int(result.get("status") != "completed"))


class MlflowRun:
    """Run of MLflow in an experiment that has the name of the recipe."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        say: Say,
    ) -> None:
        for variable, limit in MLFLOW_LIMITS.items():
            os.environ.setdefault(variable, limit)
        load_extra("logging.mlflow", "mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        server = recipe.logging.mlflow
        uri = server if isinstance(server, str) else None
        self._client = client = MlflowClient(tracking_uri=uri)
        self._requests: deque[Any] = deque(maxlen=1000)
        experiment = client.get_experiment_by_name(recipe.name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = client.create_experiment(recipe.name)
        # The address is stored in a file, so it must not contain a password.
        address = str(client.tracking_uri).rpartition("@")[2]

        def create_run() -> str:
            return str(client.create_run(experiment_id, run_name=folder.name).info.run_id)

        self._id = load_or_create_id(folder, "mlflow", address, create_run)
        client.update_run(self._id, status="RUNNING")
        # MLflow refuses to change the parameters of a run that is resumed, so log only new ones.
        logged = client.get_run(self._id).data.params
        params = [
            Param(key, str(value)[:500])
            for key, value in flatten(recipe.to_dict()).items()
            if key not in logged
        ]
        # MLflow accepts up to 100 parameters in a request.
        for start in range(0, len(params), 100):
            client.log_batch(self._id, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        self._requests.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def finish(self, result: Mapping[str, Any]) -> None:
        figures = {f"final/{key}": value for key, value in collect_final_figures(result).items()}
        self.scalars(figures, result.get("steps", 0))
        try:
            for request in self._requests:
                # An error of an earlier request is raised here.
                request.wait()
        finally:
            statuses = {"completed": "FINISHED", "preempted": "KILLED"}
            status = statuses.get(result.get("status", ""), "FAILED")
            self._client.set_terminated(self._id, status=status)


KINDS: dict[str, Any] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


class Loggers:
    """All loggers that a recipe enables, usually none."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        say: Say,
    ) -> None:
        self._say = say
        self._result: Json = {}
        self._runs: dict[str, Any] = {}
        for name, kind in KINDS.items():
            if getattr(recipe.logging, name):
                with self._dropped_on_error(name):
                    self._runs[name] = kind(recipe, folder, say)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step without waiting for a server."""
        self._each(lambda run: run.scalars(values, step))

    def result(self, result: Mapping[str, Any]) -> None:
        """Set the content of result.json, which `close` logs. Later calls replace earlier ones."""
        self._result = dict(result)

    def close(self) -> None:
        """Log the numbers of result.json, and wait until all values are sent."""
        self._each(lambda run: run.finish(self._result))
        self._runs = {}

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, run in [*self._runs.items()]:
            with self._dropped_on_error(name):
                call(run)

    @contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        """Drop the logger `name` with a warning if its library fails in this block."""
        try:
            yield
        except SetupError:
            raise
        except (Exception, SystemExit) as error:
            # The library's exit handler would wait for the server, so this process must not run any
            # exit handlers.
            interrupts.skips_shutdown.set()
            self._runs.pop(name, None)
            self._say(f"warning: logging.{name} lacks values from now on ({describe(error)})")


def load_or_create_id(
    folder: Path,
    name: str,
    where: str,
    make: Callable[[], str],
) -> str:
    """Return the id of a run at a logger. A resumed run keeps its id.

    Args:
        folder: Run folder, in which the id is stored.
        name: Name of the logger.
        where: Project or server of the run. An id that was stored for another project or server is
            not used.
        make: Function that creates an id.
    """
    stored = read_json_or_empty(folder / f"{name}.json")
    if isinstance(stored.get("id"), str) and stored.get("where", where) == where:
        return str(stored["id"])
    run_id = make()
    write_atomically(folder / f"{name}.json", json.dumps({"id": run_id, "where": where}) + "\n")
    return run_id


def collect_final_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the top-level numbers of result.json, and the mean speed and step time.

    True and False count as the numbers 1 and 0.
    """
    speed = result.get("throughput") or {}
    step = result.get("step_time_s") or {}
    figures = {
        **result,
        "samples_per_sec": speed.get("samples_per_sec"),
        "step_time_s": step.get("mean"),
    }
    return {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
