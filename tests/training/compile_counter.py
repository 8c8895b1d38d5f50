"""A plugin that counts what is compiled, and compiles nothing: `plugin=tests.training.compile_counter`.

torch's tracer works as ever, with its guards, breaks and recompilations; the graphs that it makes run as they are. Each
is a line of the file TRAINER_TEST_COMPILED, from all ranks: a rank that ends does not come back to write anything.
"""

from __future__ import annotations

import functools
import json
import os

import torch
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx


def noted(graph, inputs):
    breaks = [reason for reason in counters["graph_break"]]
    dynamic = any(not isinstance(x, torch.Tensor) or any(isinstance(n, torch.SymInt) for n in x.shape) for x in inputs)
    note(training=torch.is_grad_enabled(), breaks=breaks, dynamic=dynamic)
    return graph.forward


def note(**what):
    with open(os.environ["TRAINER_TEST_COMPILED"], "a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK", "0"), **what}) + "\n")


def compiled(graph, inputs):
    """By torch's own compiler, whose cache is counted when a graph has run: it compiles the backward pass then."""
    run = compile_fx(graph, inputs)

    def and_noted(*args):
        out = run(*args)
        found = counters["aot_autograd"]
        note(caches={"hit": found["autograd_cache_hit"], "miss": found["autograd_cache_miss"]})
        return out

    return and_noted


backend = compiled if os.environ.get("TRAINER_TEST_BACKEND") == "inductor" else noted
torch.compile = functools.partial(torch.compile, backend=backend)
