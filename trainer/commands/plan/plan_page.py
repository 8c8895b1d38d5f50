"""The printed page of a plan."""

import textwrap
from collections.abc import Sequence
from typing import Any

from trainer.processes.terminal import terminal_width
from trainer.recipe import TRAITS
from trainer.recipe.image_sizes import in_pixels
from trainer.telemetry.readable import (
    format_count,
    format_duration,
    format_operations,
    format_size,
    format_table,
    multiply_adds,
    wrap,
)
from trainer.versions import VERSION

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "ema",
    "buffers",
    "teacher",
    "images",
    "activations",
    "peak",
)

# The content of a plan, as `summary.summarize` builds it.
Plan = dict[str, Any]


def render_page(plan: Plan) -> str:
    """Return the page of `plan` as text for a terminal."""
    lines = [f"trainer {VERSION}: plan of {plan['recipe']}"]
    model = plan["model"]
    disk = plan["disk"]
    processes = "1 process"
    if plan["world_size"] > 1:
        processes = f"{plan['world_size']} processes"
    devices = f"{format_count(len(plan['devices']), 'device')}: {_name_devices(plan['devices'])}"
    flops = model["forward_flops_per_image"]
    cost = f"{multiply_adds(flops)} ({format_operations(flops)})"
    facts = {
        "mode": f"{plan['mode']}, {processes} on {devices}",
        "model": f"{model['name']}, {model['parameters']:,} parameters, {cost} per image, forward, "
        f"{model['precision']}",
        "data": _describe_data(plan["data"], plan["steps"]),
        "batch": _describe_batch(plan["batch"]),
        "disk": f"{format_size(disk['checkpoint'])} a checkpoint, {format_size(disk['folder'])} at "
        "most for the run folder",
        "traffic": _describe_traffic(plan),
    }
    for key, value in facts.items():
        lines.append(wrap(f"  {key:<9}", value))
    lines += ["", *_list_memory(plan)]
    if plan["pipeline"]:
        lines += ["", *_list_stages(plan["pipeline"])]
    if plan["prediction"]:
        lines += ["", _describe_prediction(plan["prediction"])]
    if plan["modes"]:
        lines += ["", *_list_modes(plan["modes"])]
    if plan["assumptions"]:
        lines += ["", "  assumed"]
        for note in plan["assumptions"]:
            lines.append(wrap("    - ", note))
    title = "  to train"
    if plan["advice"]:
        title += f", with {plan['advice'][0]['words']} or another argument above"
    if plan["fits"] is False:
        title += " (it does not fit here as it is)"
    lines += ["", title]
    for command in plan["commands"]:
        lines.append(f"    {command}")
    if plan["needs_folder"]:
        lines.append(
            "    FOLDER holds train/<class> and val/<class>; without data.root= only the speed is "
            "measured"
        )
    return "\n".join(lines)


def _name_devices(devices: Sequence[str]) -> str:
    if len(devices) <= 2:
        return ", ".join(devices)
    return f"{devices[0]} ... {devices[-1]}"


def _describe_data(data: Plan, steps: Plan) -> str:
    shape = f"{data['classes']} classes, {data['channels']} x {in_pixels(data['image_size'])}"
    if data["train_samples"] is None:
        return f"{data['name']}: number of images unknown ({data['source']}); {shape}"
    return (
        f"{data['name']}: {data['train_samples']:,} training images, {data['val_samples']:,} for "
        f"validation; {shape}; {steps['per_epoch']:,} steps an epoch x {steps['epochs']} epochs, "
        f"{steps['total']:,} in all"
    )


def _describe_batch(batch: Plan) -> str:
    line = f"{batch['global']} global"
    if batch["shares"]:
        line += f" = {' + '.join(map(str, batch['shares']))}"
    elif batch["shards"] > 1:
        line += f" = {batch['shards']} x {batch['per_shard']}"
        if batch["shards"] * batch["per_shard"] > batch["global"]:
            line += " at most"
    if batch["accumulate"] > 1:
        line += f", in {batch['accumulate']} micro-batches of {batch['per_pass']}"
        if batch["shares"]:
            line += " at most"
    if batch["microbatch"] not in (None, batch["per_pass"]):
        line += f", in pipeline micro-batches of {batch['microbatch']}"
    # An average per device says nothing about unequal shares or about stages.
    if batch["shares"] or batch["microbatch"] is not None:
        return line
    return f"{line}; {batch['per_device']:.4g} images a device"


def _describe_traffic(plan: Plan) -> str:
    traffic = plan["communication"]
    exchanges = TRAITS[plan["mode"]].exchanges
    parts = []
    per_step = traffic["all_reduce_bytes_per_device"]
    if per_step:
        what = f"all-reduce {exchanges}"
        if exchanges == "shards":
            what = "gather weights and reduce gradients"
        parts.append(f"{format_size(per_step)} a step sent by each device to {what}")
    per_epoch = traffic["epoch_bytes_per_device"]
    if per_epoch:
        parts.append(f"{format_size(per_epoch)} an epoch sent by each device to average weights")
    crossing = traffic["crossing_bytes"]
    if crossing:
        what = "activations and their gradients"
        if exchanges == "copies":
            what = "copies and gradients"
        parts.append(f"{format_size(crossing)} a step of {what} from device to device")
    if not parts:
        return "none between devices"
    if traffic["seconds"]:
        parts.append(f"{format_duration(traffic['seconds'])} if nothing overlaps it")
    return "; ".join(parts)


def _list_memory(plan: Plan) -> list[str]:
    # Devices with equal memory share a row.
    groups: dict[tuple[int, ...], list[str]] = {}
    for device in plan["memory_per_device"]:
        sizes = tuple(device[part] for part in PARTS)
        groups.setdefault(sizes, []).append(device["device"])
    # A part that no device has is left out, because its column would contain zeros only.
    shown = [n for n in range(len(PARTS)) if any(sizes[n] for sizes in groups)]
    rows = [["memory", *(PARTS[n] for n in shown)]]
    for sizes, names in groups.items():
        rows.append([_name_devices(names), *(format_size(sizes[n]) for n in shown)])
    lines = _format_table(rows)
    peak = format_size(plan["peak"])
    if plan["peak_without_recompute"] is not None:
        lines.append(
            f"  recompute: {peak} instead of {format_size(plan['peak_without_recompute'])} with "
            "recompute=false"
        )
    limit = plan["memory_limit"]
    if limit is None:
        lines.append("  this machine has no such device: add memory=24GiB to see whether this fits")
        return lines
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    usage = (
        f"{peak} of {format_size(limit['bytes'])} ({limit['source']}), of which "
        f"{format_size(limit['usable'])} can be used"
    )
    lines.append(wrap(f"  {verdict}: ", usage))
    if plan["fits"]:
        return lines
    for advice in plan["advice"]:
        lines.append(f"    {advice['words']:<28} {format_size(advice['peak']):>10}")
    if not plan["advice"]:
        lines.append("    use more devices, a smaller batch_size or model, or another mode:")
        lines.append("    python -m trainer guide memory")
    return lines


def _list_stages(pipeline: Plan) -> list[str]:
    balances = {
        "flops": "balanced by FLOPs, nothing is measured",
        "seconds": "balanced by measured seconds",
    }
    title = f"  pipeline {len(pipeline['stages'])} stages, {pipeline['schedule']}"
    if pipeline["microbatches"] > 1:
        title += f", {pipeline['microbatches']} micro-batches"
    if pipeline["bubble_ideal"] is not None:
        title += f", ideal bubble {pipeline['bubble_ideal']:.1%}"
    rows = [["stage", "device", "cut after", "parameters", "forward", "share", "sends"]]
    # The model is not cut after the last stage, which sends nothing.
    cuts = [*pipeline["cuts"], ""]
    for index, (stage, cut) in enumerate(zip(pipeline["stages"], cuts, strict=True)):
        rows.append(
            [
                str(index),
                stage["device"],
                cut,
                f"{stage['parameters']:,}",
                format_operations(stage["forward_flops"]),
                f"{stage['flops_share']:.0%}",
                format_size(stage["sent_bytes"]) if cut else "",
            ]
        )
    title += f"; {balances.get(pipeline['balanced_by'], 'as given')}"
    return [title, *_format_table(rows)]


def _describe_prediction(prediction: Plan) -> str:
    parts = []
    for part in ("compute", "communication", "optimizer"):
        seconds = prediction[f"{part}_seconds"]
        if seconds:
            parts.append(f"{part} {format_duration(seconds)}")
    line = (
        f"{prediction['samples_per_sec']:,.4g} images/s, "
        f"{format_duration(prediction['step_seconds'])} a step: {', '.join(parts)}"
    )
    if prediction["bubble"] is not None:
        line += f"; bubble {prediction['bubble']:.1%}"
    return wrap("  predicts ", line)


def _list_modes(modes: Sequence[Plan]) -> list[str]:
    rows = [
        [
            "mode",
            "processes",
            "devices",
            "activations",
            "peak/device",
            "fits",
            "sent/step",
            "bubble",
        ]
    ]
    errors = []
    for mode in modes:
        if mode["error"] is not None:
            errors.append(wrap(f"    {mode['mode']}: ", mode["error"]))
            continue
        bubble = "-"
        if mode["bubble"] is not None:
            bubble = f"{mode['bubble']:.0%}"
        rows.append(
            [
                mode["mode"],
                str(mode["world_size"]),
                str(mode["devices"]),
                format_size(mode["activations"]),
                format_size(mode["peak"]),
                {True: "yes", False: "no", None: "?"}[mode["fits"]],
                format_size(mode["traffic"]) if mode["traffic"] else "-",
                bubble,
            ]
        )
    return [*_format_table(rows), *errors]


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the indented lines of a table: the first column is aligned left, all others right."""
    lines = format_table(rows, range(1, len(rows[0])), terminal_width() - 2)
    return [textwrap.indent("\n".join(lines), "  ")]
