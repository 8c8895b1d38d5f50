"""Gathering what a finished run's verdict is made of: the timers' figures, and a probe that leaves no trace."""

from __future__ import annotations

import time

import torch

from trainer.data.cache.stored import SECONDS, measure_reading
from trainer.data.encoded import EncodedPhotos
from trainer.models.undisturbed import undisturbed
from trainer.processes.resources import cores
from trainer.telemetry.clocks import record_event, synchronise
from trainer.telemetry.verdict import LITTLE, NAMED, Setting, StepParts, Verdict, judge, shares
from trainer.training.reporting import idle_share, parts
from trainer.training.run import Run

BUDGET = 0.01  # of the run's seconds
CYCLES = 3e9  # in a second, of GPUs, or fewer


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
    begun, budget = time.perf_counter(), BUDGET * spent
    communication = run.strategy.communication(timer.seen, step, budget)
    probe = time.perf_counter() - begun
    waited, update = speed.data_wait_fraction * step, timer.update_seconds()
    # A rank that waits for images or launches keeps all waiting; in the optimizer's part some wait for the last stage.
    mine = torch.tensor([waited, -update, (speed.launch_bound_fraction or 0.0) * step], dtype=torch.float64)
    data, fewest, most = world.max_(mine).tolist()
    facts = run.strategy.result_fields().get("pipeline") or {}
    bubble, idle = (idle_share(run, float(facts.get(f"bubble_{name}") or 0.0)) for name in ("measured", "at_most"))
    begun = time.perf_counter()
    launches, of_update = 0.0, 0.0
    # Where GPUs may wait for launches. Decided by one rank: their own steps differ.
    if world.broadcast_object(most >= LITTLE * step) and (own := _own_seconds(run, step, waited, update, budget)):
        beyond = torch.tensor([step - waited - sum(own), update - own[1]], dtype=torch.float64)
        launches, of_update = (-world.max_(-beyond)).clamp(0.0, most).tolist()
        of_update, most, idle = min(launches, of_update, -fewest), 0.0, bubble
    probe += time.perf_counter() - begun
    ledger = run.ledger.seconds
    measured = StepParts(
        step=step,
        data=data,
        optimizer=-fewest - of_update,
        launches=launches,
        launches_at_most=most,
        logging=ledger.get("logging", 0.0) / timer.seen,
        communication=communication.seconds,
        at_most=communication.at_most,
        bubble=bubble,
        bubble_at_most=idle,
        busy=facts.get("stage_seconds") or (),
    )
    cores_per_reader = max(1, cores() // run.loader.readers)
    gpu = world.device.type == "cuda"
    begun = time.perf_counter()
    reading, photos, data_set = None, run.datasets.train, run.datasets  # what rank 0 takes for a photo
    if shares(measured)["data"] >= NAMED and world.is_main and isinstance(photos, EncodedPhotos):
        spare = min(budget, SECONDS)
        reading = measure_reading(photos, run.recipe, data_set.image_size, data_set.channels, spare)
    probe += time.perf_counter() - begun
    images, may_replay = len(run.datasets.train), run.steps.undecided and not run.strategy.draws_anew
    setting = Setting(world.size, cores_per_reader, run.loader.workers, gpu, may_replay, images, reading)
    judged = judge(measured, seconds, run.recipe, setting, probe, run.noticed.warnings)
    verdict: Verdict = world.broadcast_object(judged)
    return verdict


def _own_seconds(run: Run, step: float, waited: float, update: float, budget: float) -> tuple[float, float] | None:
    """Seconds of a step's passes and of its update on devices that wait for no launch; None where the `budget` does not
    suffice. A `step` took so long, with its waiting for data and its `update`. Collective.

    A micro-batch of zeros, at a learning rate of 0, is issued while the devices are held, so that they find all of it
    when they begin; ranks begin together. A device takes in about a thousand kernels ahead: of more it may still wait
    for some, and then it seems to need more time, not less. Weights and buffers stay; the optimizer's state does not,
    which is not read any more.
    """
    world, strategy, pieces = run.world, run.strategy, run.recipe.pieces
    each = (step - waited - update) / pieces + update
    if not world.broadcast_object(4 * each < budget):  # once to warm up, the time of holding, and once more
        return None
    batch = strategy.context.example.zeros(world.device, channels_last=run.recipe.channels_last)
    for group in run.state.optimizer.param_groups:
        group["lr"] = 0.0
    strategy.train()
    with undisturbed(strategy.modules(), world.device):
        for held in (0.0, each):
            world.barrier()
            for device in dict.fromkeys(world.drives):
                with torch.cuda.device(device):
                    torch.cuda._sleep(int(CYCLES * held))  # type: ignore[no-untyped-call]
            begin = record_event()
            loss = strategy.forward_backward(batch, 1 / run.loader.samples_per_step)
            strategy.reduce_gradients()
            middle = record_event()
            run.state.updater.step(loss, strategy, want_norm=False)
            run.state.optimizer.zero_grad()
            if run.state.average is not None:
                run.state.average.update(run.state.position.step)
            end = record_event()
            synchronise(world.drives)
    return pieces * begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
