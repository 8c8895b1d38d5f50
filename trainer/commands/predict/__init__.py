"""Labelling images with a trained model on every device at hand: in order, as a stream, losing nothing.

Nothing here trains.
"""

from trainer.commands.predict.predict_command import command
from trainer.commands.predict.python_api import predict

__all__ = ["command", "predict"]
