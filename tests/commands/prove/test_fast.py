"""Figures of speed: which device and which link is named as slow, and what is said beside each figure."""

from __future__ import annotations

import re

import pytest

from trainer.commands.prove import fast
from trainer.commands.prove.check_runner import CheckRunner, Devices, measured
from trainer.commands.prove.fast import NETWORKS, checks, counts, slow_devices
from trainer.telemetry.flops import published

CARD = "NVIDIA A100-SXM4-80GB"
CARDS = Devices(tuple(f"cuda:{n}" for n in range(4)), "cuda", (CARD,) * 4)
CPUS = Devices(("cpu", "cpu"), "cpu", ("CPU", "CPU"), 1)


def runner(tmp_path, devices, answers):
    one = CheckRunner(tmp_path, devices)
    one.measure = lambda what, count=1, **task: answers
    return one


def rate(product, memory=None, limit=312e12):
    return {"product": product, "memory": memory or [1.5e12] * 3, "precision": "bf16", "product_limit": limit}


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


def test_a_slower_kind_of_card_is_not_held_against_a_faster_one():
    mixed = Devices(("cuda:0", "cuda:1"), "cuda", (CARD, "Tesla T4"))
    assert list(slow_devices(mixed, [[300] * 3, [65] * 3], "products")) == []


def test_a_slow_card_is_wrong_with_what_to_type(tmp_path):
    answers = [rate([300e12] * 3), rate([200e12] * 3), rate([299e12] * 3), rate([300e12] * 3)]
    found = fast.rates(runner(tmp_path, CARDS, answers))
    assert found.status == "wrong" and re.match(r"cuda:1 .*matrix products .*\b67%", found.line)
    assert re.search(r"devices=\[cuda:0,cuda:2,cuda:3\].*nvidia-smi -q", found.todo)
    low = [rate([3e14] * 3), *[rate([3e14] * 3, [1.5e12] * 3)] * 2, rate([3e14] * 3, [0.9e12] * 3)]
    found = fast.rates(runner(tmp_path, CARDS, low))
    assert found.status == "wrong" and re.match("cuda:3 .*memory", found.line)


def test_good_cards_stand_beside_their_limits(tmp_path):
    found = fast.rates(runner(tmp_path, CARDS, [rate([281e12, 280e12, 250e12])] * 4))
    assert found.status == "measured"
    assert re.search(r"\b280,000 GFLOP/s in bf16 \(90% .*\b1,500 GB/s \(74% ", found.line)
    assert found.figures["devices"][0]["product"] == {"median": 280e12, "low": 250e12, "high": 281e12}


def test_of_an_unknown_card_no_limit_is_told(tmp_path):
    unknown = Devices(("cuda:0",), "cuda", ("NVIDIA Imaginary 9000",))
    found = fast.rates(runner(tmp_path, unknown, [rate([1e14] * 3, limit=None)]))
    assert "limit" not in found.line and found.figures["devices"][0]["memory_share"] is None
    assert published("NVIDIA Imaginary 9000", "resnet50", 1) == []


def test_a_slow_way_is_named(tmp_path):
    ways = [{"1 to 0": [24e9, 25e9], "2 to 0": [25e9] * 2}, {"0 to 1": [25e9] * 2, "2 to 1": [9e9, 11e9]}]
    answers = [{"ways": part, "all_reduce": [20e9] * 3} for part in ways]
    found = fast.links(runner(tmp_path, CARDS, answers))
    assert found.status == "wrong" and "cuda:2 to cuda:1: 44%" in found.line
    assert "nvidia-smi topo -m" in found.todo and found.figures["slow"] == ["2 to 1"]
    answers[1]["ways"]["2 to 1"] = [9e9, 24e9]  # one slow moment is none of the link's
    found = fast.links(runner(tmp_path, CARDS, answers))
    assert found.status == "measured" and "all-reduce 20 GB/s" in found.line


RESULT = {"verdict": {"step": {"optimizer": 0.02}}, "mfu": 0.4}
KEPT = {"batch": 256, "precision": "bf16", "compile": True}


def outcome_of(tmp_path, devices, count, ours, bare, exposed=(), result=RESULT):
    one = CheckRunner(tmp_path, devices)
    one.outcomes["speed resnet50 x1"] = measured("", images_per_sec={"median": 2000.0})
    return fast.speed_outcome(one, NETWORKS["cuda"][0], count, KEPT, ours, bare, [*exposed], result)


def test_images_a_second_stand_beside_a_bare_loop_one_device_and_others(tmp_path):
    eight = Devices(tuple(f"cuda:{n}" for n in range(8)), "cuda", (CARD,) * 8)
    found = outcome_of(tmp_path, eight, 8, [15000.0, 14000.0, 16000.0], [15000.0, 14500.0, 15500.0], [0.09, 0.05, 0.1])
    figures = ["15,000", "(14,000", "16,000);", "1.00", "(0.97", "1.03)", "7.50", "9%", "90%", "16,621"]
    assert [word for word in found.line.split() if word[-1] != "/" and re.search(r"\d", word)] == figures
    assert found.figures["exposed_communication"] == 0.09 and found.figures["batch"] == 2048
    assert found.figures["beside_others"][0]["source"].startswith("https://github.com/NVIDIA/DeepLearningExamples")


def test_what_was_not_measured_is_not_told(tmp_path):
    found = outcome_of(tmp_path, CARDS, 4, [6000.0], [6100.0], [-0.01])
    assert found.figures["exposed_communication"] == 0.0 and "communication" not in found.line
    assert "published" not in found.line, "nothing is published of four"
    nothing = outcome_of(tmp_path, CARDS, 1, [2000.0], [2000.0], (), {**RESULT, "verdict": None})
    assert nothing.figures["times_one"] is None and nothing.figures["exposed_communication"] is None
    assert "times as fast as one" not in nothing.line


def test_every_number_of_devices_up_to_all():
    eight = Devices(tuple(f"cuda:{n}" for n in range(8)), "cuda", (CARD,) * 8)
    assert counts(eight) == [1, 2, 4, 8] and counts(CPUS) == [1, 2] and counts(CARDS) == [1, 2, 4]
    six = Devices(tuple(f"cuda:{n}" for n in range(6)), "cuda", (CARD,) * 6)
    assert counts(six) == [1, 2, 4, 6]
    names = [check.name for check in checks(CPUS)]
    assert "links" in names and "bubble" in names and len({*names}) == len(names)
    alone = [check.name for check in checks(Devices(("cuda:0",), "cuda", (CARD,)))]
    assert "links" not in alone and "bubble" not in alone and "speed vit_b_16 x1" in alone


def test_settings_that_could_not_be_found_leave_the_speed_out(tmp_path):
    one = CheckRunner(tmp_path, CPUS)
    check = next(check for check in checks(CPUS) if check.name == "speed resnet20 x1")
    assert check.run(one).status == "not here"
    assert fast.bubble(one).status == "not here"


@pytest.mark.parametrize(("most", "says"), [(0.2, "20.0% of a step idles"), (0.45, "20.0% to 45.0% of a step idles")])
def test_a_bubble_is_told_with_the_most_that_it_may_be(most, says, tmp_path):
    one = CheckRunner(tmp_path, CARDS)
    settings = measured("", batch=8, precision="bf16", compile=False)
    one.outcomes[f"settings {fast.NETWORKS[CARDS.kind][0].name}"] = settings
    found = {"bubble_measured": 0.2, "bubble_at_most": most, "bubble_ideal": 0.3, "schedule": "1f1b"}
    one.train = lambda *given, **named: {"pipeline": found}
    one.trainer = lambda *given, **named: 0
    one.log("plan").parent.mkdir(parents=True, exist_ok=True)
    one.log("plan").write_text('{"prediction": {"bubble": 0.25}}')
    outcome = fast.bubble(one)
    assert outcome.line.startswith(says) and outcome.figures["bubble_at_most"] == most


def test_the_best_settings_are_a_sentence(tmp_path):
    best = {"batch": 64, "precision": "bf16", "compile": True, "tried": [{}, {}]}
    check = next(check for check in checks(CPUS) if check.name == "settings resnet20")
    line = check.run(runner(tmp_path, CPUS, [best])).line
    assert "64 images per device in bf16, compiled" in line and "  " not in line
