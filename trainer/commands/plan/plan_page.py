"""A plan for people: a compact page, like the banner of a run."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from trainer.recipe import TRAITS
from trainer.recipe.image_sizes import in_pixels
from trainer.recipe.versions import VERSION
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size, counted, duration, multiply_adds, operations

WIDTH = 119
PARTS = ("parameters", "gradients", "optimizer", "ema", "buffers", "teacher", "images", "activations", "peak")

Plan = dict[str, Any]  # as `summary.summarise` makes it


def page_of(plan: Plan) -> str:
    """The page."""
    lines = [f"trainer {VERSION}: plan of {plan['recipe']}"]
    model, devices, disk = plan["model"], plan["devices"], plan["disk"]
    processes = f"{plan['world_size']} process{'es' * (plan['world_size'] > 1)}"
    flops = model["forward_flops_per_image"]
    work = f"{multiply_adds(flops)} ({operations(flops)}) per image, forward, {model['precision']}"
    facts = {
        "mode": f"{plan['mode']}, {processes} on {counted(len(devices), 'device')}: {_names(devices)}",
        "model": f"{model['name']}, {model['parameters']:,} parameters, {work}",
        "data": _data(plan["data"], plan["steps"]),
        "batch": _batch(plan["batch"]),
        "disk": f"{as_size(disk['checkpoint'])} a checkpoint, {as_size(disk['folder'])} at most for the run folder",
        "traffic": _traffic(plan),
    }
    for key, value in facts.items():
        lines += _field(key, value)
    lines += ["", *_memory(plan)]
    if plan["pipeline"]:
        lines += ["", *_pipeline(plan["pipeline"])]
    if plan["prediction"]:
        lines += ["", *_prediction(plan["prediction"])]
    if plan["modes"]:
        lines += ["", *_modes(plan["modes"])]
    if plan["assumptions"]:
        lines += ["", "  assumed"]
        for note in plan["assumptions"]:
            lines += wrap(note, WIDTH, initial_indent="    - ", subsequent_indent="      ")
    how = f", with {plan['advice'][0]['words']} or another of the words above" if plan["advice"] else ""
    lines += ["", f"  to train{how}" + " (it does not fit here as it is)" * (plan["fits"] is False)]
    lines += [f"    {command}" for command in plan["commands"]]
    if plan["needs_folder"]:
        lines.append("    FOLDER holds train/<class> and val/<class>; without data.root= only the speed is measured")
    return "\n".join(lines)


def _field(key: str, value: str) -> list[str]:
    return wrap(value, WIDTH, initial_indent=f"  {key:<9}", subsequent_indent=" " * 11)


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{devices[0]} ... {devices[-1]}"


def _data(data: Plan, steps: Plan) -> str:
    shape = f"{data['classes']} classes, {data['channels']} x {in_pixels(data['image_size'])}"
    if data["train_samples"] is None:
        return f"{data['name']}: number of images unknown ({data['source']}); {shape}"
    line = f"{data['name']}: {data['train_samples']:,} training images, {data['val_samples']:,} held out; {shape}"
    return f"{line}; {steps['per_epoch']:,} steps an epoch x {steps['epochs']} epochs, {steps['total']:,} in all"


def _batch(batch: Plan) -> str:
    line = f"{batch['global']} global"
    if batch["shares"]:
        line += f" = {' + '.join(map(str, batch['shares']))}"
    elif batch["shards"] > 1:
        line += f" = {batch['shards']} x {batch['per_shard']}"
        line += " at most" * (batch["shards"] * batch["per_shard"] > batch["global"])
    if batch["accumulate"] > 1:
        line += f", in {batch['accumulate']} pieces of {batch['per_pass']}" + " at most" * bool(batch["shares"])
    if batch["microbatch"] not in (None, batch["per_pass"]):
        line += f", in micro-batches of {batch['microbatch']}"
    if batch["shares"] or batch["microbatch"] is not None:
        return line
    return f"{line}; {batch['per_device']:.4g} images a device"


def _traffic(plan: Plan) -> str:
    traffic, exchanges = plan["communication"], TRAITS[plan["mode"]].exchanges
    parts = []
    if sent := traffic["all_reduce_bytes_per_device"]:
        what = "gather weights and reduce gradients" if exchanges == "shards" else f"all-reduce {exchanges}"
        parts.append(f"{as_size(sent)} a step sent by each device to {what}")
    if sent := traffic["epoch_bytes_per_device"]:
        parts.append(f"{as_size(sent)} an epoch sent by each device to average weights")
    if sent := traffic["crossing_bytes"]:
        what = "copies and gradients" if exchanges == "copies" else "activations and their gradients"
        parts.append(f"{as_size(sent)} a step of {what} from device to device")
    seconds = f"; {duration(traffic['seconds'])} if nothing overlaps it" if traffic["seconds"] else ""
    return "; ".join(parts) + seconds if parts else "none between devices"


def _memory(plan: Plan) -> list[str]:
    groups: dict[tuple[int, ...], list[str]] = {}  # devices that hold the same
    for device in plan["memory_per_device"]:
        groups.setdefault(tuple(device[key] for key in PARTS), []).append(device["device"])
    shown = [n for n in range(len(PARTS)) if any(sizes[n] for sizes in groups)]
    rows = [["memory", *(PARTS[n] for n in shown)]]
    rows += [[_names(names), *(as_size(sizes[n]) for n in shown)] for sizes, names in groups.items()]
    lines, limit = _table(rows), plan["memory_limit"]
    if plan["peak_without_recompute"] is not None:
        kept = as_size(plan["peak_without_recompute"])
        lines.append(f"  recompute: {as_size(plan['peak'])} in place of {kept} with recompute=false")
    if limit is None:
        return [*lines, "  this machine has no such device: add memory=24GiB to see whether this fits"]
    used_of, usable = f"{as_size(plan['peak'])} of {as_size(limit['bytes'])} ({limit['source']})", limit["usable"]
    if plan["fits"]:
        cuda = plan["devices"][0].startswith("cuda")
        what = "CUDA's context, NCCL's buffers and holes between blocks" if cuda else "what a plan cannot count"
        return [*lines, f"  fits: {used_of}", f"    {as_size(limit['bytes'] - usable)} are kept free for {what}"]
    lines.append(f"  DOES NOT FIT: {used_of}, of which {as_size(usable)} can be used")
    lines += [f"    {advice['words']:<28} {as_size(advice['peak']):>10}" for advice in plan["advice"]]
    more = "use more devices, a smaller batch_size or model, or another mode: python -m trainer guide memory"
    return lines if plan["advice"] else [*lines, f"    {more}"]


def _pipeline(pipe: Plan) -> list[str]:
    by = {"flops": "balanced by FLOPs, nothing is measured", "seconds": "balanced by measured seconds"}
    title = f"{len(pipe['stages'])} stages, {pipe['schedule']}"
    title += f", {pipe['microbatches']} micro-batches" * (pipe["microbatches"] > 1)
    title += "" if pipe["bubble_ideal"] is None else f", ideal bubble {pipe['bubble_ideal']:.1%}"
    rows = [["stage", "device", "cut after", "parameters", "forward", "share", "sends"]]
    for index, (stage, cut) in enumerate(zip(pipe["stages"], [*pipe["cuts"], ""], strict=True)):
        numbers = [f"{stage['parameters']:,}", operations(stage["forward_flops"]), f"{stage['flops_share']:.0%}"]
        rows.append([str(index), stage["device"], cut, *numbers, as_size(stage["sent_bytes"]) if cut else ""])
    return [f"  pipeline {title}; {by.get(pipe['balanced_by'], 'as given')}", *_table(rows)]


def _prediction(made: Plan) -> list[str]:
    parts = {part: made[f"{part}_seconds"] for part in ("compute", "communication", "optimizer", "other")}
    listed = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items() if seconds)
    line = f"{made['samples_per_sec']:,.4g} images/s, {duration(made['step_seconds'])} a step: {listed}"
    line += f"; bubble {made['bubble']:.1%}" if made["bubble"] is not None else ""
    return _field("predicts", line)


def _modes(modes: Sequence[Plan]) -> list[str]:
    rows = [["mode", "processes", "devices", "activations", "peak a device", "fits", "sent a step", "bubble"]]
    for row in modes:
        if row["error"] is None:
            fits = {True: "yes", False: "no", None: "?"}[row["fits"]]
            sizes = [as_size(row["activations"]), as_size(row["peak"])]
            sent = as_size(row["traffic"]) if row["traffic"] else "-"
            bubble = f"{row['bubble']:.0%}" if row["bubble"] is not None else "-"
            rows.append([row["mode"], str(row["world_size"]), str(row["devices"]), *sizes, fits, sent, bubble])
    return [*_table(rows), *(f"    {row['mode']}: {row['error']}" for row in modes if row["error"] is not None)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left and the others to the right."""
    return [f"  {line}" for line in readable.table(rows, right=range(1, len(rows[0])))]
