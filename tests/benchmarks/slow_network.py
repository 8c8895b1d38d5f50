"""What gradients sent as bf16 gain on a network of 1 Gbit/s.

    python tests/benchmarks/slow_network.py resnet50 --batch 32 --size 64
    python tests/benchmarks/slow_network.py vit_b_16 --batch 8 --size 224
    python tests/benchmarks/slow_network.py resnet50 --rate none       # loopback as fast as it is

Two ranks of one thread in a network namespace of their own, whose loopback `tc`'s token bucket holds down; it carries
what both ranks send, each of them as much as the other. Both have the model once for each variant, and take a step of
each in turn, forward, backward and optimizer: a round. A ratio is taken round by round, of the slower rank's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).parent.parent.parent
VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "ddp.compress=bf16": ["ddp.compress=bf16"],
}


def rank(options: argparse.Namespace) -> None:
    """Train; rank 0 prints the seconds of each round's steps."""
    import torch

    from tests.contexts import mode_of
    from trainer.data import Batch
    from trainer.models import zoo
    from trainer.processes.resources import locate
    from trainer.recipe import load

    words = ["mode=ddp", "devices=[cpu]", "threads=1", f"model.name={options.model}"]
    world = locate(load(None, *words))
    world.connect(60.0)
    rows = options.batch // world.size
    shape = (3, options.size, options.size)
    batch = Batch(
        torch.randn(rows, *shape).contiguous(memory_format=torch.channels_last), torch.arange(rows) % 10, rows
    )
    modes = {}
    for name, more in VARIANTS.items():
        recipe = load(None, *words, *more)
        torch.manual_seed(0)
        mode = mode_of(recipe, world, (rows, *shape))
        mode.setup(zoo.build(recipe.model, 10, 3, options.size))
        mode.train()
        modes[name] = mode, torch.optim.SGD(mode.named_parameters().values(), lr=1e-3, fused=True)
    rounds = []
    for _ in range(options.rounds + 1):
        seconds = []
        for mode, optimizer in modes.values():
            world.barrier()
            begun = time.perf_counter()
            mode.forward_backward(batch, 1 / options.batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seconds.append(time.perf_counter() - begun)
        rounds.append(world.max_(torch.tensor(seconds)).tolist())
    if world.is_main:
        print(json.dumps(rounds[1:]), flush=True)
    world.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", default="1gbit", help="as tc has it, or none")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
    held = f"tc qdisc add dev lo root tbf rate {options.rate} burst 256kb latency 50ms &&" * (options.rate != "none")
    launcher = "-m torch.distributed.run --nproc_per_node=2 --master_addr=127.0.0.1"
    command = f'ip link set lo up && {held} exec "$0" {launcher} "$@"'
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", command, sys.executable, __file__, *sys.argv[1:]],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"it ended with exit code {done.returncode}")
    rounds = json.loads(done.stdout.splitlines()[-1])
    print(f"{options.model}, {options.size} px, batch {options.batch}, {options.rate}, {len(rounds)} rounds")
    for index, name in enumerate(VARIANTS):
        ratios = [steps[0] / steps[index] for steps in rounds]
        seconds = statistics.median(steps[index] for steps in rounds)
        print(
            f"  {name}: {seconds:.3f} s a step, {statistics.median(ratios):.3f} times as fast "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
