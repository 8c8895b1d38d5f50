"""A plugin that counts compilations and compiles nothing: `plugin=tests.training.compile_counter`.

torch's tracer works as ever, with its guards, breaks and recompilations; the graphs that it makes
run as they are. Each is a line of the file TRAINER_TEST_COMPILED, from all ranks: a rank that ends
does not come back to write anything.
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
    dynamic = any(
        not isinstance(x, torch.Tensor) or any(isinstance(n, torch.SymInt) for n in x.shape)
        for x in inputs
    )
    note(training=torch.is_grad_enabled(), breaks=breaks, dynamic=dynamic)
    return graph.forward


def note(**what):
    with open(os.environ["TRAINER_TEST_COMPILED"], "a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK", "0"), **what}) + "\n")


def compiled(graph, inputs):
    """Compile with torch's own compiler.

    The cache is counted after a graph has run, because the backward pass is compiled then.
    """
    run = compile_fx(graph, inputs)

    def and_noted(*args):
        out = run(*args)
        actual = counters["aot_autograd"]
        note(caches={"hit": actual["autograd_cache_hit"], "miss": actual["autograd_cache_miss"]})
        return out

    return and_noted


backend = compiled if os.environ.get("TRAINER_TEST_BACKEND") == "inductor" else noted
torch.compile = functools.partial(torch.compile, backend=backend)
