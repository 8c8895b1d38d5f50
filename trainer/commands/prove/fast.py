"""How fast does this machine train? Each figure next to a bare PyTorch loop's, and a physical limit where known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, measured, wrong
from trainer.commands.prove.right import pipeline
from trainer.commands.trials.engine import TrialFailed, failure_line, speed, steps_of
from trainer.commands.trials.measuring import in_turn, seconds
from trainer.telemetry.flops import PEAK_BANDWIDTH, published
from trainer.telemetry.readable import number

# A device or a link is slow below this share of the best of its kind, throttled below this share of its own best. On
# CPUs other programs take their part, which no clock leaves out wholly.
SLOW = {"cuda": 0.9, "cpu": 0.6}
THROTTLED = {"cuda": 0.85, "cpu": 0.5}
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}
WARM, SECONDS = 5, 2.5  # steps before a run of ours is timed; how long, about
ROUNDS = {"cuda": 2, "cpu": 3}  # pairs of a bare run and one of ours, in turn
PAIR = {"cuda": 55.0, "cpu": 20.0}  # seconds, about, of such a pair
SETTINGS = ("batch", "precision", "compile")


@dataclass(frozen=True)
class Network:
    """A network that is timed, and its images."""

    name: str
    title: str
    size: int
    classes: int

    def task(self) -> dict[str, Any]:
        return {"model": self.name, "size": self.size, "classes": self.classes}


NETWORKS = {
    "cuda": (Network("resnet50", "ResNet-50", 224, 1000), Network("vit_b_16", "ViT-B/16", 224, 1000)),
    "cpu": (Network("resnet20", "ResNet-20", 32, 10), Network("vit_tiny", "a tiny ViT", 32, 10)),
}


def counts(devices: Devices) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**n for n in range(10) if 2**n < devices.count} | {devices.count})


def checks(devices: Devices) -> Iterator[Check]:
    count, slow = devices.count, devices.kind == "cuda"
    yield Check("rates", "fast", "matrix products and memory of each device", 8 + 4 * count, rates, 1)
    if count > 1:
        yield Check("links", "fast", "bandwidth between pairs, and of all-reduce", 10, links, 1)
    yield Check("start-up", "fast", "seconds until the first step", 32, start_up, 2)
    yield Check("save", "fast", "seconds of a save", 12, save, 2)
    for priority, network in enumerate(NETWORKS[devices.kind], 1):
        title, run = f"{network.title}: batch, precision, compilation", partial(_settings, network)
        yield Check(f"settings {network.name}", "fast", title, 90 if slow else 15, run, priority)
        for several in counts(devices):
            seconds = ROUNDS[devices.kind] * PAIR[devices.kind]
            title = f"{network.title} on {devices.called(several)}"
            run = partial(_speed, network, several)
            yield Check(f"speed {network.name} x{several}", "fast", title, seconds, run, priority)
    yield Check("readers", "fast", "photos read a second", 18, readers, 2)
    if count > 1:
        yield Check("bubble", "fast", "the pipeline's bubble against plan's", 25 if slow else 18, bubble, 2)


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
    all_reduce = middle(answers[0]["all_reduce"])
    figures = {"ways": {way: middle(rates) for way, rates in ways.items()}, "all_reduce": all_reduce, "slow": slow}
    if not slow:
        low, high = (pick(median(rates) for rates in ways.values()) for pick in (min, max))
        wire = all_reduce["median"] / 1e9
        return measured(
            f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s a way, all-reduce {wire:.3g} GB/s on its wire", **figures
        )
    shown, todo = slow, "see what else runs (top)"
    if devices.kind == "cuda":
        shown = [" to ".join(devices.names[int(end)] for end in way.split(" to ")) for way in slow]
        todo = (
            "nvidia-smi topo -m and nvidia-smi nvlink -s show how they are connected; compare 'modes=[ddp,local_sgd]'"
        )
    part = max(max(ways[way]) for way in slow) / best
    return wrong(f"slow from {', '.join(shown)}: {part:.0%} of the fastest link", todo, **figures)


def load_libraries() -> None:
    """What Python takes for torch and torchvision alone."""
    subprocess.run(
        [sys.executable, "-c", "import torch, torchvision"], check=True, stdin=subprocess.DEVNULL, capture_output=True
    )


def start_up(runner: CheckRunner) -> Outcome:
    """From the command to the first step, and what Python takes to load torch and torchvision alone."""
    words = ["recipe=digits", "mode=single", *runner.devices.first(), "max_steps=1", "epochs=1"]
    words += ["save.every_epochs=null"]

    def ours_takes(turn: int) -> float:
        begun = time.perf_counter()
        spent = runner.train(f"start-up/{turn}", words, timed=True)["seconds_in"]
        later = sum(spent.get(part, 0.0) for part in ("steps", "evaluation", "saving"))
        return float(time.perf_counter() - begun - later)

    bare, ours = in_turn(3, lambda turn: seconds(load_libraries), ours_takes)
    return _beside("s", ours, bare, f"the libraries alone take {median(bare):.1f} s", "seconds")


def save(runner: CheckRunner) -> Outcome:
    answer = runner.measure("save", model="resnet50" if runner.devices.kind == "cuda" else "resnet18")[0]
    what = f"{answer['bytes'] / 1e6:,.0f} MB, hashed and read back"
    what += f"; torch.save and fsync take {median(answer['bare']):.2g} s"
    return _beside("s", answer["ours"], answer["bare"], what, "seconds", bytes=answer["bytes"])


def readers(runner: CheckRunner) -> Outcome:
    network = NETWORKS[runner.devices.kind][0]
    answer = runner.measure("readers", size=network.size)[0]
    takes = runner.figures(f"speed {network.name} x{runner.devices.count}").get("images_per_sec", {}).get("median")
    times = takes and median(answer["ours"]) / takes
    what = f"at {network.size} px, {answer['processes']} processes"
    what += f"; {times:.2g} times what {network.title} takes" if times else ""
    return _beside(
        "photos/s", answer["ours"], answer["bare"], what, "photos_per_sec", bare="torchvision's readers",
        share_of_what_the_network_takes=times, processes=answer["processes"],
    )  # fmt: skip


def _beside(
    unit: str, ours: Sequence[float], other: Sequence[float], what: str, key: str, bare: str = "", **figures: Any
) -> Outcome:
    """A figure of ours with its spread, and its ratio to a bare one that was measured in turn with it."""
    ratio = [a / b for a, b in zip(ours, other, strict=True)]
    against = f"; {spread(ratio)} times {bare}" if bare else ""
    line = f"{number(median(ours))} {unit} ({number(min(ours))} to {number(max(ours))}){against}; {what}"
    return measured(line, **{key: middle(ours), f"bare_{key}": middle(other)}, ratio=middle(ratio), **figures)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, as proof.json has them."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _settings(network: Network, runner: CheckRunner) -> Outcome:
    may = runner.devices.kind == "cuda" and runner.outcomes.get("compile", measured("")).status != "wrong"
    best = runner.measure("settings", **network.task(), may_compile=may)[0]
    line = f"{best['batch']} images per device in {best['precision']}" + ", compiled" * best["compile"]
    return measured(f"{line} are best of {len(best['tried'])} that were tried", **best)


def _speed(network: Network, count: int, runner: CheckRunner) -> Outcome:
    """A bare loop and a run of ours in turn, on `count` devices, with the settings that were best on one."""
    settings = runner.figures(f"settings {network.name}")
    if not settings:
        return Outcome("not here", "its settings are not known")
    kept = {key: settings[key] for key in SETTINGS}
    rate = next(row["images_per_sec"] for row in settings["tried"] if kept.items() <= row.items())
    steps = max(10, min(400, round(SECONDS * rate / kept["batch"])))
    where = ["mode=ddp", *runner.devices.in_ranks(count)] if count > 1 else ["mode=single", *runner.devices.first()]
    bare, ours, exposed, result = [], [], list[float](), dict[str, Any]()
    for turn in range(ROUNDS[runner.devices.kind]):
        answers = runner.measure("bare", count, **network.task(), **kept)
        bare.append(count * min(median(answer["speeds"]) for answer in answers))
        if count > 1:
            exposed.append(1 - bare[-1] / (count * min(median(answer["alone"]) for answer in answers)))
        name = f"speed/{network.name}-x{count}-{turn}"
        result = runner.train(name, words_of(where, network, count, kept, steps), timed=True)
        ours.append(speed(steps_of(runner.path(name)), result["throughput"]["samples_per_sec"]))
    return speed_outcome(runner, network, count, kept, ours, bare, exposed, result)


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


def speed_outcome(
    runner: CheckRunner, network: Network, count: int, kept: Mapping[str, Any], ours: list[float], bare: list[float],
    exposed: list[float], result: Mapping[str, Any],
) -> Outcome:  # fmt: skip
    """Images/s beside a bare loop, one device, and what others published."""
    single = runner.figures(f"speed {network.name} x1").get("images_per_sec", {}).get("median")
    times = median(ours) / single if single and count > 1 else None
    waits = max(0.0, median(exposed)) if exposed else None
    others = published(runner.devices.models[0], network.name, count)
    others = [{**row, "share": median(ours) / row["images_per_sec"]} for row in others]
    ratio = [a / b for a, b in zip(ours, bare, strict=True)]
    parts = [f"{number(median(ours))} images/s ({number(min(ours))} to {number(max(ours))})"]
    parts += [f"{spread(ratio)} times a bare loop"]
    if times:
        waiting = f", {waits:.0%} of a bare step waits for communication" if waits else ""
        parts.append(f"{times:.2f} times as fast as one{waiting}")
    parts += [f"{row['share']:.0%} of the {row['images_per_sec']:,} published" for row in others]
    return measured(
        "; ".join(parts), images_per_sec=middle(ours), bare_images_per_sec=middle(bare), ratio=middle(ratio),
        times_one=times, exposed_communication=waits, mfu=result["mfu"], devices=count,
        **{**kept, "batch": kept["batch"] * count}, step=(result["verdict"] or {"step": {}})["step"],
        beside_others=others,
    )  # fmt: skip


def bubble(runner: CheckRunner) -> Outcome:
    """What a pipeline measured of its own bubble, and what `plan` predicts from the speed of one device."""
    network = NETWORKS[runner.devices.kind][0]
    settings = runner.figures(f"settings {network.name}")
    if not settings:
        return Outcome("not here", "the network's settings are not known")
    kept = {"batch": settings["batch"], "precision": settings["precision"], "compile": False}
    where = [*pipeline(runner.devices), "pipeline.microbatches=4"]
    words = words_of(where, network, runner.devices.count // 2 * 2, kept, 24)
    result = runner.train("bubble/pipeline", words, timed=True)["pipeline"]
    if runner.trainer("plan", ["plan", *words, "measured=here", "--json"]):
        raise TrialFailed(f"plan: {failure_line(runner.log('plan'), 1)}", 1)
    text = runner.log("plan").read_text()
    planned = json.loads(text[text.index("{") :])["prediction"]["bubble"]
    least, most, ideal = (result[f"bubble_{key}"] for key in ("measured", "at_most", "ideal"))
    idles = f"{least:.1%}" + (f" to {most:.1%}" if most > least + 0.01 else "")
    line = f"{idles} of a step idles; plan predicts {planned:.1%}, equal stages would have {ideal:.1%}"
    return measured(line, bubble=least, bubble_at_most=most, planned=planned, ideal=ideal, schedule=result["schedule"])
