"""How fast does this machine train? Each figure beside a bare PyTorch loop's, and a physical limit where known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainer.commands.compare.running import Failed, failure_line, speed, steps_of
from trainer.commands.prove import published
from trainer.commands.prove.outcome import Check, Outcome, measured, wrong
from trainer.commands.prove.trip import Devices, Trip
from trainer.telemetry.readable import number

# A device or a link is slow below this share of the best of its like, throttled below this share of its own best. On
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

    def asked(self) -> dict[str, Any]:
        return {"model": self.name, "size": self.size, "classes": self.classes}


NETWORKS = {
    "cuda": (Network("resnet50", "ResNet-50", 224, 1000), Network("vit_b_16", "ViT-B/16", 224, 1000)),
    "cpu": (Network("resnet20", "ResNet-20", 32, 10), Network("vit_tiny", "a tiny ViT", 32, 10)),
}


def networks(devices: Devices) -> tuple[Network, ...]:
    return NETWORKS[devices.kind]


def counts(devices: Devices) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**n for n in range(10) if 2**n < devices.count} | {devices.count})


def checks(devices: Devices) -> Iterator[Check]:
    count = devices.count
    yield Check("rates", "fast", "matrix products and memory of each device", 8 + 4 * count, rates, 1)
    if count > 1:
        yield Check("links", "fast", "bandwidth between pairs, and of all-reduce", 10, links, 1)
    yield Check("start-up", "fast", "seconds until the first step", 32, start_up, 2)
    yield Check("save", "fast", "seconds of a save", 12, save, 2)
    slow = devices.kind == "cuda"
    for rank, network in enumerate(networks(devices), 1):
        title = f"{network.title}: batch, precision, compilation"
        yield Check(f"settings {network.name}", "fast", title, 90 if slow else 15, _settings(network), rank)
        for several in counts(devices):
            seconds = ROUNDS[devices.kind] * PAIR[devices.kind]
            title = f"{network.title} on {devices.called(several)}"
            yield Check(f"speed {network.name} x{several}", "fast", title, seconds, _speed(network, several), rank)
    yield Check("readers", "fast", "photos read a second", 18, readers, 2)
    if count > 1:
        yield Check("bubble", "fast", "the pipeline's bubble against plan's", 25 if slow else 18, bubble, 2)


# --- the devices ------------------------------------------------------------------------------------------------------


def rates(trip: Trip) -> Outcome:
    devices = trip.devices
    answers = trip.measure("rates", devices.count)
    figures: dict[str, Any] = {"precision": answers[0]["precision"], "devices": []}
    notes: list[str] = []
    slow: list[str] = []
    for name, model, answer in zip(devices.names, devices.models, answers, strict=True):
        limits = {"product": answer["product_limit"], "memory": published.peak_bandwidth(model)}
        row: dict[str, Any] = {"device": name}
        for kind in ("product", "memory"):
            row[kind] = middle(answer[kind])
            limit = limits[kind]
            row[f"{kind}_limit"], row[f"{kind}_share"] = limit, limit and median(answer[kind]) / limit
        figures["devices"].append(row)
    for kind, what in (("product", "matrix products"), ("memory", "memory")):
        every = [answer[kind] for answer in answers]
        slow += slow_ones(devices, every, what)
        rate = median([median(each) for each in every])
        unit = f"GFLOP/s in {figures['precision']}" if kind == "product" else "GB/s"
        share = figures["devices"][0][f"{kind}_share"]
        notes.append(f"{what} {number(rate / 1e9)} {unit}" + (f" ({share:.0%} of the card's limit)" if share else ""))
    if slow:
        rest = [name for name in devices.names if not any(line.startswith(f"{name} ") for line in slow)]
        without = f"train without it, devices=[{','.join(rest)}]; " if rest and devices.kind == "cuda" else ""
        todo = f"{without}nvidia-smi -q -d PERFORMANCE,TEMPERATURE tells why"
        if devices.kind == "cpu":
            todo = "see what else runs (top), and how the cores are cooled"
        return wrong("; ".join(slow), todo, slow=slow, **figures)
    return measured("each: " + ", ".join(notes), slow=[], **figures)


def slow_ones(devices: Devices, every: Sequence[Sequence[float]], what: str) -> Iterator[str]:
    """Devices that are slower than their like, or than they were themselves a moment before."""
    for place, (name, own) in enumerate(zip(devices.names, every, strict=True)):
        shown = name if devices.kind == "cuda" else f"{name}:{place}"
        alike = [
            max(rates) for model, rates in zip(devices.models, every, strict=True) if model == devices.models[place]
        ]
        if max(own) < SLOW[devices.kind] * max(alike):
            yield f"{shown} is slow: its {what} reach {max(own) / max(alike):.0%} of the best of its like"
        elif max(own[-2:]) < THROTTLED[devices.kind] * max(own):
            yield f"{shown} is throttled: its {what} fall to {own[-1] / max(own):.0%} of its own best"


def links(trip: Trip) -> Outcome:
    answers = trip.measure("links", trip.devices.count)
    ways = {way: rates for answer in answers for way, rates in answer["ways"].items()}
    together = answers[0]["all_reduce"]
    best = max(max(rates) for rates in ways.values())
    slow = [way for way, rates in sorted(ways.items()) if max(rates) < SLOW_LINK[trip.devices.kind] * best]
    figures = {"ways": {way: middle(rates) for way, rates in sorted(ways.items())}, "all_reduce": middle(together)}
    if slow:
        named = [" to ".join(trip.devices.names[int(end)] for end in way.split(" to ")) for way in slow]
        shown = ", ".join(slow if trip.devices.kind == "cpu" else named)
        part = max(max(ways[way]) for way in slow) / best
        todo = "nvidia-smi topo -m and nvidia-smi nvlink -s tell how they are joined; compare 'modes=[ddp,local_sgd]'"
        todo = todo if trip.devices.kind == "cuda" else "see what else runs (top)"
        return wrong(f"slow from {shown}: {part:.0%} of the fastest way", todo, slow=slow, **figures)
    low, high = (pick(median(rates) for rates in ways.values()) for pick in (min, max))
    line = f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s a way, all-reduce {median(together) / 1e9:.3g} GB/s on its wire"
    return measured(line, slow=[], **figures)


# --- starting, saving, reading ----------------------------------------------------------------------------------------

LIBRARIES = "import torch, torchvision"


def start_up(trip: Trip) -> Outcome:
    """From the command to the first step, and what Python takes to load torch and torchvision alone."""
    ours, bare = [], []
    words = ["recipe=digits", "mode=single", *trip.devices.one(), "max_steps=1", "epochs=1", "save.every_epochs=null"]
    for turn in range(3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True, stdin=subprocess.DEVNULL, capture_output=True)
        bare.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        result = trip.train(f"start-up/{turn}", words, timed=True)
        spent = result["seconds_in"]
        ours.append(
            time.perf_counter() - begun - sum(spent.get(part, 0.0) for part in ("steps", "evaluation", "saving"))
        )
    return _beside("s", ours, bare, f"the libraries alone take {median(bare):.1f} s", "seconds")


def save(trip: Trip) -> Outcome:
    model = "resnet50" if trip.devices.kind == "cuda" else "resnet18"
    found = trip.measure("save", model=model)[0]
    what = (
        f"{found['bytes'] / 1e6:,.0f} MB, hashed and read back; torch.save and fsync take {median(found['bare']):.2g} s"
    )
    return _beside("s", found["ours"], found["bare"], what, "seconds", bytes=found["bytes"])


def readers(trip: Trip) -> Outcome:
    network = networks(trip.devices)[0]
    found = trip.measure("readers", size=network.size)[0]
    takes = trip.figures(f"speed {network.name} x{trip.devices.count}").get("images_per_sec", {}).get("median")
    share = takes and median(found["ours"]) / takes
    what = f"at {network.size} px, {found['processes']} processes"
    what += f"; {share:.2g} times what {network.title} takes" if share else ""
    return _beside(
        "photos/s", found["ours"], found["bare"], what, "photos_per_sec", bare="torchvision's readers",
        share_of_what_the_network_takes=share, processes=found["processes"],
    )  # fmt: skip


def _beside(
    unit: str, ours: Sequence[float], other: Sequence[float], what: str, key: str, bare: str = "", **figures: Any
) -> Outcome:
    """A figure of ours with its spread, and how it stands to a bare one that was measured in turn with it."""
    ratio = [a / b for a, b in zip(ours, other, strict=True)]
    against = f"; {spread(ratio)} times {bare}" if bare else ""
    line = f"{number(median(ours))} {unit} ({number(min(ours))} to {number(max(ours))}){against}; {what}"
    return measured(line, **{key: middle(ours), f"bare_{key}": middle(other)}, ratio=middle(ratio), **figures)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, as proof.json has them."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


# --- images a second --------------------------------------------------------------------------------------------------


def _settings(network: Network) -> Callable[[Trip], Outcome]:
    def check(trip: Trip) -> Outcome:
        may = trip.devices.kind == "cuda" and trip.outcomes.get("compile", measured("")).status != "wrong"
        found = trip.measure("settings", **network.asked(), may_compile=may)[0]
        told = f"{found['batch']} images a device in {found['precision']}" + ", compiled" * found["compile"]
        return measured(f"{told} are best of {len(found['tried'])} that were tried", **found)

    return check


def _speed(network: Network, count: int) -> Callable[[Trip], Outcome]:
    def check(trip: Trip) -> Outcome:
        chosen = trip.figures(f"settings {network.name}")
        if not chosen:
            return Outcome("not here", "its settings are not known")
        best = next(t for t in chosen["tried"] if all(t[k] == chosen[k] for k in ("batch", "precision", "compile")))
        steps = max(10, min(400, round(SECONDS * best["images_per_sec"] / chosen["batch"])))
        where = ["mode=ddp", *trip.devices.in_ranks(count)] if count > 1 else ["mode=single", *trip.devices.one()]
        kept = {key: chosen[key] for key in ("batch", "precision", "compile")}
        bare, ours, exposed, results = [], [], list[float](), []
        for turn in range(ROUNDS[trip.devices.kind]):
            answers = trip.measure("bare", count, **network.asked(), **kept)
            bare.append(count * min(median(answer["speeds"]) for answer in answers))
            if count > 1:
                exposed.append(1 - bare[-1] / (count * min(median(answer["alone"]) for answer in answers)))
            name = f"speed/{network.name}-x{count}-{turn}"
            results.append(trip.train(name, words_of(where, network, count, kept, steps), timed=True))
            ours.append(speed(steps_of(trip.path(name)), results[-1]["throughput"]["samples_per_sec"]))
        return _told(trip, network, count, kept, ours, bare, exposed, results[-1])

    return check


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


def _told(
    trip: Trip, network: Network, count: int, kept: Mapping[str, Any], ours: list[float], bare: list[float],
    exposed: list[float], result: Mapping[str, Any],
) -> Outcome:  # fmt: skip
    one = trip.figures(f"speed {network.name} x1").get("images_per_sec", {}).get("median")
    times = median(ours) / one if one and count > 1 else None
    verdict = result["verdict"] or {"step": {}}
    waits = max(0.0, median(exposed)) if exposed else None
    model = trip.devices.models[0]
    others = [
        {**row, "share": median(ours) / row["images_per_sec"]} for row in published.beside(model, network.name, count)
    ]
    ratio = [a / b for a, b in zip(ours, bare, strict=True)]
    parts = [f"{number(median(ours))} images/s ({number(min(ours))} to {number(max(ours))})"]
    parts += [f"{spread(ratio)} times a bare loop"]
    if times:
        parts.append(
            f"{times:.2f} times one" + (f", {waits:.0%} of a bare step waits for communication" if waits else "")
        )
    parts += [f"{row['share']:.0%} of the {row['images_per_sec']:,} published" for row in others]
    return measured(
        "; ".join(parts), images_per_sec=middle(ours), bare_images_per_sec=middle(bare), ratio=middle(ratio),
        times_one=times, exposed_communication=waits, mfu=result["mfu"], devices=count, batch=kept["batch"] * count,
        precision=kept["precision"], compile=kept["compile"], step=verdict["step"], beside_others=others,
    )  # fmt: skip


# --- the pipeline -----------------------------------------------------------------------------------------------------


def bubble(trip: Trip) -> Outcome:
    """What a pipeline measured of its own bubble, and what `plan` foretells from the speed of one device."""
    from trainer.commands.prove.right import pipes

    network = networks(trip.devices)[0]
    chosen = trip.figures(f"settings {network.name}")
    if not chosen:
        return Outcome("not here", "the network's settings are not known")
    ranks, stages = pipes(trip.devices.count)
    kept = {"batch": chosen["batch"], "precision": chosen["precision"], "compile": False}
    where = ["mode=pipeline", *trip.devices.in_ranks(ranks), f"pipeline.stages={stages}", "pipeline.microbatches=4"]
    words = words_of(where, network, ranks, kept, 24)
    result = trip.train("bubble/pipeline", words, timed=True)
    found, most = result["pipeline"]["bubble_measured"], result["pipeline"]["bubble_at_most"]
    if trip.trainer("plan", ["plan", *words, "measured=here", "--json"]):
        raise Failed(f"plan: {failure_line(trip.log('plan'), 1)}", 1)
    text = trip.log("plan").read_text()
    planned = json.loads(text[text.index("{") :])["prediction"]["bubble"]
    ideal = result["pipeline"]["bubble_ideal"]
    idles = f"{found:.1%}" + (f" to {most:.1%}" if most > found + 0.01 else "")
    line = f"{idles} of a step idles; plan foretells {planned:.1%}, equal stages would have {ideal:.1%}"
    schedule = result["pipeline"]["schedule"]
    return measured(line, bubble=found, bubble_at_most=most, planned=planned, ideal=ideal, schedule=schedule)
