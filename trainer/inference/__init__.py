"""Labelling images with a trained model on every device at hand: in order, as a stream, losing nothing."""

from trainer.inference.api import predict
from trainer.inference.command import command

__all__ = ["command", "predict"]
