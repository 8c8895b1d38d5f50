"""Loaded once into the process that loader workers are forked from, so that they start in milliseconds.

That process must outlive a SIGTERM to the whole group (torchrun sends one to each rank's): the rank still finishes its
step and saves. It is started with the signal blocked; from here on, it and what is forked from it ignore it.
"""

import signal

import torch
import torchvision

import trainer.data.photos

__all__ = ["torch", "torchvision", "trainer"]

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
