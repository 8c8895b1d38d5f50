"""Modes for tests of parts: with a task of a few classes, on inputs of any shape."""

import torch

from trainer import tasks
from trainer.data import Example, TensorSpec
from trainer.modes import Context, create


def context(recipe, world, shape, classes=10, dtype=torch.float32, **more):
    """What a mode is given for micro-batches of inputs (N, ...)."""
    rows, *inside = shape
    example = Example(rows, TensorSpec(tuple(inside), dtype))
    return Context(recipe, world, tasks.create(recipe, tuple(map(str, range(classes)))), example, **more)


def mode_of(recipe, world, shape, **more):
    """The recipe's mode, without a model yet."""
    return create(context(recipe, world, shape, **more))
