"""Gathering what a finished run's verdict is made of: the timers' figures, and a probe that leaves no trace."""

from __future__ import annotations

import time

import torch

from trainer.data.cache.stored import SECONDS, measure_reading
from trainer.data.encoded import EncodedPhotos
from trainer.processes.resources import cores
from trainer.telemetry.verdict import NAMED, Reading, Setting, StepParts, Verdict, judge, shares
from trainer.training.reporting import idle_share, parts
from trainer.training.run import Run

BUDGET = 0.01  # of the run's seconds


def diagnose(run: Run) -> Verdict | None:
    """What bounds this run's step; None where no step was measured. Collective; the same on every rank."""
    world, timer = run.world, run.timer
    spent = time.perf_counter() - run.ledger.begun
    speed = timer.summary(run.loader.samples_per_step)
    seconds = parts(run)
    if world.broadcast_object(speed.step_time_s is None):
        return None
    assert speed.step_time_s is not None and speed.data_wait_fraction is not None
    step = speed.step_time_s.mean
    begun = time.perf_counter()
    communication = run.strategy.communication(timer.seen, step, BUDGET * spent)
    probe = time.perf_counter() - begun
    # A rank that waits for images keeps all waiting; in the optimizer's part some wait for the last stage.
    mine = torch.tensor([speed.data_wait_fraction * step, -timer.update_seconds()], dtype=torch.float64)
    data, update = world.max_(mine).tolist()
    facts = run.strategy.facts().get("pipeline") or {}
    ledger = run.ledger.seconds
    measured = StepParts(
        step=step,
        data=data,
        optimizer=-update,
        logging=ledger.get("logging", 0.0) / timer.seen,
        communication=communication.seconds,
        at_most=communication.at_most,
        bubble=idle_share(run, float(facts.get("bubble_measured") or 0.0)),
        bubble_at_most=idle_share(run, float(facts.get("bubble_at_most") or 0.0)),
        busy=facts.get("stage_seconds") or (),
    )
    cores_per_reader = max(1, cores() // run.loader.readers)
    gpu = world.device.type == "cuda"
    begun = time.perf_counter()
    reading = _reading(run, BUDGET * spent) if shares(measured)["data"] >= NAMED else None
    probe += time.perf_counter() - begun
    setting = Setting(world.size, cores_per_reader, run.loader.workers, gpu, len(run.datasets.train), reading)
    judged = judge(measured, seconds, run.recipe, setting, probe, run.noticed.warnings)
    verdict: Verdict = world.broadcast_object(judged)
    return verdict


def _reading(run: Run, seconds: float) -> Reading | None:
    """What rank 0 takes for a photo; None where there are none, and on other ranks."""
    photos, data = run.datasets.train, run.datasets
    if not run.world.is_main or not isinstance(photos, EncodedPhotos):
        return None
    return measure_reading(photos, run.recipe, data.image_size, data.channels, min(seconds, SECONDS))
