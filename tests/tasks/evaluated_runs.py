"""Runs whose metrics are compared with those of another program."""

import numpy as np
import torch

from tests.command_line import QUIET
from tests.models.families import Recording
from trainer import train

SIZE = 8  # pixels per side of the images


class Rounded(Recording):
    """A model whose outputs are whole numbers, so most samples have several classes with the same
    score, as with bfloat16.
    """

    def forward(self, x):
        return self.fc(x.flatten(1)).round()


def train_and_evaluate(task, targets, names, folder, model):
    """Return the metrics of a run for validation images in uneven batches, and the model's outputs
    for them.
    """
    generator = np.random.default_rng(5)
    pixels = generator.integers(
        0,
        256,
        (len(targets), 3, SIZE, SIZE),
        dtype=np.uint8,
    )
    ready = (torch.from_numpy(pixels) / 255 - 0.5) / 0.25
    result = train(
        None,
        f"task.name={task}",
        *QUIET,
        "data.mean=[0.5,0.5,0.5]",
        "data.std=[0.25,0.25,0.25]",
        "batch_size=16",
        "epochs=1",
        "threads=1",
        "optimizer.lr=1e-9",
        "mode=single",
        model=model,
        output=str(folder),
        data=((pixels[:32], targets[:32]), (pixels, targets), names),
    )
    with torch.no_grad():
        outputs = model.eval()(ready).double().numpy()
    return result, outputs
