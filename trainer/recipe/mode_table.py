"""The properties of each mode, one row a mode: whatever depends on the mode asks for these, never for its name.

How a mode computes is its class in `trainer.modes`. A new mode is a row here and a class there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["single", "dp", "ddp", "split", "pipeline", "fsdp", "local_sgd", "hogwild"]
Processes = Literal["one", "many", "either"]
Exchange = Literal["nothing", "gradients", "shards", "copies", "activations", "weights"]


@dataclass(frozen=True)
class Traits:
    """One mode."""

    # When to take it, for README and guide; two lines, of one process and of several, where it can be either.
    when: tuple[str, ...]
    processes: Processes = "one"  # that train; `either` is the recipe's choice: see `Recipe.processes`
    many_devices: bool = False  # one process may drive several devices
    shares_devices: bool = False  # several processes may drive one device
    shared_memory: bool = False  # the weights are in memory that all processes share: the CPU's, of one machine
    # What goes between devices. Gradients are all-reduced in every step; shards of the weights are gathered, and of the
    # gradients reduced, block by block in every pass; copies of the model go out, and gradients come back, in every
    # pass; activations and their gradients go from stage to stage; weights are averaged every epoch or few steps.
    exchanges: Exchange = "nothing"
    staged: bool = False  # the model is cut into stages on several devices
    micro_batches: bool = False  # of which stages work on several at the same time
    reference: bool = False  # the mode that the others are compared with
    same_maths: bool = True  # as the reference, to float tolerance
    # Each process uses all samples of its own shard, rather than a share of every full global batch.
    every_sample: bool = False
    # What differs from process to process and is saved for each: model, optimizer, ema, scaler.
    per_rank_state: tuple[str, ...] = ()
    # Options of `checks.OPTIONS` that it cannot have, and why. All others work: a test tries every pair.
    refuses: dict[str, str] = field(default_factory=dict)
    refuses_processes: dict[str, str] = field(default_factory=dict)  # where it is over several of them

    @property
    def single_device(self) -> bool:
        """One process on one device."""
        return self.processes == "one" and not self.many_devices

    @property
    def uneven(self) -> bool:
        """The global batch may be divided into shards of different sizes."""
        return self.same_maths and not self.micro_batches

    @property
    def alike(self) -> bool:
        """All processes do the same work in a step: one that takes longer holds up the others for nothing."""
        return self.exchanges in ("gradients", "shards", "weights")

    @property
    def one_stage_at_a_time(self) -> bool:
        """The model is in stages, and while one works the others wait."""
        return self.staged and not self.micro_batches


DDP_GRADIENTS = "only ddp compresses gradients; use mode=ddp, or leave it out"
WHOLE_BATCH = "every stage sees all images, and its cuts balance the devices; use mode=ddp, or leave it out"

TRAITS: dict[str, Traits] = {
    "single": Traits(
        when=("one device. All other modes are tested against it",),
        reference=True,
        refuses={"shares": "one device computes all of every batch; use mode=ddp"},
    ),
    "dp": Traits(
        when=("to see how much slower `nn.DataParallel` is than `ddp`. Without GPUs it uses one device, and says so",),
        many_devices=True,
        exchanges="copies",
        refuses={
            "sync_bn": "nn.DataParallel's replicas live for one pass and cannot synchronise; use mode=ddp",
            "compile": "nn.DataParallel copies the module again for every pass; use mode=ddp",
            "compress": DDP_GRADIENTS,
            "graphs": "nn.DataParallel copies the model to other devices in every pass; use mode=ddp, or graphs=auto",
            "shares": "nn.DataParallel gives every device as many images; use mode=ddp",
        },
    ),
    "ddp": Traits(
        when=("**the default**: the model fits on one device, and there are several, on one machine or many",),
        processes="many",
        exchanges="gradients",
    ),
    "split": Traits(
        when=(
            "the model is too big for one device. One stage works at a time, so it is slower than one device would be",
        ),
        many_devices=True,
        exchanges="activations",
        staged=True,
        refuses={"compress": DDP_GRADIENTS, "shares": WHOLE_BATCH},
    ),
    "pipeline": Traits(
        when=(
            "like `split`, but on GPUs the stages work at the same time, on pieces of a batch (micro-batches)",
            "the model is too big for one device, and speed matters. More processes than stages make replicas",
        ),
        processes="either",
        many_devices=True,
        exchanges="activations",
        staged=True,
        micro_batches=True,
        refuses={
            "sync_bn": "a stage never holds two micro-batches of a step at once; "
            "pipeline.deferred_batch_norm=true keeps the running statistics of the whole mini-batch",
            "compress": DDP_GRADIENTS,
            "accumulate=auto": "it cuts batches into micro-batches already; use pipeline.microbatches=auto",
            "shares": WHOLE_BATCH,
        },
        refuses_processes={
            "graphs": "its stages wait for messages of each other within a step; type python -m trainer ... without "
            "torchrun and nproc=, or graphs=auto",
        },
    ),
    "fsdp": Traits(
        when=("the model, its gradients and optimizer do not fit on one device. If they do, `ddp` is faster",),
        processes="many",
        exchanges="shards",
        refuses={
            "muon": "it needs whole matrices, but a rank has only some of their rows; use adamw, or mode=ddp",
            "compress": DDP_GRADIENTS,
            "graphs": "ranks gather each other's weights within a pass; use mode=ddp, or graphs=auto",
        },
    ),
    "local_sgd": Traits(
        when=(
            "slow links between devices, or a model too small to fill a GPU. Weights are averaged every epoch, or "
            "every few steps",
        ),
        processes="many",
        shares_devices=True,
        exchanges="weights",
        same_maths=False,
        every_sample=True,
        per_rank_state=("model", "optimizer", "ema", "scaler"),
        refuses={
            "sync_bn": "its workers compute separately between averagings; use mode=ddp",
            "compress": DDP_GRADIENTS,
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
            "compress": DDP_GRADIENTS,
            "graphs": "its workers share weights that change within a step; use mode=local_sgd, or graphs=auto",
            "shares": "its workers never wait for each other, and a slow one holds up nobody; use mode=local_sgd",
        },
    ),
}
MODES = tuple(TRAITS)
