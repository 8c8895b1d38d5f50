"""Measurements of speed: how fast does this machine train?

The speed of training is compared with the speed of a bare PyTorch loop. The speed of a device is
compared with the speed of the other devices and, if known, with its physical limit. The speed of a
link is compared with the speed of the fastest link.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from trainer.commands.prove.check_runner import (
    Check,
    CheckRunner,
    Devices,
    Outcome,
    measured,
    wrong,
)
from trainer.commands.trials.engine import compute_speed, read_steps_file
from trainer.commands.trials.significance import summarize
from trainer.saving.files import Json
from trainer.telemetry.flops import look_up_published
from trainer.telemetry.readable import format_number

# A device is called slow if its best rate is below the fraction SLOW of the best rate of its kind.
# It is called throttled if its last two rates are below the fraction THROTTLED of its best rate.
# The limits for CPUs are lower, because no clock excludes the effect of other programs completely.
SLOW = {"cuda": 0.9, "cpu": 0.6}
THROTTLED = {"cuda": 0.85, "cpu": 0.5}
# A link is called slow if its best rate is below this fraction of the fastest link's best rate.
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}
# Number of warm-up steps of a timed run, and approximate duration of its timed steps in seconds.
WARM = 5
SECONDS = 2.5
# A measurement alternates between a bare loop and a run. Number of such pairs, and approximate
# duration of a pair in seconds.
ROUNDS = {"cuda": 2, "cpu": 3}
PAIR = {"cuda": 55.0, "cpu": 20.0}


@dataclass(frozen=True)
class Network:
    """Network whose speed is measured on synthetic images.

    Attributes:
        name: the value of model.name=.
        title: name for printed lines and proof.md.
        size: side of an image in pixels.
        classes: number of classes.
    """

    name: str
    title: str
    size: int
    classes: int


NETWORKS = {
    "cuda": (
        Network("resnet50", "ResNet-50", 224, 1000),
        Network("vit_b_16", "ViT-B/16", 224, 1000),
    ),
    "cpu": (Network("resnet20", "ResNet-20", 32, 10), Network("vit_tiny", "a tiny ViT", 32, 10)),
}


def list_counts(devices: Devices) -> list[int]:
    """Return the numbers of devices to measure: 1, 2, 4, ... and all."""
    powers = {2**n for n in range(10) if 2**n < devices.count}
    return sorted(powers | {devices.count})


def choose_settings(devices: Devices) -> tuple[int, str]:
    """Return (batch, precision) of the run and of the bare loop, with images per device."""
    if devices.kind == "cpu":
        return 64, "fp32"
    import torch

    memory = [torch.cuda.get_device_properties(name).total_memory for name in devices.names]
    gibs = min(memory) / 2**30
    # Four images per GiB of the smallest GPU, rounded down to a power of two. Training a ViT-B/16
    # needs less memory per image than a quarter of a GiB.
    batch = min(256, 2 ** int(math.log2(4 * gibs)))
    precision = "fp16"
    if torch.cuda.is_bf16_supported(False):
        precision = "bf16"
    return batch, precision


def list_checks(devices: Devices) -> Iterator[Check]:
    """Yield all measurements, in the order in which they run."""
    title = "matrix products and memory of each device"
    yield Check("rates", title, 8 + 4 * devices.count, measure_rates, 1, "fast")
    if devices.count > 1:
        title = "bandwidth between pairs, and of all-reduce"
        yield Check("links", title, 10, measure_links, 1, "fast")
    for priority, network in enumerate(NETWORKS[devices.kind], 1):
        for several in list_counts(devices):
            title = f"{network.title} on {devices.called(several)}"
            run = partial(_measure_speed, network, several)
            seconds = ROUNDS[devices.kind] * PAIR[devices.kind]
            name = f"speed {network.name} x{several}"
            yield Check(name, title, seconds, run, priority, "fast")


def measure_rates(runner: CheckRunner) -> Outcome:
    """Measure the rate of matrix products and of memory on each device."""
    devices = runner.devices
    answers = runner.measure("rates", devices.count)
    precision = answers[0]["precision"]
    rows: list[Json] = [{"device": name} for name in devices.names]
    notes = []
    slow: list[str] = []
    for kind, what, unit in (
        ("product", "matrix products", f"GFLOP/s in {precision}"),
        ("memory", "memory", "GB/s"),
    ):
        medians = []
        for row, model, answer in zip(rows, devices.models, answers, strict=True):
            if kind == "product":
                limit = answer["product_limit"]
            else:
                limit = look_up_published(model, "GB/s")
            medians.append(median(answer[kind]))
            row[kind] = summarize(answer[kind])
            row[f"{kind}_limit"] = limit
            row[f"{kind}_share"] = limit and medians[-1] / limit
        slow += find_slow_devices(devices, [answer[kind] for answer in answers], what)
        note = f"{what} {format_number(median(medians) / 1e9)} {unit}"
        fraction = rows[0][f"{kind}_share"]
        if fraction:
            note += f" ({fraction:.0%} of the card's limit)"
        notes.append(note)
    figures = {"precision": precision, "devices": rows, "slow": slow}
    if not slow:
        return measured("each: " + ", ".join(notes), **figures)
    todo = "see what else runs (top), and how the cores are cooled"
    if devices.kind == "cuda":
        todo = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE says why"
        slow_names = {line.partition(" ")[0] for line in slow}
        rest = [name for name in devices.names if name not in slow_names]
        if rest:
            todo = f"train without it, devices=[{','.join(rest)}]; {todo}"
    return wrong("; ".join(slow), todo, **figures)


def find_slow_devices(
    devices: Devices, rates: Sequence[Sequence[float]], what: str
) -> Iterator[str]:
    """Yield a line for each device that is slower than others of its kind, or than it was before.

    Args:
        devices: devices that were measured.
        rates: successive rates of each device.
        what: name of the measured work in the plural, as in "matrix products".
    """
    best = dict.fromkeys(devices.models, 0.0)
    for model, values in zip(devices.models, rates, strict=True):
        best[model] = max(best[model], *values)
    for rank, values in enumerate(rates):
        name = devices.names[rank]
        if devices.kind != "cuda":
            name = f"{name}:{rank}"
        own_best = max(values)
        fraction = own_best / best[devices.models[rank]]
        if fraction < SLOW[devices.kind]:
            yield (
                f"{name} is slow: its {what} reach {fraction:.0%} of the best device of its kind"
            )
        elif max(values[-2:]) < THROTTLED[devices.kind] * own_best:
            yield (
                f"{name} is throttled: its {what} fall to {values[-1] / own_best:.0%} of its own "
                "best"
            )


def measure_links(runner: CheckRunner) -> Outcome:
    """Measure the bandwidth between all pairs of devices, and of an all-reduce."""
    devices = runner.devices
    answers = runner.measure("links", devices.count)
    ways: dict[str, list[float]] = {}
    for answer in answers:
        ways |= answer["ways"]
    ways = dict(sorted(ways.items()))
    best_rates = {way: max(rates) for way, rates in ways.items()}
    best = max(best_rates.values())
    slow = [way for way, rate in best_rates.items() if rate < SLOW_LINK[devices.kind] * best]
    figures = {
        "ways": {way: summarize(rates) for way, rates in ways.items()},
        "all_reduce": summarize(answers[0]["all_reduce"]),
        "slow": slow,
    }
    if not slow:
        medians = list(map(median, ways.values()))
        line = (
            f"{min(medians) / 1e9:.3g} to {max(medians) / 1e9:.3g} GB/s a way, all-reduce "
            f"{median(answers[0]['all_reduce']) / 1e9:.3g} GB/s on its wire"
        )
        return measured(line, **figures)
    shown = slow
    todo = "see what else runs (top)"
    if devices.kind == "cuda":
        shown = []
        for way in slow:
            source, _, target = way.partition(" to ")
            shown.append(f"{devices.names[int(source)]} to {devices.names[int(target)]}")
        todo = (
            "nvidia-smi topo -m and nvidia-smi nvlink -s show how they are connected; compare "
            "'modes=[ddp,local_sgd]'"
        )
    fraction = max(best_rates[way] for way in slow) / best
    line = f"slow from {', '.join(shown)}: {fraction:.0%} of the fastest link"
    return wrong(line, todo, **figures)


def _measure_speed(network: Network, count: int, runner: CheckRunner) -> Outcome:
    """Measure the speed of training `network` on `count` devices.

    Runs alternate with a bare loop on the same devices. The speed is also compared with the earlier
    measurement on one device, if any.
    """
    batch, precision = choose_settings(runner.devices)
    steps = 0
    where = ["mode=single", *runner.devices.in_one_process()]
    if count > 1:
        where = ["mode=ddp", *runner.devices.in_ranks(count)]
    bare = []
    ours = []
    exposed = []
    result = Json()
    for turn in range(ROUNDS[runner.devices.kind]):
        answers = runner.measure(
            "bare",
            count,
            batch=batch,
            precision=precision,
            model=network.name,
            size=network.size,
            classes=network.classes,
        )
        # The slowest device limits the speed of all devices.
        bare.append(count * min(median(answer["speeds"]) for answer in answers))
        if count > 1:
            alone = count * min(median(answer["alone"]) for answer in answers)
            exposed.append(1 - bare[-1] / alone)
        # The bare loop of the first round determines the number of steps of all rounds.
        steps = steps or max(10, min(400, round(SECONDS * bare[0] / count / batch)))
        name = f"speed/{network.name}-x{count}-{turn}"
        words = build_arguments(where, network, count, batch * count, precision, steps)
        result = runner.train(name, words, timed=True)
        mean = result["throughput"]["samples_per_sec"]
        ours.append(compute_speed(read_steps_file(runner.path(name)), mean))
    ratios = [our_speed / bare_speed for our_speed, bare_speed in zip(ours, bare, strict=True)]
    ratio = summarize(ratios)
    parts = [
        f"{format_number(median(ours))} images/s ({format_number(min(ours))} to "
        f"{format_number(max(ours))})",
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times a bare loop",
    ]
    times = None
    waits = None
    if exposed:
        waits = max(0.0, median(exposed))
        single = runner.figures(f"speed {network.name} x1").get("images_per_sec", {}).get("median")
        if single:
            times = median(ours) / single
            parts.append(f"{times:.2f} times as fast as one")
            if waits:
                parts[-1] += f", {waits:.0%} of a bare step waits for communication"
    verdict = result["verdict"] or {"step": {}}
    return measured(
        "; ".join(parts),
        images_per_sec=summarize(ours),
        bare_images_per_sec=summarize(bare),
        ratio=ratio,
        times_one=times,
        exposed_communication=waits,
        mfu=result["mfu"],
        devices=count,
        batch=batch * count,
        precision=precision,
        compile=False,
        step=verdict["step"],
    )


def build_arguments(
    where: Sequence[str], network: Network, count: int, batch: int, precision: str, steps: int
) -> list[str]:
    """Return the arguments of a timed run on synthetic images.

    Features that slow a run down are switched off.

    Args:
        where: arguments that select mode and devices.
        network: network to train.
        count: number of devices.
        batch: number of images of a step on all devices together.
        precision: precision of the run.
        steps: number of timed steps; `WARM` more steps precede them.
    """
    return [
        "data.name=synthetic",
        f"data.samples={batch * (steps + WARM)}",
        f"data.val_samples={count}",
        f"data.image_size={network.size}",
        f"model.num_classes={network.classes}",
        f"model.name={network.name}",
        f"batch_size={batch}",
        f"precision={precision}",
        "compile=false",
        "optimizer.lr=0.0001",
        f"max_steps={steps + WARM}",
        "epochs=1",
        f"logging.warmup_steps={WARM}",
        f"logging.every_steps={max(1, steps // 10)}",
        "logging.tensorboard=false",
        "save.every_epochs=null",
        *where,
    ]
