"""How good the automatic pipeline is: against every other cut, against its bound, against one process.

    python tests/benchmarks/pipeline_tuning.py                    # ResNet-50, 64 px, batch 384, two ranks of one thread
    python tests/benchmarks/pipeline_tuning.py --batch 96 --no-sweep

Everything happens in one pair of ranks, on synthetic images, forward and backward only, each figure the fastest of
interleaved rounds:

- auto: what `mode=pipeline` chooses by itself (cuts and micro-batches), with its schedule;
- sweep: all cuts with 35 to 65 % of the cost before them x micro-batches x gpipe, 1f1b; the best five again;
- bound: the rank with more work, which never waits: its stages' times are measured with the other rank idle;
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

from tests.contexts import mode_of
from trainer.data import Batch
from trainer.models.balance import block_costs
from trainer.models.partition import trace
from trainer.models.zoo import build
from trainer.modes.base import Strategy
from trainer.modes.pipeline import stages as staging
from trainer.modes.pipeline.tuning import Plan
from trainer.processes.resources import keep_freed_memory, locate
from trainer.recipe import load
from trainer.training.randomness import seed_everything


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        words = ["mode=pipeline", "threads=1", f"model.name={options.model}", "data.name=synthetic"]
        words += [f"batch_size={options.batch}", f"precision={options.precision}", f"data.image_size={options.size}"]
        self.options, self.recipe = options, load(None, *words)
        keep_freed_memory()
        seed_everything(0, False)
        self.world = locate(self.recipe)
        self.world.connect(600)
        shape = (options.batch, 3, options.size, options.size)
        self.pipeline = mode_of(self.recipe, self.world, shape, classes=1000, say=self.say)
        self.model = build(self.recipe.model, 1000, 3, options.size)
        self.pipeline.setup(self.model)
        self.model.to(memory_format=torch.channels_last)
        self.traced = trace(self.model)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def step(self, plan: Plan) -> float:
        """Seconds of a step of `plan`: the fastest after one to warm up."""
        return self.pipeline.trial(self.traced, plan).seconds

    def alone(self, plan: Plan, repeats: int = 3) -> list[float]:
        """Seconds of one micro-batch, forward and backward, on each stage while nobody else works."""
        times: list[float] = []
        if self.world.is_main:
            stages = self.traced.stages(plan.cuts)
            inputs = self.pipeline.sample(self.options.batch // plan.microbatches)
            for stage in stages:
                stage.train()
                rounds = []
                for _ in range(1 + repeats):
                    begun = time.perf_counter()
                    out = stage(inputs)
                    parameters = list(stage.parameters())
                    wanted = [inputs, *parameters] if inputs.requires_grad else parameters
                    torch.autograd.grad(out, wanted, torch.ones_like(out))
                    rounds.append(time.perf_counter() - begun)
                times.append(statistics.median(rounds[1:]))
                inputs = out.detach().requires_grad_()
        self.world.barrier()
        return self.world.broadcast_object(times)

    def single(self, microbatches: int) -> float:
        """Seconds of a step of one process and one thread, in as many pieces."""
        seconds = 0.0
        if self.world.is_main:
            strategy = Strategy(self.pipeline.context)
            strategy.module = self.model.train()
            rows = self.options.batch // microbatches
            batch = Batch(self.pipeline.sample(rows), torch.zeros(rows, dtype=torch.int64), rows)
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

    def sweep(self) -> dict[Plan, float]:
        """The five best of all, each measured again."""
        counts = [m for m in (4, 8, 12, 16, 24) if self.options.batch % m == 0]
        costs = block_costs(self.traced, self.pipeline.sample(self.options.batch // counts[len(counts) // 2]))
        total = sum(cost.forward + cost.backward for cost in costs)
        before, cuts = 0.0, []
        for cost, cut in zip(costs, self.traced.cuts, strict=False):
            before += cost.forward + cost.backward
            if 0.35 <= before / total <= 0.65:
                cuts.append(cut)
        cuts = self.world.broadcast_object(cuts)
        every = [Plan((cut,), m, schedule) for cut in cuts for m in counts for schedule in ("gpipe", "1f1b")]
        self.say(f"sweep: {len(every)} ways, cuts after {', '.join(cuts)}")
        usual, staging.TRIAL_STEPS = staging.TRIAL_STEPS, (2, 2)  # a first look; the best are measured as usual
        found = {way: self.step(way) for way in every}
        staging.TRIAL_STEPS = usual
        best = sorted(found, key=found.__getitem__)[:5]
        again = {way: [found[way]] for way in best}
        for _ in range(self.options.rounds):
            for way in best:
                again[way].append(self.step(way))
        return {way: statistics.median(times[1:]) for way, times in again.items()}


def report(bench: Bench) -> None:
    options, plan = bench.options, bench.pipeline.plan
    autos, singles = [], []
    for _ in range(options.rounds):
        autos.append(bench.step(plan))
        singles.append(bench.single(plan.microbatches))
    auto = statistics.median(autos)
    stages = bench.alone(plan)
    bound = plan.microbatches * max(sum(stages[0::2]), sum(stages[1::2]))
    ratios = [one / pipe for one, pipe in zip(singles, autos, strict=True)]
    bench.say(
        f"{options.model}, {options.size} px, batch {options.batch}: auto cuts after {', '.join(plan.cuts)}, "
        f"{plan.microbatches} micro-batches, {plan.schedule}: {options.batch / auto:.1f} images/s\n"
        f"  / one process      {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        f"   one process: {options.batch / statistics.median(singles):.1f} images/s\n"
        f"  / bound            {bound / auto:.3f}   stages alone, ms: {', '.join(f'{1e3 * s:.1f}' for s in stages)}"
    )
    if options.sweep:
        best = bench.sweep()
        again = statistics.median(bench.step(plan) for _ in range(options.rounds))
        for way, seconds in sorted(best.items(), key=lambda item: item[1]):
            bench.say(
                f"  {options.batch / seconds:6.1f} images/s  after {way.cuts[0]}, {way.microbatches}, {way.schedule}"
            )
        bench.say(f"  / best of sweep    {min(best.values()) / again:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)
    report(Bench(options))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
