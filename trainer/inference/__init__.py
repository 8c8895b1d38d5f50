"""Labelling images with a trained model on every device at hand: in order, as a stream, losing nothing.

Nothing here trains.
Imports: errors, recipe, devices, processes, saving, tasks, data, launch, models, pool, telemetry, training.
"""

from trainer.inference.api import predict
from trainer.inference.command import command

__all__ = ["command", "predict"]
