"""Labelling images with a trained model on every device at hand: in order, as a stream, losing nothing.

Nothing here trains.
Imports: errors, recipe, devices, processes, saving, tasks, data, launch, models, pool, telemetry, training.
"""

from trainer.commands.predict.predict_command import command
from trainer.commands.predict.python_api import predict

__all__ = ["command", "predict"]
