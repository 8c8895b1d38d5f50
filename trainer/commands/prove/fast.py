"""How fast does this machine train? Each figure next to a bare PyTorch loop's, and a physical limit where known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, measured, wrong
from trainer.commands.trials.engine import speed, steps_of
from trainer.telemetry.flops import PEAK_BANDWIDTH
from trainer.telemetry.readable import number

# A device or a link is slow below this share of the best of its kind, throttled below this share of its own best. On
# CPUs other programs take their part, which no clock leaves out wholly.
SLOW = {"cuda": 0.9, "cpu": 0.6}
THROTTLED = {"cuda": 0.85, "cpu": 0.5}
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}
WARM, SECONDS = 5, 2.5  # steps before a run of ours is timed; how long, about
ROUNDS = {"cuda": 2, "cpu": 3}  # pairs of a bare run and one of ours, in turn
PAIR = {"cuda": 55.0, "cpu": 20.0}  # seconds, about, of such a pair


@dataclass(frozen=True)
class Network:
    """A network that is timed, and its images."""

    name: str
    title: str
    size: int
    classes: int


NETWORKS = {
    "cuda": (Network("resnet50", "ResNet-50", 224, 1000), Network("vit_b_16", "ViT-B/16", 224, 1000)),
    "cpu": (Network("resnet20", "ResNet-20", 32, 10), Network("vit_tiny", "a tiny ViT", 32, 10)),
}


def counts(devices: Devices) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**n for n in range(10) if 2**n < devices.count} | {devices.count})


def settings(devices: Devices) -> dict[str, Any]:
    """What both loops train with: images of each device, of a card as many as its memory holds, and the precision."""
    if devices.kind == "cpu":
        return {"batch": 64, "precision": "fp32", "compile": False}
    import torch

    gibs = min(torch.cuda.get_device_properties(name).total_memory for name in devices.names) / 2**30
    batch = min(256, 2 ** int(math.log2(4 * gibs)))  # four for each GiB: a ViT-B/16 takes less
    return {"batch": batch, "precision": "bf16" if torch.cuda.is_bf16_supported(False) else "fp16", "compile": False}


def checks(devices: Devices) -> Iterator[Check]:
    yield Check("rates", "fast", "matrix products and memory of each device", 8 + 4 * devices.count, rates, 1)
    if devices.count > 1:
        yield Check("links", "fast", "bandwidth between pairs, and of all-reduce", 10, links, 1)
    for priority, network in enumerate(NETWORKS[devices.kind], 1):
        for several in counts(devices):
            title = f"{network.title} on {devices.called(several)}"
            run, seconds = partial(_speed, network, several), ROUNDS[devices.kind] * PAIR[devices.kind]
            yield Check(f"speed {network.name} x{several}", "fast", title, seconds, run, priority)


def rates(runner: CheckRunner) -> Outcome:
    devices = runner.devices
    answers = runner.measure("rates", devices.count)
    precision, rows = answers[0]["precision"], []
    for name, model, answer in zip(devices.names, devices.models, answers, strict=True):
        row: dict[str, Any] = {"device": name}
        for kind, limit in (("product", answer["product_limit"]), ("memory", PEAK_BANDWIDTH.get(model))):
            fraction = limit and median(answer[kind]) / limit
            row |= {kind: middle(answer[kind]), f"{kind}_limit": limit, f"{kind}_share": fraction}
        rows.append(row)
    notes: list[str] = []
    slow: list[str] = []
    for kind, what, unit in (("product", "matrix products", f"GFLOP/s in {precision}"), ("memory", "memory", "GB/s")):
        slow += slow_devices(devices, [answer[kind] for answer in answers], what)
        rate, fraction = median([row[kind]["median"] for row in rows]), rows[0][f"{kind}_share"]
        limit = f" ({fraction:.0%} of the card's limit)" if fraction else ""
        notes.append(f"{what} {number(rate / 1e9)} {unit}{limit}")
    figures = {"precision": precision, "devices": rows, "slow": slow}
    if not slow:
        return measured("each: " + ", ".join(notes), **figures)
    todo = "see what else runs (top), and how the cores are cooled"
    if devices.kind == "cuda":
        rest = [name for name in devices.names if not any(line.startswith(f"{name} ") for line in slow)]
        without = f"train without it, devices=[{','.join(rest)}]; " if rest else ""
        todo = f"{without}nvidia-smi -q -d PERFORMANCE,TEMPERATURE tells why"
    return wrong("; ".join(slow), todo, **figures)


def slow_devices(devices: Devices, rates: Sequence[Sequence[float]], what: str) -> Iterator[str]:
    """Devices that are slower than their kind, or than they were themselves a moment before."""
    best = {model: 0.0 for model in devices.models}
    for model, values in zip(devices.models, rates, strict=True):
        best[model] = max(best[model], *values)
    for rank, (name, model, values) in enumerate(zip(devices.names, devices.models, rates, strict=True)):
        shown = name if devices.kind == "cuda" else f"{name}:{rank}"
        if max(values) < SLOW[devices.kind] * best[model]:
            yield f"{shown} is slow: its {what} reach {max(values) / best[model]:.0%} of the best device of its kind"
        elif max(values[-2:]) < THROTTLED[devices.kind] * max(values):
            yield f"{shown} is throttled: its {what} fall to {values[-1] / max(values):.0%} of its own best"


def links(runner: CheckRunner) -> Outcome:
    devices = runner.devices
    answers = runner.measure("links", devices.count)
    ways = dict(sorted((way, rates) for answer in answers for way, rates in answer["ways"].items()))
    best = max(max(rates) for rates in ways.values())
    slow = [way for way, rates in ways.items() if max(rates) < SLOW_LINK[devices.kind] * best]
    figures = {
        "ways": {way: middle(rates) for way, rates in ways.items()},
        "all_reduce": middle(answers[0]["all_reduce"]),
        "slow": slow,
    }
    if not slow:
        medians, wire = [median(rates) for rates in ways.values()], median(answers[0]["all_reduce"]) / 1e9
        both = f"{min(medians) / 1e9:.3g} to {max(medians) / 1e9:.3g} GB/s a way"
        return measured(f"{both}, all-reduce {wire:.3g} GB/s on its wire", **figures)
    shown, todo = slow, "see what else runs (top)"
    if devices.kind == "cuda":
        shown = [" to ".join(devices.names[int(end)] for end in way.split(" to ")) for way in slow]
        todo = (
            "nvidia-smi topo -m and nvidia-smi nvlink -s show how they are connected; compare 'modes=[ddp,local_sgd]'"
        )
    part = max(max(ways[way]) for way in slow) / best
    return wrong(f"slow from {', '.join(shown)}: {part:.0%} of the fastest link", todo, **figures)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, as proof.json has them."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def _speed(network: Network, count: int, runner: CheckRunner) -> Outcome:
    """A bare loop and a run of ours in turn, on `count` devices: our images/s beside the loop's and one device's."""
    kept, steps = settings(runner.devices), 0
    where = ["mode=ddp", *runner.devices.in_ranks(count)] if count > 1 else ["mode=single", *runner.devices.first()]
    bare, ours, exposed, result = [], [], list[float](), dict[str, Any]()
    for turn in range(ROUNDS[runner.devices.kind]):
        task = {"model": network.name, "size": network.size, "classes": network.classes, "batch": kept["batch"]}
        answers = runner.measure("bare", count, precision=kept["precision"], **task)
        bare.append(count * min(median(answer["speeds"]) for answer in answers))
        if count > 1:
            exposed.append(1 - bare[-1] / (count * min(median(answer["alone"]) for answer in answers)))
        steps = steps or max(10, min(400, round(SECONDS * bare[0] / count / kept["batch"])))
        name = f"speed/{network.name}-x{count}-{turn}"
        result = runner.train(name, words_of(where, network, count, kept, steps), timed=True)
        ours.append(speed(steps_of(runner.path(name)), result["throughput"]["samples_per_sec"]))
    single = runner.figures(f"speed {network.name} x1").get("images_per_sec", {}).get("median")
    times = median(ours) / single if single and count > 1 else None
    waits = max(0.0, median(exposed)) if exposed else None
    ratio = middle([a / b for a, b in zip(ours, bare, strict=True)])
    parts = [f"{number(median(ours))} images/s ({number(min(ours))} to {number(max(ours))})"]
    parts += [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times a bare loop"]
    if times:
        waiting = f", {waits:.0%} of a bare step waits for communication" if waits else ""
        parts.append(f"{times:.2f} times as fast as one{waiting}")
    return measured(
        "; ".join(parts), images_per_sec=middle(ours), bare_images_per_sec=middle(bare), ratio=ratio,
        times_one=times, exposed_communication=waits, mfu=result["mfu"], devices=count,
        **{**kept, "batch": kept["batch"] * count}, step=(result["verdict"] or {"step": {}})["step"],
    )  # fmt: skip


def words_of(where: Sequence[str], network: Network, count: int, kept: Mapping[str, Any], steps: int) -> list[str]:
    """A run of ours on made-up images, as fast as it can be."""
    batch = kept["batch"] * count
    return [
        "data.name=synthetic", f"data.samples={batch * (steps + WARM)}", f"data.val_samples={count}",
        f"data.image_size={network.size}", f"model.num_classes={network.classes}", f"model.name={network.name}",
        f"batch_size={batch}", f"precision={kept['precision']}", f"compile={str(kept['compile']).lower()}",
        "optimizer.lr=0.0001", f"max_steps={steps + WARM}", "epochs=1", f"logging.warmup_steps={WARM}",
        f"logging.every_steps={max(1, steps // 10)}", "logging.tensorboard=false", "save.every_epochs=null", *where,
    ]  # fmt: skip
