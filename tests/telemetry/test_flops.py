"""Counts of operations and peaks of cards, held against published figures."""

import pytest
import torch
import torchvision

from trainer.models.shapes import copy_to_meta
from trainer.telemetry import flops


def count(model, shape):
    return flops.count_training_flops(copy_to_meta(model), shape)


def test_flops_of_resnet50():
    # Three passes of 4.09 billion multiply-adds (torchvision's table), two operations each.
    actual = count(torchvision.models.resnet50(), (1, 3, 224, 224))
    assert actual == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "capability", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", (9, 0), 989),
        ("NVIDIA H100 80GB HBM3", "tf32", (9, 0), 495),
        ("NVIDIA A100-SXM4-80GB", "fp32", (8, 0), 19.5),
        ("NVIDIA L40", "bf16", (8, 9), 181),  # not L4's
        ("Tesla T4", "tf32", (7, 5), 8.1),  # The card has no TF32 and computes in fp32.
        ("NVIDIA GeForce RTX 4090", "bf16", (8, 9), 165.2),  # adding up in fp32
        ("NVIDIA H100 NVL", "bf16", (9, 0), 835.5),
        ("NVIDIA B200", "bf16", (10, 0), 2250),
        ("Tesla V100-SXM2-16GB", "bf16", (7, 0), None),
        ("NVIDIA T400", "fp16", (7, 5), None),
        ("NVIDIA RTX A1000", "fp16", (8, 6), None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", (8, 0), None),
    ],
)
def test_peaks_are_of_the_very_card_and_precision(monkeypatch, name, precision, capability, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    peak = flops.look_up_peak_flops(torch.device("cuda", 0), precision)
    assert peak == (None if tflops is None else pytest.approx(1e12 * tflops))
    assert flops.look_up_peak_flops(torch.device("cpu"), precision) is None


def test_training_is_three_forward_passes():
    # Two operations for each weight of a linear layer and each of four images.
    assert count(torch.nn.Linear(5, 7), (4, 5)) == 3 * 2 * 4 * 5 * 7


def test_frozen_layers_have_no_backward_pass():
    model = torchvision.models.resnet18()
    shape = (2, 3, 64, 64)
    forward = count(model, shape) // 3
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    head = 2 * 2 * 512 * 1000  # Two images, two operations each.
    assert count(model, shape) == forward + head
    model.layer4.requires_grad_(True)
    block = [
        3 * 3 * 256 * 512,
        3 * 3 * 512 * 512,
        256 * 512,
        3 * 3 * 512 * 512,
        3 * 3 * 512 * 512,
    ]
    layer4 = 2 * 2 * 2 * 2 * sum(block)  # The maps of this layer are 2 x 2 pixels.
    inputs = 2 * 2 * 2 * 2 * (block[0] + block[2])  # gradients that nobody asks for
    assert count(model, shape) == forward + 2 * head + 2 * layer4 - inputs
