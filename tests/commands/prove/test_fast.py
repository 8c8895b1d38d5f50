"""Figures of speed: which device and which link is named as slow, and what is said beside each figure."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.commands.prove.proofs import CARD, machine, runner
from trainer.commands.prove import fast
from trainer.commands.prove.check_runner import Devices, measured
from trainer.commands.prove.fast import checks, counts, slow_devices

CARDS, CPUS = machine("cuda", 4), machine("cpu", 2)


def rate(product):
    return {"product": product, "memory": [1.5e12] * 3, "precision": "bf16", "product_limit": 312e12}


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([[100, 101, 99], [98, 100, 97], [100, 99, 98], [97, 100, 100]], []),
        ([[100, 101, 99], [80, 81, 82], [100] * 3, [100] * 3], ["cuda:1 is slow: its products reach 81%"]),
        ([[100] * 3, [100] * 3, [100] * 3, [100, 70, 60]], ["cuda:3 is throttled: its products fall to 60%"]),
        ([[100, 60, 100], [100] * 3, [100] * 3, [100] * 3], []),  # another program's moment
    ],
)
def test_a_slow_or_throttled_card_is_named(rates, says):
    found = list(slow_devices(CARDS, rates, "products"))
    assert [line[: len(say)] for line, say in zip(found, says, strict=True)] == says
    mixed = Devices(CARDS.names, "cuda", (CARD, "Tesla T4", CARD, "L4"))
    kinds = [[v / 4 if rank % 2 else v for v in values] for rank, values in enumerate(rates)]
    assert not any("cuda:1" in line for line in slow_devices(mixed, kinds, "products")), "another kind may be slower"


def test_a_slow_card_is_wrong_with_what_to_type(tmp_path):
    answers = [rate([300e12] * 3), rate([200e12] * 3), rate([299e12] * 3), rate([300e12] * 3)]
    found = fast.rates(runner(tmp_path, CARDS, answers))
    assert found.status == "wrong" and re.match(r"cuda:1 .*matrix products .*\b67%", found.line)
    assert re.search(r"devices=\[cuda:0,cuda:2,cuda:3\].*nvidia-smi -q", found.todo)


def test_good_cards_stand_beside_their_limits(tmp_path):
    found = fast.rates(runner(tmp_path, CARDS, [rate([281e12, 280e12, 250e12])] * 4))
    assert found.status == "measured"
    assert re.search(r"\b280,000 GFLOP/s in bf16 \(90% .*\b1,500 GB/s \(74% ", found.line)
    assert found.figures["devices"][0]["product"] == {"median": 280e12, "low": 250e12, "high": 281e12}


def test_a_slow_way_is_named(tmp_path):
    ways = [{"1 to 0": [24e9, 25e9], "2 to 0": [25e9] * 2}, {"0 to 1": [25e9] * 2, "2 to 1": [9e9, 11e9]}]
    answers = [{"ways": part, "all_reduce": [20e9] * 3} for part in ways]
    found = fast.links(runner(tmp_path, CARDS, answers))
    assert found.status == "wrong" and "cuda:2 to cuda:1: 44%" in found.line
    assert "nvidia-smi topo -m" in found.todo and found.figures["slow"] == ["2 to 1"]
    answers[1]["ways"]["2 to 1"] = [9e9, 24e9]  # one slow moment is none of the link's
    found = fast.links(runner(tmp_path, CARDS, answers))
    assert found.status == "measured" and "all-reduce 20 GB/s" in found.line


def test_every_number_of_devices_up_to_all():
    assert [counts(devices) for devices in (CPUS, CARDS, machine("cuda", 6))] == [[1, 2], [1, 2, 4], [1, 2, 4, 6]]
    alone = [check.name for check in checks(machine("cuda", 1))]
    assert alone == ["rates", "speed resnet50 x1", "speed vit_b_16 x1"]


@pytest.mark.parametrize(("gibs", "batch"), [(80, 256), (24, 64), (15.8, 32), (8, 32)])
def test_a_batch_is_as_large_as_a_card_holds(gibs, batch, monkeypatch):
    cards = {"cuda:0": 80 * 2**30, "cuda:1": int(gibs * 2**30)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: SimpleNamespace(total_memory=cards[name]))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: False)
    assert fast.settings(machine("cuda", 2)) == {"batch": batch, "precision": "fp16", "compile": False}


def speed_of(tmp_path, name, ours, single=1000.0, verdict=None):
    """The check's outcome where each device of a bare loop has 1,000 images/s, and 1,100 without exchanging."""
    one = runner(tmp_path, CPUS, [{"speeds": [1000.0, 999.0, 1001.0], "alone": [1100.0] * 3}] * 2)
    one.outcomes["speed resnet20 x1"] = measured("", images_per_sec={"median": single})
    rates, words = iter(ours), []

    def train(name, typed, timed):
        words.append(typed)
        one.path(name).mkdir(parents=True)
        (one.path(name) / "steps.csv").write_text("step,samples_per_sec\n")
        return {"throughput": {"samples_per_sec": next(rates)}, "mfu": None, "verdict": verdict}

    one.train = train
    return next(check for check in checks(CPUS) if check.name == name).run(one), words


def test_images_a_second_stand_beside_a_bare_loop_and_one_device(tmp_path):
    verdict = {"step": {"optimizer": 0.02}}
    found, words = speed_of(tmp_path, "speed resnet20 x2", [1800.0, 1900.0, 2000.0], verdict=verdict)
    figures = ["1,900", "(1,800", "2,000);", "0.95", "(0.90", "1.00)", "1.90", "9%"]
    assert [word for word in found.line.split() if word[-1] != "/" and re.search(r"\d", word)] == figures
    assert found.figures["exposed_communication"] == pytest.approx(1 - 1000 / 1100)
    assert found.figures["batch"] == 128 and found.figures["step"] == {"optimizer": 0.02}
    assert len(words) == 3 and {"batch_size=128", "nproc=2", "max_steps=44"} <= {*words[0]}


def test_what_was_not_measured_is_not_told(tmp_path):
    found, _ = speed_of(tmp_path, "speed resnet20 x1", [1000.0] * 3)
    assert found.figures["times_one"] is None and found.figures["exposed_communication"] is None
    assert found.figures["step"] == {} and "times as fast as one" not in found.line
