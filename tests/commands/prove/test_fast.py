"""Measured speeds: the device or link that is reported as slow, and the remark on each figure."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.commands.prove.proofs import CARD, machine, runner
from trainer.commands.prove import fast
from trainer.commands.prove.check_runner import Devices, measured
from trainer.commands.prove.fast import find_slow_devices, list_checks, list_counts

CARDS = machine("cuda", 4)
CPUS = machine("cpu", 2)


def rate(product):
    return {
        "product": product,
        "memory": [1.5e12] * 3,
        "precision": "bf16",
        "product_limit": 312e12,
    }


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([[100, 101, 99], [98, 100, 97], [100, 99, 98], [97, 100, 100]], []),
        (
            [[100, 101, 99], [80, 81, 82], [100] * 3, [100] * 3],
            [r"cuda:1 .*\bslow: .*\bproducts .*\b81%"],
        ),
        (
            [[100] * 3, [100] * 3, [100] * 3, [100, 70, 60]],
            [r"cuda:3 .*\bthrottled: .*\bproducts .*\b60%"],
        ),
        ([[100, 60, 100], [100] * 3, [100] * 3, [100] * 3], []),  # another program's moment
    ],
)
def test_a_slow_or_throttled_card_is_named(rates, says):
    actual = list(find_slow_devices(CARDS, rates, "products"))
    assert all(re.match(say, line) for line, say in zip(actual, says, strict=True))
    mixed = Devices(CARDS.names, "cuda", (CARD, "Tesla T4", CARD, "L4"))
    kinds = [[v / 4 if rank % 2 else v for v in values] for rank, values in enumerate(rates)]
    assert not any("cuda:1" in line for line in find_slow_devices(mixed, kinds, "products")), (
        "another kind may be slower"
    )


def test_a_slow_card_is_wrong_with_what_to_type(tmp_path):
    answers = [
        rate([300e12] * 3),
        rate([200e12] * 3),
        rate([299e12] * 3),
        rate([300e12] * 3),
    ]
    measured_rates = fast.measure_rates(runner(tmp_path, CARDS, answers))
    assert measured_rates.status == "wrong" and re.match(
        r"cuda:1 .*matrix products .*\b67%", measured_rates.line
    )
    assert re.search(r"devices=\[cuda:0,cuda:2,cuda:3\].*nvidia-smi -q", measured_rates.todo)


def test_speeds_of_good_cards_are_compared_with_their_limits(tmp_path):
    measured_rates = fast.measure_rates(
        runner(
            tmp_path,
            CARDS,
            [rate([281e12, 280e12, 250e12])] * 4,
        )
    )
    assert measured_rates.status == "measured"
    assert re.search(r"\b280,000 GFLOP/s in bf16 \(90% .*\b1,500 GB/s \(74% ", measured_rates.line)
    assert measured_rates.figures["devices"][0]["product"] == {
        "median": 280e12,
        "low": 250e12,
        "high": 281e12,
    }


def test_a_slow_way_is_named(tmp_path):
    ways = [
        {"1 to 0": [24e9, 25e9], "2 to 0": [25e9] * 2},
        {"0 to 1": [25e9] * 2, "2 to 1": [9e9, 11e9]},
    ]
    answers = [{"ways": part, "all_reduce": [20e9] * 3} for part in ways]
    page_links = fast.measure_links(runner(tmp_path, CARDS, answers))
    assert page_links.status == "wrong" and "cuda:2 to cuda:1: 44%" in page_links.line
    assert "nvidia-smi topo -m" in page_links.todo and page_links.figures["slow"] == ["2 to 1"]
    answers[1]["ways"]["2 to 1"] = [9e9, 24e9]  # One slow moment does not make a link slow.
    page_links = fast.measure_links(runner(tmp_path, CARDS, answers))
    assert page_links.status == "measured" and "all-reduce 20 GB/s" in page_links.line


def test_every_number_of_devices_up_to_all():
    assert [list_counts(devices) for devices in (CPUS, CARDS, machine("cuda", 6))] == [
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]
    alone = [check.name for check in list_checks(machine("cuda", 1))]
    assert alone == ["rates", "speed resnet50 x1", "speed vit_b_16 x1"]


@pytest.mark.parametrize(("gibs", "batch"), [(80, 256), (24, 64), (15.8, 32), (8, 32)])
def test_a_batch_is_as_large_as_a_card_holds(gibs, batch, monkeypatch):
    cards = {"cuda:0": 80 * 2**30, "cuda:1": int(gibs * 2**30)}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda name: SimpleNamespace(total_memory=cards[name])
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: False)
    assert fast.choose_settings(machine("cuda", 2)) == (batch, "fp16")


def speed_of(tmp_path, name, ours, single=1000.0, verdict=None):
    """Return the outcome of the check if each device of a bare loop reaches 1,000 images/s, and
    1,100 without exchange.
    """
    one = runner(
        tmp_path,
        CPUS,
        [{"speeds": [1000.0, 999.0, 1001.0], "alone": [1100.0] * 3}] * 2,
    )
    one.outcomes["speed resnet20 x1"] = measured("", images_per_sec={"median": single})
    rates = iter(ours)
    words = []

    def train(name, typed, timed):
        words.append(typed)
        one.path(name).mkdir(parents=True)
        (one.path(name) / "steps.csv").write_text("step,samples_per_sec\n")
        return {"throughput": {"samples_per_sec": next(rates)}, "mfu": None, "verdict": verdict}

    one.train = train
    return next(check for check in list_checks(CPUS) if check.name == name).run(one), words


def numbers_of(line):
    """Return the words of a line that contain a digit, without units."""
    return [word for word in line.split() if word[-1] != "/" and re.search(r"\d", word)]


def test_images_per_second_are_compared_with_a_bare_loop_and_one_device(tmp_path):
    verdict = {"step": {"optimizer": 0.02}}
    actual, words = speed_of(
        tmp_path, "speed resnet20 x2", [1800.0, 1900.0, 2000.0], verdict=verdict
    )
    figures = ["1,900", "(1,800", "2,000);", "0.95", "(0.90", "1.00)", "1.90", "9%"]
    assert numbers_of(actual.line) == figures
    assert actual.figures["exposed_communication"] == pytest.approx(1 - 1000 / 1100)
    assert actual.figures["batch"] == 128 and actual.figures["step"] == {"optimizer": 0.02}
    assert len(words) == 3 and {"batch_size=128", "nproc=2", "max_steps=44"} <= {*words[0]}


def test_values_that_were_not_measured_are_not_printed(tmp_path):
    actual, _ = speed_of(tmp_path, "speed resnet20 x1", [1000.0] * 3)
    assert actual.figures["times_one"] is None and actual.figures["exposed_communication"] is None
    assert actual.figures["step"] == {}
    assert numbers_of(actual.line) == ["1,000", "(1,000", "1,000);", "1.00", "(1.00", "1.00)"]
