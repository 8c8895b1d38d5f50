"""A plugin: a model that computes an image in a given number of seconds on each rank."""

import os
import time

import torch
from torch import nn

from trainer import register_model
from trainer.telemetry import rank_watch

rank_watch.SHARE_WINDOW = 0.2
RANK = int(os.environ.get("RANK", "0"))
# Seconds per image of each rank.
EACH = [float(each) for each in os.environ["FAULTY_EACH"].split(",")]
# passes, and then of rank 1
AFTER, LATER = map(float, os.environ.get("FAULTY_LATER", "1e9,0").split(","))
passes = 0


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds * len(x)
        time.sleep(context.seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds / 3)
        return gradient, None


class Unlike(nn.Linear):
    def forward(self, x):
        global passes
        x = super().forward(x)
        if self.training and x.device.type != "meta" and sum(EACH):
            passes += 1
            x = Sleep.apply(x, LATER if RANK == 1 and passes > AFTER else EACH[RANK])
        return x


@register_model("unlike")
def unlike(num_classes, channels, image_size):
    inputs = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(),
        Unlike(inputs, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )
