"""How good the automatic pipeline is: against its bound, and against one process.

    python tests/benchmarks/pipeline_tuning.py             # ResNet-50, 64 px, batch 384, two ranks
    of one thread python tests/benchmarks/pipeline_tuning.py --batch 96

Everything happens in one pair of ranks, on synthetic images, forward and backward only, each figure
the fastest of interleaved rounds:

- auto: what `mode=pipeline` chooses by itself (cuts and micro-batches), with its schedule;
- bound: the rank with more work, which never waits: its stages' times are measured with the other
  rank idle;
- single: one rank of one thread with the whole model at the same micro-batch size, the other idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch

from tests.strategies import create_strategy
from trainer.data import Batch
from trainer.distributed.world_setup import create_world
from trainer.models.partition import trace
from trainer.models.zoo import build
from trainer.modes.base import Strategy
from trainer.modes.pipeline.tuning import Plan
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import load
from trainer.training.randomness import seed_everything


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        words = [
            "mode=pipeline",
            "threads=1",
            f"model.name={options.model}",
            "data.name=synthetic",
            f"batch_size={options.batch}",
            f"precision={options.precision}",
            f"data.image_size={options.size}",
        ]
        self.options, self.recipe = options, load(None, *words)
        keep_freed_memory()
        seed_everything(0, False)
        self.world = create_world(self.recipe)
        self.world.connect(600)
        shape = (options.batch, 3, options.size, options.size)
        self.pipeline = create_strategy(
            self.recipe,
            self.world,
            shape,
            classes=1000,
            say=self.say,
        )
        self.model = build(self.recipe.model, 1000, 3, options.size)
        self.pipeline.setup(self.model)
        self.model.to(memory_format=torch.channels_last)
        self.traced = trace(self.model)
        # `setup` has dropped them after its own trials.
        self.pipeline.model, self.pipeline.traced = self.model, self.traced

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def step(self, plan: Plan) -> float:
        """Seconds of a step of `plan`: the fastest after one to warm up."""
        return self.pipeline.trial(plan).seconds

    def alone(self, plan: Plan, repeats: int = 3) -> list[float]:
        """Return the seconds of one micro-batch, forward and backward, on each stage while the
        other stages are idle.
        """
        times: list[float] = []
        if self.world.is_main:
            stages = self.traced.stages(plan.cuts)
            inputs = self.pipeline.context.sample(self.options.batch // plan.microbatches)
            for stage in stages:
                stage.train()
                rounds = []
                for _ in range(1 + repeats):
                    begun = time.perf_counter()
                    out = stage(inputs)
                    parameters = list(stage.parameters())
                    expected = [inputs, *parameters] if inputs.requires_grad else parameters
                    torch.autograd.grad(out, expected, torch.ones_like(out))
                    rounds.append(time.perf_counter() - begun)
                times.append(statistics.median(rounds[1:]))
                inputs = out.detach().requires_grad_()
        self.world.barrier()
        return self.world.broadcast_object(times)

    def single(self, microbatches: int) -> float:
        """Return the seconds of a step in one process with one thread, with the same number of
        micro-batches.
        """
        seconds = 0.0
        if self.world.is_main:
            strategy = Strategy(self.pipeline.context)
            strategy.module = self.model.train()
            rows = self.options.batch // microbatches
            inputs = self.pipeline.context.sample(rows)
            batch = Batch(inputs, torch.zeros(rows, dtype=torch.int64), rows)
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                for _ in range(microbatches):
                    strategy.forward_backward(batch, 1 / self.options.batch)
                times.append(time.perf_counter() - begun)
            seconds = min(times[1:])
            self.model.zero_grad()
        self.world.barrier()
        return self.world.broadcast_object(seconds)


def report(bench: Bench) -> None:
    options = bench.options
    plan = bench.pipeline.plan
    autos = []
    singles = []
    for _ in range(options.rounds):
        autos.append(bench.step(plan))
        singles.append(bench.single(plan.microbatches))
    auto = statistics.median(autos)
    stages = bench.alone(plan)
    bound = plan.microbatches * max(sum(stages[0::2]), sum(stages[1::2]))
    ratios = [one / pipe for one, pipe in zip(singles, autos, strict=True)]
    bench.say(
        f"{options.model}, {options.size} px, batch {options.batch}: auto cuts after "
        f"{', '.join(plan.cuts)}, {plan.microbatches} micro-batches, {plan.schedule}: "
        f"{options.batch / auto:.1f} images/s\n  / one process      "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})   one process: "
        f"{options.batch / statistics.median(singles):.1f} images/s\n  / bound            "
        f"{bound / auto:.3f}   stages alone, ms: {', '.join(f'{1e3 * s:.1f}' for s in stages)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            *sys.argv,
        ]
        sys.exit(subprocess.run(command, check=False).returncode)
    report(Bench(options))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
