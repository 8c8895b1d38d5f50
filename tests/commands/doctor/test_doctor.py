"""The report of `doctor` on machines with and without cards; no problem stops the command."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torchvision.io

from tests.command_line import trainer
from trainer.commands import doctor
from trainer.commands.doctor import Findings
from trainer.data.photos import jpeg
from trainer.devices import cards, health
from trainer.errors import RecipeError, SetupError


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(
        doctor, "sum_over_processes", lambda backend, devices: f"{backend} of {len(devices)} works"
    )
    monkeypatch.setattr(cards, "list_device_nodes", lambda: ([], []))


def rows(found):
    return {
        (section, name): value for section, pairs in found.sections.items() for name, value in pairs
    }


def test_on_this_machine():
    completed = trainer("doctor", env={"TRAINER_FAULT": "", "TRAINER_API_KEY": "secret"})
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    assert completed.stdout.endswith("\nall good\n")
    assert "secret" not in completed.stdout
    assert re.search(rf"^  torch +{torch.__version__.partition('+')[0]}$", completed.stdout, re.M)
    assert re.search(r"^  gloo, 2 processes  .*\bcorrect$", completed.stdout, re.M)
    assert all(len(line) <= 120 for line in completed.stdout.splitlines())
    with pytest.raises(RecipeError, match="'recipe=digits'"):
        doctor.command(["recipe=digits"])


def test_problems_are_printed_last_and_exit_with_3(quick, monkeypatch, capsys):
    def disk_usage(path):
        if str(path) == "/dev/shm":
            return SimpleNamespace(free=60 * 2**20, total=64 * 2**20)
        return SimpleNamespace(free=2**39, total=2**40)

    monkeypatch.setattr(doctor.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda number: (256, 4096))
    assert doctor.command([]) == 3
    output = capsys.readouterr().out
    assert re.search(r"^  /dev/shm +64 MiB, 60 free$", output, re.M)
    last = output[output.index("3 problems:") :]
    assert "256 MiB" in last and "--shm-size=" in last and re.search(r"2\. .*\binto /", last)
    assert "256 files" in last and last.endswith(": ulimit -n 4096\n")


def test_suggestions_start_with_launch_sh_if_it_started_the_command(monkeypatch, capsys):
    findings = Findings()
    findings.problem(cards.NO_NCCL)
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    doctor.command([])
    message = capsys.readouterr().out
    assert "pip install --force-reinstall torch" in message and sys.executable in message


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        (
            "torchvision",
            RuntimeError("no torchvision::nms"),
            "no torchvision::nms",
        ),
        (
            "torch",
            ModuleNotFoundError("no torch", name="torch"),
            r": torch; .*\bpip install\b",
        ),
        ("torch", ValueError("something\nelse"), "something else"),
    ],
)
def test_a_torch_that_cannot_be_loaded_is_one_finding_and_the_rest_goes_on(
    quick, monkeypatch, module, error, says
):
    real = importlib.import_module

    def load(name, package=None):
        if name == module:
            raise error
        return real(name, package)

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    actual = doctor.examine()
    assert len(actual.problems) == 1 and re.search(says, actual.problems[0])
    assert "machine" in actual.sections and "between processes" not in actual.sections
    assert "Traceback" not in actual.text()


@pytest.mark.parametrize("left", ["torchvision", "Pillow"])
def test_the_report_names_the_decoder_of_photos(quick, monkeypatch, left):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    if left == "Pillow":
        monkeypatch.delattr(torchvision.io, "decode_jpeg")
    jpeg.get_codec.cache_clear()
    actual = doctor.examine()
    jpeg.get_codec.cache_clear()
    assert rows(actual)["software", "JPEG by"].startswith(left)
    assert [
        text for text in actual.problems if "pip install --upgrade torchcodec" in text
    ] == actual.problems
    assert bool(actual.problems) == (left == "Pillow")


def test_cards_that_fail_and_those_that_do_not(quick, monkeypatch):
    """Two A100 as torch.cuda shows them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (70 * 2**30, 80 * 2**30),
    )
    monkeypatch.setattr(cards, "detect", lambda: cards.Cards(2))
    monkeypatch.setattr(health, "check_card", lambda device, count: None)
    monkeypatch.setattr(health, "copies_correctly", lambda source, target, pattern: True)
    monkeypatch.setattr(health, "measure_speed", lambda device: 7000.0 - device.index)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    actual = doctor.examine()
    shown = rows(actual)
    a100 = "NVIDIA A100-SXM4-80GB, 70.0 of 80.0 GiB free, computes correctly"
    assert shown["cards", "cuda:0"] == shown["cards", "cuda:1"] == a100
    assert re.match(r"right .*\b2\b", shown["cards", "copies"]) and actual.problems == []
    assert shown["cards", "speed"] == doctor.compare_speeds(["cuda:0", "cuda:1"], [7000.0, 6999.0])
    assert shown["between processes", "NCCL, 2 cards"] == "nccl of 2 works"

    monkeypatch.setattr(
        health, "copies_correctly", lambda source, target, pattern: source.index == 0
    )
    actual = doctor.examine()
    assert rows(actual)["cards", "copies"] == "WRONG, see below"
    assert len(actual.problems) == 1 and "(cuda:1 to cuda:0)" in actual.problems[0]

    def check(device, count):
        if device.index == 1:
            raise SetupError("cuda:1 fails")

    monkeypatch.setattr(health, "check_card", check)
    actual = doctor.examine()
    assert "CANNOT" in rows(actual)["cards", "cuda:1"]
    assert actual.problems == ["cuda:1 fails"]
    monkeypatch.setattr(cards, "detect", lambda: cards.Cards(0, SetupError("no driver")))
    assert doctor.examine().problems == ["no driver"]


@pytest.mark.full("a cold start; the texts are a table in test_peers.py")
def test_processes_that_cannot_talk():
    completed = trainer("doctor", env={"GLOO_SOCKET_IFNAME": "eth77"})
    assert completed.returncode == 3 and "FAILS, see below" in completed.stdout
    assert re.search(r"gloo .*\b2 processes .*GLOO_SOCKET_IFNAME=eth77 ", completed.stdout)


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        ([100.0, 98.0], r"all [^:=]*$"),
        ([100.0, 60.0], r"cuda:1 .*\b0\.6 times .*\bcuda:0\b.*\bshares=auto\b"),
        ([60.0, 100.0, 100.0], r"cuda:0 .*\b0\.6 times .*\bcuda:1\b.*\bshares=auto\b"),
        ([100.0, 0.0], "not measured$"),
    ],
)
def test_unequal_cards_get_the_gain_of_unequal_shares(speeds, says):
    """Equal local batches take as long as the slowest card.

    Proportional ones keep all cards busy.
    """
    line = doctor.compare_speeds([f"cuda:{n}" for n in range(len(speeds))], speeds)
    assert re.match(says, line)
    if "shares=auto" in line:
        assert f"{sum(speeds) / (len(speeds) * min(speeds)):.2f} times" in line
