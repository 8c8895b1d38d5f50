"""Measurements for the verdict of a finished run, which says what limits the speed of its steps.

They come from the timers of the run, and from probes after its last step.
"""

import time

import torch

from trainer.data import Loader
from trainer.data.cache.stored import SECONDS, measure_reading
from trainer.data.encoded import EncodedPhotos
from trainer.models.undisturbed import restore_after
from trainer.processes.resources import count_cores
from trainer.telemetry.clocks import record_event, synchronise
from trainer.telemetry.verdict import (
    BOUND_SHARE,
    NEGLIGIBLE_SHARE,
    Setting,
    StepParts,
    Verdict,
    compute_shares,
    judge,
)
from trainer.training.observer import Observer
from trainer.training.reporting import compute_idle_share, list_seconds
from trainer.training.state import Resolved, TrainState

# Maximum duration of each probe, as a fraction of the time since the run was started or resumed.
BUDGET = 0.01
# Upper bound of a GPU's cycles per second. With this bound, a sleep kernel may hold a device for
# longer than needed, but never for a shorter time.
CYCLES = 3e9


def diagnose(
    resolved: Resolved,
    state: TrainState,
    observer: Observer,
    loader: Loader,
    graphs_might_help: bool,
) -> Verdict | None:
    """Find what limits the speed of the run's steps.

    Collective. The result is the same on every rank.

    Args:
        resolved: The configuration of a finished run.
        state: State of the run. A probe may change the optimizer's state and the moving average.
        observer: Timers of the run.
        loader: Loader of the run's images.
        graphs_might_help: Whether CUDA graphs might make the steps faster.

    Returns:
        The verdict, or None if no step was measured.
    """
    world = resolved.world
    strategy = state.strategy
    timer = observer.timer
    ledger = observer.ledger
    spent = time.perf_counter() - ledger.start_time
    speed = timer.summary(loader.samples_per_step)
    seconds = list_seconds(ledger)
    if world.broadcast_object(speed.step_time_s is None):
        return None
    assert speed.step_time_s is not None and speed.data_wait_fraction is not None
    step = speed.step_time_s.mean
    budget = BUDGET * spent
    probe_start = time.perf_counter()
    communication = strategy.communication(timer.seen, step, budget)
    data_wait = speed.data_wait_fraction * step
    update = timer.update_seconds()
    launch_bound = (speed.launch_bound_fraction or 0.0) * step
    # A rank that waits for images or launches delays all others, so the largest value of all ranks
    # counts. For the optimizer's update, the smallest value counts: in a pipeline, the measured
    # time includes waiting for the last stage, on all ranks except those of the last stage.
    rank_seconds = torch.tensor([data_wait, -update, launch_bound], dtype=torch.float64)
    data, negative_update, launches_at_most = world.max_(rank_seconds).tolist()
    pipeline = strategy.result_fields().get("pipeline") or {}
    bubble = compute_idle_share(strategy, float(pipeline.get("bubble_measured") or 0.0))
    bubble_at_most = compute_idle_share(strategy, float(pipeline.get("bubble_at_most") or 0.0))
    launches = 0.0
    update_launches = 0.0
    # The devices are only probed if GPUs may wait for launches. Rank 0 decides for all ranks,
    # because their step times differ.
    if world.broadcast_object(launches_at_most >= NEGLIGIBLE_SHARE * step):
        device_seconds = _measure_device_seconds(
            state, 1 / loader.samples_per_step, step, data_wait, update, budget
        )
        if device_seconds is not None:
            beyond_device = torch.tensor(
                [step - data_wait - sum(device_seconds), update - device_seconds[1]],
                dtype=torch.float64,
            )
            # The smallest value of all ranks counts, because the values of other ranks include
            # waiting for the slowest rank.
            smallest = -world.max_(-beyond_device)
            launches, update_launches = smallest.clamp(0.0, launches_at_most).tolist()
            update_launches = min(launches, update_launches, -negative_update)
            launches_at_most = 0.0
            bubble_at_most = bubble
    measured = StepParts(
        step=step,
        data=data,
        optimizer=-negative_update - update_launches,
        launches=launches,
        launches_at_most=launches_at_most,
        logging=ledger.seconds.get("logging", 0.0) / timer.seen,
        communication=communication.seconds,
        at_most=communication.at_most,
        bubble=bubble,
        bubble_at_most=bubble_at_most,
        busy=pipeline.get("stage_seconds") or (),
    )
    # Seconds that rank 0 needs to read one photo. None if this is not measured.
    reading = None
    datasets = resolved.datasets
    photos = datasets.train
    if (
        compute_shares(measured)["data"] >= BOUND_SHARE
        and world.is_main
        and isinstance(photos, EncodedPhotos)
        # A linear probe reads features from memory, without workers, and decodes no photos.
        and loader.workers is not None
    ):
        limit = min(budget, SECONDS)
        reading = measure_reading(
            photos, resolved.recipe, datasets.image_size, datasets.channels, limit
        )
    probe_seconds = time.perf_counter() - probe_start
    setting = Setting(
        world.size,
        max(1, count_cores() // loader.readers),
        loader.workers,
        world.device.type == "cuda",
        graphs_might_help and not strategy.is_recompute_random,
        len(datasets.train),
        reading,
    )
    judged = judge(
        measured, seconds, resolved.recipe, setting, probe_seconds, observer.noticed.warnings
    )
    verdict: Verdict = world.broadcast_object(judged)
    return verdict


def _measure_device_seconds(
    state: TrainState, weight: float, step: float, data_wait: float, update: float, budget: float
) -> tuple[float, float] | None:
    """Measure how long a step takes on devices that do not wait for kernel launches. Collective.

    A sleep kernel occupies each device while the host launches the passes of one micro-batch of
    random inputs, and an update with learning rate 0. All other kernels are then already queued
    when the sleep ends. All ranks start together. The queue of a device holds about a thousand
    kernels. If a step has more, the device may still wait for some of them, so the measured time
    can be too long, but not too short. Weights and buffers keep their values. The optimizer's state
    and the moving average do not, but nothing reads them any more.

    Args:
        state: State of a finished run.
        weight: Factor of each sample's loss: 1 / number of images of a step.
        step: Seconds of a step, including `data_wait` and `update`.
        data_wait: Seconds of a step in which this rank waited for data.
        update: Seconds of the optimizer's update.
        budget: Seconds that the measurement may take.

    Returns:
        `(passes, update)`: The seconds of a step's passes and of its update. None if the budget is
        too small.
    """
    strategy = state.strategy
    world = strategy.world
    recipe = strategy.recipe
    pieces = recipe.pieces
    seconds = (step - data_wait - update) / pieces + update
    # Two rounds need `seconds` each. Holding the devices in the second round needs `seconds` at a
    # clock rate of CYCLES, and twice as long at half that rate, so four times `seconds` in all.
    if not world.broadcast_object(4 * seconds < budget):
        return None
    batch = strategy.context.example.batch(world.device, channels_last=recipe.channels_last)
    for group in state.updater.optimizer.param_groups:
        group["lr"] = 0.0
    strategy.train_for_probe()
    with restore_after(strategy.modules(), world.device):
        # The first round warms up and is not held. The second round is measured.
        for hold_seconds in (0.0, seconds):
            world.barrier()
            for device in dict.fromkeys(world.local_devices):
                with torch.cuda.device(device):
                    cycles = int(CYCLES * hold_seconds)
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            begin = record_event()
            loss = strategy.forward_backward(batch, weight)
            strategy.reduce_gradients()
            middle = record_event()
            state.updater.step(loss, strategy, want_norm=False)
            state.updater.zero_grad()
            if state.average:
                state.average.update(state.position.step)
            end = record_event()
            synchronise(world.local_devices)
    return pieces * begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
