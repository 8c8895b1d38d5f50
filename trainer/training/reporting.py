"""Report the progress and result of a run.

The reports are logged values, calls of the user's callbacks, printed lines, and result.json.
"""

import platform
import shlex
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

import torch
import torchvision
from torch import Tensor

from trainer.devices import precision
from trainer.modes import Strategy
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.saving.files import without_nan
from trainer.saving.journal import START
from trainer.saving.saver import Cost
from trainer.tasks import Task
from trainer.tasks.task import figure
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.readable import format_duration, format_number, format_size
from trainer.training.banner import compute_shares
from trainer.training.evaluation import WORST, strip_prefix
from trainer.training.observer import ModelFacts, Observer
from trainer.training.results import Result
from trainer.training.state import History, Resolved, TrainState
from trainer.training.stopping import describe_end
from trainer.versions import VERSION

# Maximum number of suggestions that the end of a run prints. `runs show` prints all of them.
SUGGESTIONS = 3
# Keys of the earlier result that are kept if a resumed run has no step left to train.
KEPT_KEYS = (
    "throughput",
    "step_time_s",
    "data_wait_fraction",
    "launch_bound_fraction",
    "short",
    "seconds_in",
    "verdict",
    "warnings",
)


def log_step(
    state: TrainState,
    observer: Observer,
    loss: float,
    norm: Tensor | None,
    speed: float | None,
    window: tuple[int, float, float],
) -> None:
    """Log the values of a step, and write its row to steps.csv. Collective.

    The values are logged to those of TensorBoard, W&B and MLflow that the recipe enables. Speeds
    are left out during warm-up.

    Args:
        state: The state after the step.
        observer: Timer and tracker of the run.
        loss: Mean loss of the steps since the last logged step.
        norm: Norm of the gradient before clipping, 0-dim. None if it was not computed.
        speed: Images per second of all devices, or None during warm-up.
        window: Number of steps, their seconds, and their seconds of waiting for data, since the
            last logged step and without warm-up steps.
    """
    steps, seconds, data_wait = window
    tracker = observer.tracker
    values = {"train/loss": loss, "train/lr": state.lr}
    if norm is not None:
        values["train/grad_norm"] = norm.item()
    if speed is not None:
        values |= {
            "speed/samples_per_sec": speed,
            "speed/samples_per_sec_per_device": speed / state.strategy.world.count(),
            "speed/step_ms": 1e3 * seconds / steps,
            "speed/data_wait_pct": 100 * data_wait / seconds,
        }
        if observer.timer.cuda:
            values["speed/launch_bound_pct"] = 100 * observer.timer.latest_launches
        mfu = _compute_mfu(observer.model, speed)
        if mfu is not None:
            values["speed/mfu_pct"] = 100 * mfu
    position = state.position
    tracker.step(
        {
            "step": position.step,
            "epoch": position.epoch + 1,
            "seconds": round(state.seconds(), 3),
            "train_loss": loss,
            "lr": state.lr,
            "samples_per_sec": float(f"{speed:.6g}") if speed is not None else "",
            "skipped": len(state.history.nonfinite),
        }
    )
    tracker.scalars(values | state.strategy.figures(), position.step)


def compute_speed(samples_per_step: float, steps: int, seconds: float) -> float | None:
    """Return the images per second of all devices in `steps` steps; None without any time."""
    if seconds:
        return steps * samples_per_step / seconds
    return None


def compute_idle_share(strategy: Strategy, measured: float) -> float:
    """Return the fraction of a step in which devices idle because they wait for other stages.

    `measured` is the fraction that a pipeline has measured; 0 without a pipeline.
    """
    world = strategy.world
    if world.size == 1 and world.device.type == "cpu":
        # The stages of one process on a CPU work in turn, so none of them idles.
        return 0.0
    if strategy.recipe.traits.one_stage_at_a_time:
        return 1 - 1 / len(set(world.local_devices))
    return measured


def _compute_mfu(model: ModelFacts, samples_per_sec: float) -> float | None:
    if model.peak_flops is None:
        return None
    return samples_per_sec * model.training_flops / model.peak_flops


def build_epoch_row(
    resolved: Resolved,
    state: TrainState,
    epoch: int,
    speed: float | None,
    seconds: float,
    memory: Mapping[str, int],
) -> dict[str, str]:
    """Return an epoch's row of the printed table, as strings by the title of the column.

    Args:
        resolved: The configuration of the run.
        state: State of the run after the epoch.
        epoch: Number of the epoch, counted from 0.
        speed: Images/s of the epoch's steps, without evaluations; None if they are unknown.
        seconds: Duration of the whole epoch with its evaluation.
        memory: Peak memory in bytes by device name.
    """
    epochs = resolved.recipe.epochs
    history = state.history
    row = {
        "epoch": f"{epoch + 1:{len(str(epochs))}}/{epochs}",
        "train loss": figure(history.losses[-1]),
    }
    metrics = resolved.task.shown(strip_prefix(history.validation))
    for title, text in metrics.items():
        row["val loss" if title == "loss" else title] = text
    # Later epochs may have a wider rate than the first one, such as 9.76e-05.
    row["lr"] = f"{state.lr:8.3g}"
    row["images/s"] = "-"
    if speed:
        decimals = 1 if speed < 100 else 0
        row["images/s"] = f"{speed:,.{decimals}f}"
    row["seconds"] = f"{seconds:,.1f}"
    on_gpus = [size for name, size in memory.items() if name.startswith("cuda")]
    if on_gpus:
        row["GPU GiB"] = f"{max(on_gpus) / 2**30:.2f}"
    return row


def build_last_lines(
    resolved: Resolved,
    history: History,
    memory: Mapping[str, int],
    result: Result,
    announced: Container[str],
) -> dict[str, str]:
    """Return lines about the result and its files, by title.

    Args:
        resolved: The configuration of the run.
        history: History of the run.
        memory: Peak memory in bytes by device name.
        result: Content of result.json.
        announced: Kinds of the warnings that the run has printed. A printed warning about other
            processes is not repeated.
    """
    recipe = resolved.recipe
    task = resolved.task
    throughput = result["throughput"]
    folder = resolved.tracker.path
    speed = "too few steps to measure speed"
    if throughput:
        speed = f"{format_number(throughput['samples_per_sec'])} images/s"
        # A mean below its standard deviation is not meaningful.
        if (throughput["std"] or 0.0) > throughput["samples_per_sec"]:
            speed = "no steady images/s"
        if result["short"]:
            speed += ", measured over all steps after the first: fewer than logging.warmup_steps"
    title = "warning"
    suggestions = [*result["warnings"].values()]
    # The sentence of a verdict includes the warnings, so it is printed instead of them.
    if result["verdict"]:
        title = "verdict"
        suggestions = result["verdict"]["sentence"].splitlines()
    if "cores" in announced:
        load = result["warnings"].get("cores")
        suggestions = [line for line in suggestions if line != load]
    verdict = {}
    if suggestions:
        verdict = {title: "\n".join(suggestions[:SUGGESTIONS])}
    if resolved.speed_only:
        sizes = ", ".join(f"{name} {format_size(size)}" for name, size in memory.items())
        measured = f"on synthetic images: {speed}; peak memory {sizes}"
        return {"measured": measured, **verdict, "result": f"{folder}/result.json"}
    quoted_folder = shlex.quote(str(folder))
    weights = {"weights": f"{folder}/last.safetensors"}
    if result["ended_by"] == "max_time":
        text = f"max_time={recipe.max_time} is over: step {result['steps']} is saved; continue with"
        text += f" recipe={quoted_folder} output={quoted_folder} resume=auto"
        return {"stopped": text, **verdict, **weights}
    metric = task.metric
    value = task.text({metric: history.validation.get(f"val_{metric}")})
    best = _describe_best(task, history)
    neighbors = ""
    if result["knn_top1"] is not None:
        neighbors = f", nearest neighbors {result['knn_top1']:.2%},"
    text = f"{value}{best}{neighbors} on {result['data']['val_samples']:,} held-out images, {speed}"
    text += f", {format_duration(result['seconds'])}"
    if result["data"]["skipped"]:
        text += f"; {result['data']['skipped']} times an unreadable image was replaced or left out"
    if result["data"]["uncached"]:
        text += (
            f"; {result['data']['uncached']:,} times a photo was not in the cache and was prepared "
            "again"
        )
    lines = {"done": text, **verdict, **weights}
    if best:
        lines["best"] = f"{folder}/best.safetensors"
    if recipe.pipeline.timeline:
        lines["timeline"] = f"{folder}/timeline.png"
    is_own = recipe.data.name in OWN_PHOTOS
    if is_own and folder and (folder / WORST).exists():
        lines["worst"] = f"{folder}/{WORST}"
        lines["labels"] = f"python -m trainer predict {quoted_folder} predict.split=train"
    if recipe.logging.tensorboard:
        lines["watch"] = f"python -m trainer tensorboard {quoted_folder}"
    return lines


def _describe_best(task: Task, history: History) -> str:
    """Return a phrase about the best epoch, empty if it is not better than the last epoch."""
    metric = task.metric
    if history.best_epoch is None or history.best == history.validation.get(f"val_{metric}"):
        return ""
    [best] = task.shown({metric: history.best}).values()
    return f" (best {best} in epoch {history.best_epoch + 1})"


def list_seconds(ledger: Ledger) -> dict[str, float]:
    """Return the seconds of this attempt by activity. All remaining time counts as "steps"."""
    spent = ledger.read_seconds()
    total = time.perf_counter() - ledger.start_time
    start_up = sum(seconds for name, seconds in spent.items() if name.startswith(START))
    others = {"start-up": start_up}
    for name in ("evaluation", "averaging", "saving", "verification"):
        others[name] = spent.get(name, 0.0)
    steps = {"steps": max(0.0, total - sum(others.values()))}
    return steps | {name: seconds for name, seconds in others.items() if seconds > 0}


def summarize_saves(costs: Sequence[Cost]) -> dict[str, float] | None:
    """Return the number of saves of this attempt and their mean seconds, or None without saves.

    `blocked_s` is the mean number of seconds for which training pauses for a save. `seconds` is the
    mean number of seconds until a save is written.
    """
    if not costs:
        return None
    return {
        "count": len(costs),
        "blocked_s": fmean(cost.blocked for cost in costs),
        "seconds": fmean(cost.seconds for cost in costs),
    }


def build_result(
    resolved: Resolved,
    state: TrainState,
    observer: Observer,
    samples_per_step: float,
    graphs: str | None,
    save_costs: Sequence[Cost],
    status: str,
    error: str | None,
    exit_code: int | None,
) -> Result:
    """Return the content of result.json, whose keys are stable.

    Args:
        resolved: The configuration of the run.
        state: The state of the run.
        observer: Timers and warnings of the run.
        samples_per_step: Mean number of images of a step.
        graphs: How steps are computed now, "launched", "replayed" or None: see `EagerSteps.kind`.
        save_costs: Costs of the saves of this attempt.
        status: "running", "completed", "preempted" or "failed".
        error: One line about the error that ended the run, if any.
        exit_code: Exit code of the error, if any.
    """
    history = state.history
    recipe = resolved.recipe
    data = resolved.datasets
    world = resolved.world
    task = resolved.task
    strategy = state.strategy
    tracker = resolved.tracker
    is_completed = status == "completed"
    computed_in = precision.resolve_precision(recipe.precision, world.device)
    speed = observer.timer.summary(samples_per_step)
    figures = asdict(speed)
    mfu = None
    if speed.throughput is not None:
        rate = speed.throughput.samples_per_sec
        mfu = _compute_mfu(observer.model, rate)
        figures["throughput"] |= {"per_device": rate / world.count(), "threads": world.threads}
    plain: Result = without_nan(
        {
            "recipe": recipe.name,
            "mode": recipe.mode,
            "world_size": world.size,
            "devices": list(world.devices),
            "batch_size": recipe.batch_size,
            "accumulate": recipe.pieces,
            "shares": compute_shares(strategy),
            "precision": computed_in,
            "epochs": len(history.losses),
            "steps": state.position.step,
            "status": status,
            "error": error,
            "ended_by": describe_end(resolved, state) if is_completed else None,
            "exit_code": 0 if is_completed else exit_code,
            "data": {
                "name": data.name,
                "synthetic": data.synthetic,
                "train_samples": len(data.train),
                "val_samples": int(history.validation.get("val_samples", len(data.val))),
                "skipped": history.skipped,
                "uncached": history.uncached,
            },
            "train_loss": history.losses[-1] if history.losses else None,
            "task": recipe.task.name,
            **{f"val_{name}": None for name in (*task.metric_names(), *task.measured)},
            **{key: value for key, value in history.validation.items() if key != "val_samples"},
            f"best_{task.metric}": history.best,
            "best_epoch": None if history.best_epoch is None else history.best_epoch + 1,
            "knn_top1": observer.model.knn_top1,
            **figures,
            "graphs": graphs,
            "recompute": strategy.recompute_description,
            "peak_memory_bytes": observer.memory,
            "mfu": mfu,
            "pipeline": None,
            "losses": history.losses,
            "validation": history.evaluations,
            "nonfinite_steps": len(history.nonfinite),
            "logged": history.logged,
            "seconds": state.seconds(),
            "seconds_in": list_seconds(observer.ledger),
            "save": summarize_saves(save_costs),
            "goodput": tracker.journal.goodput(),
            "verdict": None,
            "warnings": observer.noticed.warnings,
            "facts": observer.banner_lines,
            "versions": list_versions(),
            "output": str(tracker.path) if tracker.path else None,
            **strategy.result_fields(),
        }
    )
    return plain


def list_versions() -> dict[str, str | None]:
    """Return the versions of the packages that metrics and speeds depend on."""
    return {
        "trainer": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }
