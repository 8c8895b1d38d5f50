"""Table of the properties of each mode, which code reads instead of the name of the mode.

To add a mode, add a row here, and to `trainer.modes.STRATEGIES` the class that runs its forward and
backward passes.
"""

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["single", "dp", "ddp", "split", "pipeline", "fsdp", "local_sgd", "hogwild"]
Processes = Literal["one", "many", "either"]
Exchange = Literal["nothing", "gradients", "shards", "copies", "activations", "weights"]


@dataclass(frozen=True)
class Traits:
    """Properties of a mode.

    Attributes:
        when: when to use the mode, for README and guide. A mode that can run in one process or in
            several has one sentence for each.
        processes: how many processes train: "one", "many" or "either". If it is "either",
            `Recipe.processes` depends on the pipeline schedule, if the recipe sets one.
        many_devices: True if one process may use several devices.
        shares_devices: True if several processes may use the same device.
        shared_memory: True if all processes share the weights in the CPU memory of one machine.
        exchanges: data that is sent between devices. "gradients" are all-reduced in every step.
            "shards" of weights are gathered, and gradients reduce-scattered, for every block in
            every pass. "copies" of the model are sent, and gradients returned, in every pass.
            "activations" and their gradients go from stage to stage. "weights" are averaged every
            epoch or every few steps.
        staged: True if the model is divided into stages on several devices.
        micro_batches: True if stages work on several micro-batches at the same time.
        sections: sections of the recipe that only some modes read, including this mode, such as
            "ddp". Modes that do not name such a section ignore it.
        reference: True for the mode with which all other modes are compared.
        same_maths: True if the results equal those of the reference, within float tolerance.
        every_sample: True if each process uses all samples of its own shard of the data, rather
            than a local batch of every full global batch.
        per_rank_state: parts of the state that differ between processes, so that each process saves
            its own: "model", "optimizer", "ema", "scaler".
        refuses: why the mode does not support an option, by the option's name in `checks.OPTIONS`.
            All other options work; a test tries every pair of mode and option.
    """

    when: tuple[str, ...]
    processes: Processes = "one"
    many_devices: bool = False
    shares_devices: bool = False
    shared_memory: bool = False
    exchanges: Exchange = "nothing"
    staged: bool = False
    micro_batches: bool = False
    sections: tuple[str, ...] = ()
    reference: bool = False
    same_maths: bool = True
    every_sample: bool = False
    per_rank_state: tuple[str, ...] = ()
    refuses: dict[str, str] = field(default_factory=dict)

    @property
    def single_device(self) -> bool:
        """Return whether the mode uses one process on one device."""
        return self.processes == "one" and not self.many_devices

    @property
    def alike(self) -> bool:
        """Return whether all processes do the same work, so that a slow process delays all."""
        return self.exchanges in ("gradients", "shards", "weights")

    @property
    def exchanges_in_passes(self) -> bool:
        """Return whether several processes exchange messages in forward and backward passes."""
        return self.exchanges in ("gradients", "shards", "activations")

    @property
    def one_stage_at_a_time(self) -> bool:
        """Return whether only one stage works at a time."""
        return self.staged and not self.micro_batches


WHOLE_BATCH = (
    "every stage sees all images, and its cuts balance the devices; use mode=ddp, or leave it out"
)
ONE_LAYER = "it trains one layer, which every device holds; use mode=ddp"
WHOLE_MATRICES = (
    "it needs whole matrices, but a rank has only some of their rows; use adamw, or mode=ddp"
)

TRAITS = {
    "single": Traits(
        when=("one device. All other modes are tested against it",),
        reference=True,
        refuses={"shares": "one device computes all of every batch; use mode=ddp"},
    ),
    "dp": Traits(
        when=(
            "to see how much slower `nn.DataParallel` is than `ddp`. Without GPUs it uses one "
            "device, and says so",
        ),
        many_devices=True,
        exchanges="copies",
        refuses={
            "sync_bn": "nn.DataParallel's replicas live for one pass and cannot synchronize; use "
            "mode=ddp",
            "compile": "nn.DataParallel copies the module again for every pass; use mode=ddp",
            "graphs": "nn.DataParallel copies the model to other devices in every pass; use "
            "mode=ddp, or graphs=auto",
            "shares": "nn.DataParallel gives every device as many images; use mode=ddp",
        },
    ),
    "ddp": Traits(
        when=(
            "**the default**: the model fits on one device, and there are several, on one machine "
            "or many",
        ),
        processes="many",
        exchanges="gradients",
        sections=("ddp",),
    ),
    "split": Traits(
        when=(
            "the model is too big for one device. One stage works at a time, so it is slower than "
            "one device would be",
        ),
        many_devices=True,
        exchanges="activations",
        staged=True,
        sections=("pipeline",),
        refuses={"shares": WHOLE_BATCH, "probe": ONE_LAYER},
    ),
    "pipeline": Traits(
        when=(
            "like `split`, but on GPUs the stages work at the same time, on pieces of a batch "
            "(micro-batches)",
            "the model is too big for one device, and speed matters. More processes than stages "
            "make replicas",
        ),
        processes="either",
        many_devices=True,
        exchanges="activations",
        staged=True,
        sections=("pipeline",),
        micro_batches=True,
        refuses={
            "sync_bn": "a stage never holds two micro-batches of a step at once; "
            "pipeline.deferred_batch_norm=true keeps the running statistics of the whole "
            "mini-batch",
            "accumulate=auto": "it cuts batches into micro-batches already; use "
            "pipeline.microbatches=auto",
            "shares": WHOLE_BATCH,
            "probe": ONE_LAYER,
        },
    ),
    "fsdp": Traits(
        when=(
            "the model, its gradients and optimizer do not fit on one device. If they do, `ddp` is "
            "faster",
        ),
        processes="many",
        exchanges="shards",
        sections=("fsdp",),
        refuses={"probe": ONE_LAYER},
    ),
    "local_sgd": Traits(
        when=(
            "slow links between devices, or a model too small to fill a GPU. Weights are averaged "
            "every epoch, or every few steps",
        ),
        processes="many",
        shares_devices=True,
        exchanges="weights",
        sections=("local_sgd",),
        same_maths=False,
        every_sample=True,
        per_rank_state=("model", "optimizer", "ema", "scaler"),
        refuses={
            "sync_bn": "its workers compute separately between averagings; use mode=ddp",
        },
    ),
    "hogwild": Traits(
        when=("several CPU workers on one small model, which never wait for each other",),
        processes="many",
        shares_devices=True,
        shared_memory=True,
        same_maths=False,
        every_sample=True,
        per_rank_state=("optimizer", "scaler"),
        refuses={
            "sync_bn": "its workers never wait for each other; use mode=ddp",
            "graphs": "its workers share weights that change within a step; use mode=local_sgd, or "
            "graphs=auto",
            "shares": "its workers never wait for each other, and a slow one holds up nobody; use "
            "mode=local_sgd",
            "verify": "its workers share weights that change within a step; use mode=local_sgd",
        },
    ),
}
MODES = tuple(TRAITS)
