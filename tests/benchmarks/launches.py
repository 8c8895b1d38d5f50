"""Operators and bytes of a training step in each mode, beside a bare PyTorch loop's: what a GPU would be asked for.

    python tests/benchmarks/launches.py [--models resnet50 vit_b_16] [--modes single ddp ...] [--size 32] [--batch 8]

Counted where torch dispatches to a device's kernels, on the CPU and on small images: each operator that computes is a
launch (views and allocations are none), whatever the shapes. Modes run through the command line; a step of theirs is
counted on rank 0, of 1f1b on its stage alone, and away from where ranks meet, which is once a second. A bare loop is of
the same kind: DDP beside ddp, two micro-batches beside pipelines. `loop` is what neither the mode nor the optimizer
asks for: finishing the images, adding up the loss. A fused optimizer is one operator here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MODES = {
    "single": ["mode=single"],
    "dp": ["mode=dp", "devices=[cpu,cpu]"],
    "ddp": ["mode=ddp", "nproc=2"],
    "split": ["mode=split", "devices=[cpu,cpu]"],
    "streams": ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.microbatches=2"],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.schedule=1f1b", "pipeline.microbatches=2"],
    "local_sgd": ["mode=local_sgd", "nproc=2"],
    "hogwild": ["mode=hogwild", "nproc=2", "devices=[cpu]"],
}
# What a bare loop does in its place: torch's own DDP, or as many micro-batches. Else one device and one batch.
BARE = {"ddp": {"replicated": True}, "streams": {"parts": 2}, "1f1b": {"parts": 2}}
PARTS = ("loop", "mode", "optimizer")
STEP = 3  # which is counted: by then what is made once is there


class Counter(TorchDispatchMode):
    """Operators that compute, and the bytes that they read and write, by the part of a step that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.found = "loop", {name: [0, 0] for name in (*PARTS, "batch_norm")}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [value.alias_info for value in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        if not views and "empty" not in func._schema.name and func.namespace == "aten":
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            size = sum(x.numel() * x.element_size() for x in tensors)
            parts = [self.part] + ["batch_norm"] * ("batch_norm" in func._schema.name)
            for part in parts:
                self.found[part][0] += 1
                self.found[part][1] += size
        return out


def install() -> None:
    """As a plugin: count one step of this rank's, and write it down."""
    from trainer.modes import STRATEGIES
    from trainer.modes.pipeline.ranks import ProcessPipeline
    from trainer.optim.optimization import Updater
    from trainer.training.rank_sync import RankSync

    counter, steps, plain, exchange = Counter(), [0], Updater.step, RankSync.exchange

    def exchange_seldom(self: Any, done: int, pace: float, *args: Any, **kwargs: Any) -> Any:
        return exchange(self, done, 1 / (2 * STEP), *args, **kwargs)

    def counted_pass(run: Any) -> Any:
        def forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            before, counter.part = counter.part, "mode"
            try:
                return run(self, *args, **kwargs)
            finally:
                counter.part = before

        return forward_backward

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        counter.part = "optimizer"
        out = plain(self, *args, **kwargs)
        counter.part = "loop"
        if steps[0] == STEP - 1:
            counter.__enter__()
        elif steps[0] == STEP:
            counter.__exit__(None, None, None)
            if os.environ.get("RANK", "0") == "0":
                Path(os.environ["TRAINER_LAUNCHES"]).write_text(json.dumps(counter.found))
        return out

    Updater.step, RankSync.exchange = step, exchange_seldom  # type: ignore[method-assign]
    for kind in {*STRATEGIES.values(), ProcessPipeline}:
        if "forward_backward" in vars(kind):
            kind.forward_backward = counted_pass(kind.forward_backward)  # type: ignore[method-assign]


def bare(model: str, size: int, batch: int, parts: int = 1, replicated: bool = False) -> dict[str, list[int]]:
    """The loop of every tutorial, with a fused optimizer."""
    from trainer.models.zoo import build
    from trainer.recipe import ModelRecipe

    network: torch.nn.Module = build(ModelRecipe(name=model), 10, 3, size)
    if replicated:  # one rank's work is that of any
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        network = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, labels, counter = torch.randn(batch, 3, size, size), torch.arange(batch) % 10, Counter()
    for number in range(STEP):
        if number == STEP - 1:
            counter.__enter__()
        counter.part = "mode"
        for part, answers in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            torch.nn.functional.cross_entropy(network(part), answers).backward()
        counter.part = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    counter.__exit__(None, None, None)
    if replicated:
        torch.distributed.destroy_process_group()
    return counter.found


def counted(model: str, mode: str, size: int, batch: int) -> dict[str, list[int]]:
    """A step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"model.name={model}", "data.name=synthetic", f"data.image_size={size}", "data.channels=3", "epochs=1"]
        words += [f"batch_size={batch}", f"data.samples={8 * batch}", "data.val_samples=8", "optimizer.name=sgd"]
        words += ["optimizer.lr=0.01", "optimizer.momentum=0.9", "channels_last=false", "logging.verdict=false"]
        words += ["logging.tensorboard=false", "logging.progress=false", "data.workers=0", "threads=1"]
        words += ["plugin=tests.benchmarks.launches", f"output={folder}/run", "logging.every_steps=100"]
        env = {**os.environ, "TRAINER_LAUNCHES": f"{folder}/found"}
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words, *MODES[mode]], env=env, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        found: dict[str, list[int]] = json.loads(Path(f"{folder}/found").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="images of a step over all ranks")
    options = parser.parse_args()
    print("| model | mode | operators | a bare loop's | ratio | BatchNorm's | optimizer's | loop's own | MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in options.models:
        loops: dict[str, dict[str, list[int]]] = {}
        for mode in options.modes:
            kind = BARE.get(mode, {})
            if str(kind) not in loops:
                loops[str(kind)] = bare(model, options.size, options.batch, **kind)
            found, beside = counted(model, mode, options.size, options.batch), loops[str(kind)]
            total, size = (sum(found[part][n] for part in PARTS) for n in (0, 1))
            other = sum(beside[part][0] for part in PARTS)
            shares = [found[part][0] for part in ("batch_norm", "optimizer", "loop")]
            row = [model, mode, total, other, f"{total / other:.2f}", *shares, size >> 20]
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
elif "TRAINER_LAUNCHES" in os.environ:
    install()
