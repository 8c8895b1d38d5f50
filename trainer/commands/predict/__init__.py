"""The command `predict`: label images in order with a trained model on all devices.

Nothing in this package trains.
"""

from trainer.commands.predict.predict_command import command
from trainer.commands.predict.python_api import predict

__all__ = ["command", "predict"]
