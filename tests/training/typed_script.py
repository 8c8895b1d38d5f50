"""A script of a user of the Python API, which `test_api.py` checks with `mypy --strict`; it is
never run.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainer
from trainer import (
    DevicePool,
    EpochReport,
    Recipe,
    Result,
    Task,
    errors,
    load_recipe,
    predict,
    train,
)


def stop_early(report: EpochReport) -> bool:
    return report.metrics["top1"] < 0.99


@trainer.register_model("tiny")
def tiny(num_classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))


@trainer.register_task("cubed")
class Cubed(Task):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 3).mean()


def main() -> float | None:
    recipe: Recipe = load_recipe("digits", "optimizer.lr=0.05", epochs=1)
    first: Result = train(recipe, on_epoch=stop_early)
    images = torch.rand(64, 1, 8, 8)
    labels = torch.arange(64) % 10
    data = TensorDataset(images, labels)
    net = tiny(10, 1, 8)
    try:
        second = train(
            model=net,
            data=(data, data),
            epochs=2,
            mode="ddp",
            nproc=2,
            on_epoch=stop_early,
            output=Path("runs/x"),
        )
    except errors.NotFiniteError as error:
        print(error, error.code)
        return first["best_top1"]
    outputs: Tensor = predict(net, images, devices=["cpu"])
    print(
        outputs.shape,
        second["throughput"],
        trainer.evaluate(str(second["output"])),
        DevicePool.__doc__,
    )
    assert_type(second["val_top1"], float | None)
    print(trainer.trian)  # type: ignore[attr-defined]  # a name that is not there is none of any kind
    return second["val_top1"]
