"""Bytes on each device of a planned run, whether they fit, and what to change where they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.commands.plan.planned_layout import Layout, lay_out
from trainer.devices import cards
from trainer.errors import RecipeError
from trainer.models.memory import Resident, fewest, held, room_in, saved_buffers, size_of
from trainer.modes.dp import rows_of_devices
from trainer.modes.fsdp_units import teacher_share, unit_sizes, units_of
from trainer.modes.local_sgd import BUCKET
from trainer.modes.pipeline.torch_schedules import pipeline_order
from trainer.recipe.checks import check_processes, piece_counts, weight_shards
from trainer.recipe.versions import torch_has
from trainer.telemetry.device_memory import free_memory

# Of a GPU, whatever its size: a process's CUDA context with torch's and cuDNN's kernels; a communicator of NCCL.
CONTEXT, BUFFERS = 600 * 2**20, 400 * 2**20
AVERAGING = 20  # bytes for each element that local SGD averages: itself, as float64, and its share


@dataclass(frozen=True)
class Device:
    """Bytes on one device."""

    device: str
    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int
    images: int
    activations: int  # most at once in a step beyond weights, gradients and images
    peak: int  # most at once in all. Less than the sum where gradients take the place of activations
    teacher: int = 0


@dataclass(frozen=True)
class Limit:
    """What a device has, how much of it can be used, and how that is known."""

    bytes: int
    usable: float
    source: str


def footprint(fake: FakeModel, layout: Layout, cut: Cut | None = None) -> list[Device]:
    """Bytes on each of the layout's devices; `cut` for a model in stages."""
    if layout.staged:
        return _of_stages(fake, layout, cut or fake.cut(layout))
    if layout.recipe.traits.exchanges == "copies":
        return _of_replicas(fake, layout)
    sharded = layout.recipe.traits.exchanges == "shards"
    every = layout.shares or [layout.rows] * len(layout.devices)
    held = {rows: (_of_shards if sharded else _of_whole)(fake, layout, rows) for rows in {*every}}
    return [_taught(fake, layout, held[rows], name) for name, rows in zip(layout.devices, every, strict=True)]


def _taught(fake: FakeModel, layout: Layout, device: Device, name: str) -> Device:
    """With the weights of the teacher, or shards of them, under its name."""
    student, parts = size_of(*fake.model.parameters()), weight_shards(layout.recipe, layout.processes)
    teacher = teacher_share(fake.teacher, student, parts)
    return replace(device, device=name, teacher=teacher, peak=device.peak + teacher)


def _of_whole(fake: FakeModel, layout: Layout, rows: int) -> Device:
    resident, recipe = fake.resident(fake.model), layout.recipe
    resident = resident._replace(optimizer=resident.optimizer + _outer(resident, layout))
    images = sum(fake.batch_bytes(rows))
    several, exchanges = layout.processes > 1, recipe.traits.exchanges
    stays = recipe.pieces > 1 or (exchanges == "gradients" and several)  # gradients, from step to step
    activations = fake.whole(rows, gradients=True).peak
    if several and recipe.ddp.compress:  # all gradients in bf16 may be under way at once
        activations = max(activations, resident.gradients // 2)
    if stays:
        working = resident.gradients + activations
    else:
        working = max(resident.gradients, fake.whole(rows, gradients=False).peak)
    peak = sum(resident) - resident.gradients + images + working
    if exchanges == "weights" and several:
        averaging = AVERAGING * min(BUCKET, resident.parameters // 4)
        peak = max(peak, sum(resident) - resident.gradients + averaging)
    return Device("", *resident, images=images, activations=activations, peak=peak)


def _outer(resident: Resident, layout: Layout) -> int:
    """Bytes that local SGD's outer optimizer keeps."""
    steps = layout.recipe.traits.exchanges == "weights" and layout.processes > 1
    return layout.recipe.local_sgd.outer_copies * resident.gradients if steps else 0


def _of_shards(fake: FakeModel, layout: Layout, rows: int) -> Device:
    """A shard of everything, and what of the whole a pass gathers at most: with what is in no unit, two units and the
    gradients of one; all weights where they stay, or are hardly more. Within 10 % of what ranks hold."""
    parts, recipe = weight_shards(layout.recipe, layout.processes), layout.recipe
    if parts == 1:
        return _of_whole(fake, layout, rows)
    whole, images = fake.resident(fake.model), sum(fake.batch_bytes(rows))
    resident = Resident(*(-(-size // parts) for size in whole))._replace(buffers=whole.buffers)
    if on_host(fake, layout):
        resident = Resident(0, 0, 0, saved_buffers(fake.model) * (whole.ema > 0), whole.buffers)
    stays = recipe.pieces > 1  # gradients, from one pass to the next
    rest, *units = unit_sizes(fake.model, units_of(fake.model))
    gathered = min(whole.parameters, rest + 3 * max(units)) if recipe.fsdp.reshard and units else whole.parameters
    # Shards of gradients come as activations go.
    passing = max(fake.whole(rows, gradients=True).peak, 0 if stays else resident.gradients)
    peak = sum(resident) - resident.gradients * (not stays) + images + gathered + passing
    activations = max(0, peak - sum(resident) - images)
    return Device("", *resident, images=images, activations=activations, peak=peak)


def on_host(fake: FakeModel, layout: Layout) -> int:
    """Bytes of each rank's shards in the host's memory; 0 where they are on the devices."""
    recipe, whole = layout.recipe, fake.resident(fake.model)
    if recipe.traits.exchanges != "shards" or not recipe.fsdp.offload or layout.kind != "cuda":
        return 0
    return -(-(sum(whole) - whole.buffers) // weight_shards(recipe, layout.processes))


def _of_replicas(fake: FakeModel, layout: Layout) -> list[Device]:
    """nn.DataParallel: the first device has the optimizer and all images, the others copies of the weights for a pass.

    Without CUDA torch passes everything through to one device.
    """
    if layout.kind == "cpu":
        return [_taught(fake, layout, _of_whole(fake, layout, layout.rows), "cpu")]
    resident, devices, all_rows = fake.resident(fake.model), [], layout.rows
    for name, rows in zip(layout.devices, rows_of_devices(layout.rows, len(layout.devices)), strict=False):
        activations = fake.whole(rows, gradients=True).peak
        devices.append(_with_peak(Device(name, *resident, sum(fake.batch_bytes(all_rows or rows)), activations, 0)))
        resident, all_rows = resident._replace(optimizer=0, ema=0), 0
    devices[0] = _with_peak(replace(devices[0], teacher=fake.teacher))
    return devices


def _of_stages(fake: FakeModel, layout: Layout, cut: Cut) -> list[Device]:
    modules = fake.traced.stages(cut.names)
    residents = [fake.resident(module) for module in modules]
    listed = pipeline_order(layout.schedule, layout.workers, layout.virtual, cut.microbatches)
    images, targets = fake.batch_bytes(layout.rows)
    devices = []
    for index, name in enumerate(layout.devices):
        worker = index % layout.workers
        stages = [stage for stage, holder in enumerate(cut.holders) if holder == worker]
        resident = Resident(*map(sum, zip(*(residents[stage] for stage in stages), strict=True)))
        activations = held(listed[worker], [stage.memory for stage in cut.stages])
        if layout.data_shares > 1:  # all gradients in one block, to be averaged
            activations = max(activations, resident.gradients)
        last = len(residents) - 1 in stages
        teacher = fake.teacher * ((0 in stages) if layout.processes == 1 else last)
        batch = images * (0 in stages or teacher > 0) + targets * last
        devices.append(_with_peak(Device(name, *resident, batch, activations, peak=0, teacher=teacher)))
    return devices


def _with_peak(device: Device) -> Device:
    """The sum of all parts."""
    return replace(device, peak=sum(size for part, size in asdict(device).items() if part not in ("device", "peak")))


def own_memory(layout: Layout, count: int) -> tuple[int, str] | None:
    """What this machine has for each of `count` devices, and how that is known; None where there is no such device.

    CPU devices share the machine's memory.
    """
    if layout.kind == "cuda":
        here = range(cards.detect().count)
        named = {int(name.partition("#")[0].partition(":")[2]) for name in layout.devices} & {*here}
        sizes = {index: torch.cuda.get_device_properties(index).total_memory for index in named or here}
        if not sizes:
            return None
        least = min(sizes, key=lambda index: sizes[index])
        which = "which is here" if len({*sizes.values()}) == 1 else "the smallest of the cards here"
        return sizes[least], f"{torch.cuda.get_device_name(least)}, {which}"
    text = "free on this machine" + (f", a share of {count}" if count > 1 else "")
    return free_memory(torch.device("cpu")) // count, text


def fullest(devices: Sequence[Device]) -> int:
    """Peak bytes of the fullest card; what several ranks or stages on one card hold adds up."""
    peaks: dict[str, int] = {}
    for device in devices:
        card = device.device.partition("#")[0]
        peaks[card] = peaks.get(card, 0) + device.peak
    return max(peaks.values())


def limit(devices: Sequence[Device], layout: Layout, room: int | None) -> Limit | None:
    """What each device has, `room` where that was stated, and how much of it a run can use; None where that is not
    known: a tenth is spared, and on GPUs what CUDA and NCCL take."""
    memory = (room, "as stated") if room is not None else own_memory(layout, len(devices))
    if memory is None:
        return None
    used = Counter(device.device.partition("#")[0] for device in devices)
    usable = room_in(memory[0])
    if layout.kind == "cuda":
        # Groups of NCCL: one of all ranks (and of the cards of one process, for copies), and those of a pipeline.
        pipes = 1 + torch_has("gradients through a group of their own") + (layout.data_shares > 1)
        groups = 1 + pipes * (layout.staged and layout.processes > 1)
        taken = CONTEXT * max(used.values()) + BUFFERS * groups * (len(used) > 1)
        usable = max(0.0, min(usable, memory[0] - taken))
    return Limit(memory[0], usable, memory[1])


def with_recompute(fake: FakeModel, layout: Layout, room: int | None) -> tuple[FakeModel, Layout]:
    """With `recompute=auto` decided as training would: of the first blocks as few as fit a GPU, else all."""

    def planned(count: int) -> tuple[FakeModel, Layout]:
        recipe = layout.recipe.replace(recompute=count > 0)
        check_processes(recipe, layout.processes)
        return FakeModel(recipe, fake.images, layout.kind, count), replace(layout, recipe=recipe)

    if layout.recipe.recompute != "auto":
        return fake, layout
    if layout.kind == "cpu":
        return planned(0)
    return planned(fewest(len(fake.runs), lambda count: may_fit(*planned(count), room)))


def without_recompute(fake: FakeModel, layout: Layout, cut: Cut | None) -> int | None:
    """Peak bytes of the fullest card if activations were kept; None where they are."""
    if not layout.recipe.recompute:
        return None
    recipe = layout.recipe.replace(recompute=False)
    kept, layout = FakeModel(recipe, fake.images, layout.kind), replace(layout, recipe=recipe)
    cut = cut and kept.cut(layout, cut.microbatches)
    return fullest(footprint(kept, layout, cut))


def fits(devices: Sequence[Device], limit: Limit | None) -> bool | None:
    """Whether every device has room; None where its memory is not known."""
    return None if limit is None else fullest(devices) <= limit.usable


def may_fit(fake: FakeModel, layout: Layout, room: int | None) -> bool:
    """Whether every device has room, or its memory is not known."""
    devices = footprint(fake, layout)
    return fits(devices, limit(devices, layout, room)) is not False


def in_pieces(fake: FakeModel, layout: Layout, room: int | None) -> Layout:
    """With a number in place of accumulate=auto: the first that fits, as training finds it; the last where none does,
    and 1 where that is not known, as on the CPU."""
    if layout.recipe.accumulate != "auto":
        return layout
    chosen = replace(layout, recipe=layout.recipe.replace(accumulate=1))
    for number in piece_counts(layout.recipe, layout.data_shares) if layout.kind == "cuda" else ():
        chosen = replace(layout, recipe=layout.recipe.replace(accumulate=number))
        if may_fit(fake, chosen, room):
            break
    return chosen


def advice(fake: FakeModel, layout: Layout, room: int) -> list[dict[str, Any]]:
    """Words that make the run fit, each with the peak that it leads to: first those that keep its maths."""
    recipe, found = layout.recipe, []
    ways: list[list[dict[str, Any]]] = [[{"accumulate": recipe.pieces * 2**n} for n in range(1, 10)]]
    ways += [[{"recompute": True}]] * (recipe.recompute is not True and recipe.graphs is not True)
    if recipe.traits.exchanges == "shards" and layout.kind == "cuda":
        ways.append([{"fsdp__offload": True}])
    for way in [*ways, [{"precision": "bf16"}]]:
        for changes in way:
            try:
                changed = lay_out(recipe.replace(**changes), layout.processes, layout.kind == "cuda")
                devices = footprint(FakeModel(changed.recipe, fake.images, layout.kind), changed)
            except RecipeError:
                continue
            if fits(devices, limit(devices, changed, room)):
                [(key, value)] = changes.items()
                found.append({"words": f"{key.replace('__', '.')}={value}".lower(), "peak": fullest(devices)})
                break
    return found


def disk(fake: FakeModel, layout: Layout) -> dict[str, int]:
    """Bytes of a checkpoint, of a weights file, and of a run folder when it is fullest."""
    resident = fake.resident(fake.model)
    weights = resident.parameters + saved_buffers(fake.model)
    state = {"model": weights, "optimizer": resident.optimizer, "ema": resident.ema}
    per_rank = sum(state.get(kind, 0) for kind in layout.recipe.traits.per_rank_state)
    checkpoint = sum(state.values()) + layout.processes * per_rank + _outer(resident, layout)
    # A new checkpoint is whole before an old one goes; last and best weights are beside them.
    folder = (layout.recipe.save.keep + 1) * checkpoint + 2 * weights
    return {"checkpoint": checkpoint, "weights": weights, "folder": folder}
