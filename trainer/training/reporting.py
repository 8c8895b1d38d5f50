"""What a run reports: logged values, a program's callbacks, lines for people, result.json."""

from __future__ import annotations

import platform
import shlex
import time
from dataclasses import asdict

import torch
import torchvision
from torch import Tensor

from trainer.devices import precision
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.versions import VERSION
from trainer.saving.files import without_nan
from trainer.saving.journal import START
from trainer.tasks.task import figure
from trainer.telemetry.readable import as_size, duration, number
from trainer.training.banner import shares_of
from trainer.training.callbacks import EpochReport
from trainer.training.evaluation import WORST, metrics_of
from trainer.training.results import Result
from trainer.training.run import Run
from trainer.training.stopping import ended_by

# Of a run that is continued with nothing left to train.
KEPT_KEYS = (
    *("throughput", "step_time_s", "data_wait_fraction", "launch_bound_fraction"),
    *("short", "seconds_in", "verdict", "warnings"),
)


def log_step(run: Run, loss: float, lr: float, norm: Tensor | None, window: tuple[int, float, float]) -> None:
    """A logged step's values for TensorBoard, speed only once warm-up is over, and its row for steps.csv. Collective.

    Args:
        loss: mean over the steps since the last logged one.
        window: steps, seconds, and seconds of waiting for data since then, without warm-up.
    """
    steps, seconds, waited = window
    speed = images_per_second(run, window)
    values = {"train/loss": loss, "train/lr": lr}
    if norm is not None:
        values["train/grad_norm"] = norm.item()
    if speed is not None:
        values |= {
            "speed/samples_per_sec": speed,
            "speed/samples_per_sec_per_device": speed / run.world.count(),
            "speed/step_ms": 1e3 * seconds / steps,
            "speed/data_wait_pct": 100 * waited / seconds,
        }
        if run.timer.cuda:
            values["speed/launch_bound_pct"] = 100 * run.timer.latest_launches
        utilisation = _mfu(run, speed)
        if utilisation is not None:
            values["speed/mfu_pct"] = 100 * utilisation
    run.tracker.step(
        {
            "step": run.state.position.step,
            "epoch": run.state.position.epoch + 1,
            "seconds": round(run.state.seconds(), 3),
            "train_loss": loss,
            "lr": lr,
            "samples_per_sec": float(f"{speed:.6g}") if speed is not None else "",
            "skipped": len(run.state.history.nonfinite),
        }
    )
    run.tracker.scalars(values | run.strategy.figures(), run.state.position.step)


def report_epoch(run: Run, epoch: int, best: bool) -> bool:
    """Call the program's `on_epoch` and do what it asks for; whether training goes on. Collective."""
    history, step = run.state.history, run.state.position.step
    metrics, seconds = metrics_of(history.validation), run.state.seconds()
    report = EpochReport(epoch + 1, run.recipe.epochs, step, history.losses[-1], metrics, best, seconds)
    answer = run.callbacks.report(run.world, report)
    history.logged |= answer.logged
    run.tracker.scalars({f"logged/{name}": value for name, value in answer.logged.items()}, step)
    return answer.go_on


def images_per_second(run: Run, timed: tuple[int, float, float]) -> float | None:
    """Images a second of all devices in a window, which is as in `log_step`; None before warm-up is over."""
    steps, seconds, _ = timed
    return steps * run.loader.samples_per_step / seconds if seconds else None


def idle_share(run: Run, measured: float) -> float:
    """The share of a step in which devices idle for other stages; `measured` is a pipeline's."""
    if run.world.size == 1 and run.world.device.type == "cpu":
        return 0.0  # stand-ins of one process work in turn
    if run.recipe.traits.one_stage_at_a_time:
        return 1 - 1 / len(set(run.world.drives))
    return measured


def _mfu(run: Run, samples_per_sec: float) -> float | None:
    if run.observer.model.peak_flops is None:
        return None
    return samples_per_sec * run.observer.model.training_flops / run.observer.model.peak_flops


def epoch_row(run: Run, epoch: int, seconds: float) -> dict[str, str]:
    """An epoch's figures by their titles. `seconds` are those of the epoch; images/s are without its evaluation."""
    history, epochs = run.state.history, run.recipe.epochs
    metrics = run.task.shown(metrics_of(history.validation))
    steps, trained = run.timer.lap()
    rate = steps * run.loader.samples_per_step / trained if trained else None
    return {
        "epoch": f"{epoch + 1:{len(str(epochs))}}/{epochs}",
        "train loss": figure(history.losses[-1]),
        **{"val loss" if title == "loss" else title: text for title, text in metrics.items()},
        "images/s": f"{rate:,.{int(rate < 100)}f}" if rate else "-",
        "seconds": f"{seconds:,.1f}",
    }


def last_lines(run: Run, result: Result) -> dict[str, str]:
    """The result and the files that hold it, by title."""
    speed, folder = result["throughput"], run.tracker.path
    rate = f"{number(speed['samples_per_sec'])} images/s" if speed else "too few steps to measure speed"
    if speed and (speed["std"] or 0.0) > speed["samples_per_sec"]:  # a mean that scatters so means nothing
        rate = "no steady images/s"
    if result["short"] and speed:
        rate += ", measured over all steps after the first: fewer than logging.warmup_steps"
    verdict = {"warning": "\n".join(warnings)} if (warnings := [*result["warnings"].values()]) else {}
    if result["verdict"]:  # which holds them too
        verdict = {"verdict": result["verdict"]["sentence"]}
    if run.speed_only:
        memory = ", ".join(f"{name} {as_size(size)}" for name, size in run.observer.memory.items())
        measured = f"on synthetic images: {rate}; peak memory {memory}"
        return {"measured": measured, **verdict, "result": f"{folder}/result.json"}
    held_out = run.task.text({run.task.metric: run.state.history.validation.get(f"val_{run.task.metric}")})
    text = f"{held_out}{_best(run)} on {result['data']['val_samples']:,} held-out images, {rate}"
    text += f", {duration(result['seconds'])}"
    if result["data"]["skipped"]:
        text += f"; {result['data']['skipped']} times an unreadable image was replaced or left out"
    if result["data"]["uncached"]:
        text += f"; {result['data']['uncached']:,} times a photo was not in the cache and was prepared again"
    lines = {"done": text, **verdict, "weights": f"{folder}/last.safetensors"}
    lines |= {"best": f"{folder}/best.safetensors"} if _best(run) else {}
    lines |= {"timeline": f"{folder}/timeline.png"} if run.recipe.pipeline.timeline else {}
    if run.recipe.data.name in OWN_PHOTOS and folder is not None and (folder / WORST).exists():
        lines["worst"] = f"{folder}/{WORST}"
        lines["labels"] = f"python -m trainer predict {shlex.quote(str(folder))} predict.split=train"
    if run.recipe.logging.tensorboard:
        lines["watch"] = f"python -m tensorboard.main --logdir {shlex.quote(str(folder))}"
    return lines


def _best(run: Run) -> str:
    """The best epoch, where it was better than the last."""
    history, metric = run.state.history, run.task.metric
    if history.best_epoch is None or history.best == history.validation.get(f"val_{metric}"):
        return ""
    [best] = run.task.shown({metric: history.best}).values()
    return f" (best {best} in epoch {history.best_epoch + 1})"


def parts(run: Run) -> dict[str, float]:
    """Seconds of this part of the run by what they went to; "steps" are what the others leave."""
    ledger, spent = run.ledger.by_now(), time.perf_counter() - run.ledger.begun
    apart = {"start-up": sum(seconds for part, seconds in ledger.items() if part.startswith(START))}
    apart |= {name: ledger.get(name, 0.0) for name in ("evaluation", "averaging", "saving")}
    return {"steps": max(0.0, spent - sum(apart.values())), **{name: s for name, s in apart.items() if s > 0}}


def saves(run: Run) -> dict[str, float] | None:
    """How many saves this part of the run has done, and the mean seconds that one held training and took."""
    costs, count = run.saver.costs, len(run.saver.costs)
    if not count:
        return None
    blocked, seconds = sum(cost.blocked for cost in costs), sum(cost.seconds for cost in costs)
    return {"count": count, "blocked_s": blocked / count, "seconds": seconds / count}


def result(run: Run, status: str, error: str | None = None, exit_code: int | None = None) -> Result:
    """What result.json holds; its keys are stable. `exit_code` is null while running."""
    history, recipe, data = run.state.history, run.recipe, run.datasets
    speed = run.timer.summary(run.loader.samples_per_step)
    figures, mfu = asdict(speed), None
    if speed.throughput is not None:
        rate = speed.throughput.samples_per_sec
        mfu = _mfu(run, rate)
        figures["throughput"] |= {"per_device": rate / run.world.count(), "threads": run.world.threads}
    plain: Result = without_nan(
        {
            "recipe": recipe.name,
            "mode": recipe.mode,
            "world_size": run.world.size,
            "devices": list(run.world.devices),
            "batch_size": recipe.batch_size,
            "accumulate": recipe.pieces,
            "shares": shares_of(run),
            "precision": precision.computed_in(recipe.precision, run.world.device),
            "epochs": len(history.losses),
            "steps": run.state.position.step,
            "status": status,
            "error": error,
            "ended_by": ended_by(run.resolved, run.state) if status == "completed" else None,
            "exit_code": 0 if status == "completed" else exit_code,
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
            **{f"val_{name}": None for name in run.task.metric_names()},
            **{key: value for key, value in history.validation.items() if key != "val_samples"},
            f"best_{run.task.metric}": history.best,
            "best_epoch": None if history.best_epoch is None else history.best_epoch + 1,
            **figures,
            "graphs": run.steps.way,
            "recompute": run.strategy.recomputes,
            "peak_memory_bytes": run.observer.memory,
            "mfu": mfu,
            "pipeline": None,
            "losses": history.losses,
            "nonfinite_steps": len(history.nonfinite),
            "logged": history.logged,
            "seconds": run.state.seconds(),
            "seconds_in": parts(run),
            "save": saves(run),
            "goodput": run.tracker.journal.goodput(),
            "verdict": None,
            "warnings": run.noticed.warnings,
            "facts": run.observer.banner_lines,
            "versions": versions(),
            "output": str(run.tracker.path) if run.tracker.path else None,
            **run.strategy.result_fields(),
        }
    )
    return plain


def versions() -> dict[str, str | None]:
    """What the figures depend on."""
    return {
        "trainer": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }
