"""Predict the memory of a run on each device and on the host, and its size on disk."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from trainer.devices import cards
from trainer.memory.device import compute_usable_bytes, free_memory
from trainer.memory.measuring import Pass, Resident, count_bytes, count_saved_buffers
from trainer.memory.needs import BUCKET, count_gathered, count_teacher_bytes, measure_peak
from trainer.recipe.checks import count_weight_shards
from trainer.recipe.layout import Layout
from trainer.recipe.shares import split_rows
from trainer.versions import torch_has

# Approximate size in bytes of a process's CUDA context, with the kernels of torch and cuDNN.
CONTEXT = 600 * 2**20
# Approximate size in bytes of the buffers of one NCCL communicator on a GPU.
BUFFERS = 400 * 2**20
# Upper bound of the bytes for each element that local SGD averages at a time: 4 for a float32 copy,
# 8 for a float64 copy, and 8 for this copy times the weight of the rank.
AVERAGING = 20


class StagedModel(NamedTuple):
    """A model cut into stages.

    Attributes:
        residents: Size of each stage's resident tensors.
        passes: Memory of a micro-batch's pass through each stage.
        workers: Index of the worker of each stage.
        orders: Actions of each worker, in the order in which `needs.measure_peak` reads them.
    """

    residents: Sequence[Resident]
    passes: Sequence[Pass]
    workers: Sequence[int]
    orders: Sequence[Iterable[tuple[str, int, int]]]


class PlannedModel(Protocol):
    """Interface of a model whose tensors have shapes but no values."""

    model: nn.Module

    @property
    def teacher(self) -> int:
        """Size in bytes of the weights of distill.teacher; 0 without a teacher."""

    def resident(self, module: nn.Module) -> Resident:
        """Compute the size of the resident tensors of the model or of a stage."""

    def whole(self, rows: int, gradients: bool) -> Pass:
        """Measure a pass of `rows` images.

        With `gradients`, the gradients are allocated before the pass and do not count.
        """

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        """Return the size in bytes of the images and of the targets of a batch."""

    def unit_sizes(self) -> list[int]:
        """Return the result of `needs.compute_unit_sizes` for the units of FSDP."""

    def staged(
        self,
        layout: Layout,
        cut: Any,
    ) -> StagedModel:
        """Cut the model into stages at `cut`, or as the recipe says if `cut` is None."""


@dataclass(frozen=True)
class Device:
    """Predicted size in bytes of the tensors on one device.

    The fields from `parameters` to `buffers` are those of `Resident`, summed over the stages on the
    device. `teacher` is the size of the weights of distill.teacher.

    Attributes:
        device: Name of the device, with a number if several ranks or stages share it.
        images: Size of the images and targets of a batch.
        activations: Maximum size of the other tensors in a step, mostly activations. With FSDP it
            includes gathered parameters, and leaves out memory that counts as `gradients`.
        peak: Maximum size of all tensors in a step. It is less than the sum of the fields if
            gradients reuse the memory that activations have freed.
    """

    device: str
    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int
    images: int
    activations: int
    peak: int = 0
    teacher: int = 0


@dataclass(frozen=True)
class Limit:
    """Memory of a device.

    Attributes:
        bytes: Total number of bytes.
        usable: Number of bytes that a run can use.
        source: Phrase for messages that says where the number of bytes comes from.
    """

    bytes: int
    usable: float
    source: str


def footprint(
    model: PlannedModel,
    layout: Layout,
    cut: Any = None,
) -> list[Device]:
    """Predict the memory on each device of the layout.

    Args:
        model: The model.
        layout: Processes and devices of the run.
        cut: Where to cut a model into stages; None for the cut of the recipe.
    """
    if layout.staged:
        return _predict_stages(model, layout, model.staged(layout, cut))
    if layout.recipe.traits.exchanges == "copies":
        return _predict_copies(model, layout)
    all_rows = layout.shares or [layout.rows] * len(layout.devices)
    # Ranks with the same number of images need the same memory: predict it once for each number.
    by_rows = {rows: _predict_rank(model, layout, rows) for rows in {*all_rows}}
    return [
        _add_teacher(model, layout, by_rows[rows], name)
        for name, rows in zip(layout.devices, all_rows, strict=True)
    ]


def _add_teacher(
    model: PlannedModel,
    layout: Layout,
    device: Device,
    name: str,
) -> Device:
    """Return `device` with its name, and with the teacher's weights or a shard of them."""
    student = count_bytes(*model.model.parameters())
    shards = count_weight_shards(layout.recipe, layout.processes)
    teacher = count_teacher_bytes(model.teacher, student, shards)
    return replace(device, device=name, teacher=teacher, peak=device.peak + teacher)


def _predict_replica(
    model: PlannedModel,
    layout: Layout,
    rows: int,
) -> Device:
    """Predict the memory of a device that computes the whole model."""
    recipe = layout.recipe
    resident = model.resident(model.model)
    outer = _count_outer(resident, layout)
    resident = resident._replace(optimizer=resident.optimizer + outer)
    images = sum(model.batch_bytes(rows))
    is_parallel = layout.processes > 1
    exchanges = recipe.traits.exchanges
    activations = model.whole(rows, gradients=True).peak
    # The messages of all gradients may exist at the same time, but then the activations have been
    # freed. Without ddp.compress or graphs, gradients are views of their messages.
    if is_parallel and recipe.ddp.compress:
        activations = max(activations, resident.gradients // 2)
    elif is_parallel and recipe.graphs is True and exchanges == "gradients":
        activations = max(activations, resident.gradients)
    if recipe.pieces > 1 or (exchanges == "gradients" and is_parallel):
        # Gradients stay allocated from step to step, because passes or buckets add to them.
        working = resident.gradients + activations
    else:
        working = max(resident.gradients, model.whole(rows, gradients=False).peak)
    fixed = sum(resident) - resident.gradients
    peak = fixed + images + working
    if exchanges == "weights" and is_parallel:
        averaging = AVERAGING * min(BUCKET, resident.parameters // 4)
        peak = max(peak, fixed + averaging)
    return Device("", *resident, images, activations, peak)


def _count_outer(resident: Resident, layout: Layout) -> int:
    """Return the size in bytes of the outer optimizer of local SGD; 0 in other modes."""
    if layout.recipe.traits.exchanges == "weights" and layout.processes > 1:
        return layout.recipe.local_sgd.outer_copies * resident.gradients
    return 0


def _predict_rank(
    model: PlannedModel,
    layout: Layout,
    rows: int,
) -> Device:
    """Predict the memory of a rank, which has the whole model or a shard of it.

    A rank of FSDP has all buffers, and a shard of each parameter, gradient and optimizer tensor. A
    pass also gathers parameters: all of them with fsdp.reshard=false, otherwise those that
    `count_gathered` counts. Predictions are within 10 % of measured peaks.
    """
    recipe = layout.recipe
    shards = count_weight_shards(recipe, layout.processes)
    # A single shard is the whole model, as in ddp.
    if shards == 1:
        return _predict_replica(model, layout, rows)
    whole = model.resident(model.model)
    images = sum(model.batch_bytes(rows))
    resident = Resident(*(-(-size // shards) for size in whole))._replace(buffers=whole.buffers)
    if on_host(model, layout):
        ema = count_saved_buffers(model.model) if whole.ema else 0
        resident = Resident(0, 0, 0, ema, whole.buffers)
    gathered = whole.parameters
    if recipe.fsdp.reshard:
        gathered = count_gathered(model.unit_sizes())
    activations = model.whole(rows, gradients=True).peak
    fixed = sum(resident)
    if recipe.pieces > 1:
        # Gradients stay allocated from one pass to the next.
        passing = activations
    else:
        # Shards of gradients are allocated while activations are freed, and can reuse their memory.
        # So a pass needs only as much as the larger of the two.
        passing = max(activations, resident.gradients)
        fixed -= resident.gradients
    peak = fixed + images + gathered + passing
    activations = max(0, peak - sum(resident) - images)
    return Device("", *resident, images, activations, peak)


def on_host(model: PlannedModel, layout: Layout) -> int:
    """Return the size in bytes of a rank's shards that fsdp.offload keeps in host memory.

    The size is 0 in other modes, without offloading and without CUDA.
    """
    recipe = layout.recipe
    if recipe.traits.exchanges != "shards" or not recipe.fsdp.offload or layout.kind != "cuda":
        return 0
    whole = model.resident(model.model)
    return -(-(sum(whole) - whole.buffers) // count_weight_shards(recipe, layout.processes))


def _predict_copies(model: PlannedModel, layout: Layout) -> list[Device]:
    """Predict the memory of the devices of nn.DataParallel.

    The first device has the optimizer and all images. The following devices have copies of the
    weights during a pass. Without CUDA, nn.DataParallel runs the model on one device.
    """
    if layout.kind == "cpu":
        replica = _predict_replica(model, layout, layout.rows)
        return [_add_teacher(model, layout, replica, "cpu")]
    resident = model.resident(model.model)
    teacher = model.teacher
    devices: list[Device] = []
    counts = split_rows(layout.rows, len(layout.devices))
    for name, rows in zip(layout.devices, counts, strict=False):
        activations = model.whole(rows, gradients=True).peak
        image_rows = rows if devices else layout.rows
        images = sum(model.batch_bytes(image_rows))
        peak = sum(resident) + images + activations + teacher
        devices.append(Device(name, *resident, images, activations, peak, teacher))
        resident = resident._replace(optimizer=0, ema=0)
        teacher = 0
    return devices


def _predict_stages(
    model: PlannedModel,
    layout: Layout,
    staged: StagedModel,
) -> list[Device]:
    """Predict the memory of the devices of a model in stages."""
    image_bytes, target_bytes = model.batch_bytes(layout.rows)
    last = len(staged.residents) - 1
    devices = []
    for index, name in enumerate(layout.devices):
        worker = index % layout.workers
        stages = [stage for stage, owner in enumerate(staged.workers) if owner == worker]
        parts = zip(*(staged.residents[stage] for stage in stages), strict=True)
        resident = Resident(*map(sum, parts))
        activations = measure_peak(staged.orders[worker], staged.passes)
        # Replicas copy all gradients into one block to average them.
        if layout.data_shares > 1:
            activations = max(activations, resident.gradients)
        # The teacher is on the first device of a single process, or on the rank of the last stage.
        teacher_stage = 0 if layout.processes == 1 else last
        teacher = model.teacher if teacher_stage in stages else 0
        images = 0
        if 0 in stages or teacher:
            images += image_bytes
        if last in stages:
            images += target_bytes
        peak = sum(resident) + images + activations + teacher
        devices.append(Device(name, *resident, images, activations, peak, teacher))
    return devices


def own_memory(
    layout: Layout,
    count: int,
) -> tuple[int, str] | None:
    """Return the memory of each of `count` devices of this machine.

    CPU devices share the machine's free memory equally. If GPUs differ, the one with the least
    memory counts.

    Returns:
        (memory, source): the bytes of each device, and a phrase for messages that says where this
        number comes from. None if the layout uses GPUs and this machine has no GPU.
    """
    if layout.kind == "cuda":
        available = range(cards.detect().count)
        named = {int(_remove_rank(name).partition(":")[2]) for name in layout.devices}
        sizes = {
            index: torch.cuda.get_device_properties(index).total_memory
            for index in named & {*available} or available
        }
        if not sizes:
            return None
        smallest = min(sizes, key=sizes.__getitem__)
        return sizes[smallest], f"{torch.cuda.get_device_name(smallest)}, which is here"
    source = "free on this machine"
    if count > 1:
        source += f", divided by {count}"
    return free_memory(torch.device("cpu")) // count, source


def _remove_rank(device: str) -> str:
    """Return the name of a GPU without the number of a rank or stage: cuda:0 for cuda:0#1."""
    return device.partition("#")[0]


def fullest(devices: Sequence[Device]) -> int:
    """Return the peak in bytes of the fullest device. Ranks and stages on one GPU add up."""
    peaks = Counter[str]()
    for device in devices:
        peaks[_remove_rank(device.device)] += device.peak
    return max(peaks.values())


def find_limit(
    devices: Sequence[Device],
    layout: Layout,
    memory: int | None,
) -> Limit | None:
    """Return the memory of each device, and how many bytes a run can use.

    A tenth of the memory is reserved for fragmentation and libraries. If CUDA contexts and NCCL
    need more than this tenth, as on small GPUs, the memory that they need is reserved instead.

    Args:
        devices: Predicted memory of the devices.
        layout: Processes and devices of the run.
        memory: Memory of each device in bytes as stated by the user; None to use the memory of this
            machine's devices.

    Returns:
        The limit; None if the memory is not known.
    """
    source = "as stated"
    if memory is None:
        own = own_memory(layout, len(devices))
        if own is None:
            return None
        memory, source = own
    ranks_per_card = Counter(_remove_rank(device.device) for device in devices)
    usable = compute_usable_bytes(memory)
    if layout.kind == "cuda":
        reserved = CONTEXT * max(ranks_per_card.values())
        if len(ranks_per_card) > 1:
            # One NCCL communicator connects all ranks, or all GPUs of nn.DataParallel.
            groups = 1
            if layout.staged and layout.processes > 1:
                groups += 1
                if torch_has("gradients through a group of their own"):
                    groups += 1
                if layout.data_shares > 1:
                    groups += 1
            reserved += BUFFERS * groups
        usable = max(0.0, min(usable, memory - reserved))
    return Limit(memory, usable, source)


def assess(
    model: PlannedModel,
    layout: Layout,
    memory: int | None,
    cut: Any = None,
) -> tuple[list[Device], Limit | None, bool | None]:
    """Predict the memory of the devices and compare it with the memory that they have.

    Args:
        model: The model.
        layout: Processes and devices of the run.
        memory: Memory of each device in bytes as stated by the user; None to use the memory of this
            machine's devices.
        cut: Where to cut a model into stages; None for the cut of the recipe.

    Returns:
        (devices, limit, fits): the predicted memory of each device, the memory that each device
        has, and whether the prediction fits on all devices. `limit` and `fits` are None if the
        memory of the devices is not known.
    """
    devices = footprint(model, layout, cut)
    limit = find_limit(devices, layout, memory)
    fits = None
    if limit is not None:
        fits = fullest(devices) <= limit.usable
    return devices, limit, fits


def disk(
    model: PlannedModel,
    layout: Layout,
) -> dict[str, int]:
    """Return the size in bytes of a checkpoint, of a weights file, and of the whole run folder."""
    resident = model.resident(model.model)
    weights = resident.parameters + count_saved_buffers(model.model)
    state = {"model": weights, "optimizer": resident.optimizer, "ema": resident.ema}
    # In modes whose replicas differ, each rank also saves its own copy of these kinds of state.
    per_rank = sum(state.get(kind, 0) for kind in layout.recipe.traits.per_rank_state)
    outer = _count_outer(resident, layout)
    checkpoint = sum(state.values()) + layout.processes * per_rank + outer
    # An old checkpoint is deleted only when the new one is complete, so there is one more than
    # `save.keep` at times. The folder also contains files with the last and the best weights.
    folder = (layout.recipe.save.keep + 1) * checkpoint + 2 * weights
    return {"checkpoint": checkpoint, "weights": weights, "folder": folder}
