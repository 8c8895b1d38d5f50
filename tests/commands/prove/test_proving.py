"""The command as a whole: faults of machines are detected, finished checks are kept, and no check
passes by default.

The files proof.json and proof.md have the last sentence, the keys, and the skipped checks, and name
nobody.
"""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import warm
from tests.command_line import environment
from tests.commands.prove.proofs import (
    CARD,
    CHECKS,
    DEVICES,
    begin,
    faulty,
    found,
    machine,
    proof,
    prove,
)
from tests.pages import GUIDE
from trainer.commands.prove import fast, proving, right
from trainer.commands.prove.check_runner import Check, CheckRunner, Outcome, measured, wrong
from trainer.commands.prove.check_runner import right as is_right
from trainer.commands.prove.proving import anonymize, build_proof, render_markdown
from trainer.errors import RecipeError

FAULTS = {  # put in by hand, with the checks that have to see it and what they say
    "few_files": (["doctor"], "only 300 files may be open at once"),
    "wrong_copy": (
        ["copies"],
        r"\d+ of 24 were wrong: cpu to cpu, by message, 1,048,579 of uint8: element",
    ),
    "wrong_sum": (["sums"], r"\d+ of 24 were wrong: on cpu, 1,023 of uint8: element 5 is"),
    "repeated_step": (["repeat", "resume"], "differ from the run that was not killed"),
    "other_network": (["mode ddp"], "differs: .*optimizer by "),
    "wrong_kernels": (["compile"], "differs: losses by "),
    "slow_link": (["links"], "slow from 1 to 0: "),
}
SAMPLE = ("few_files", "other_network", "slow_link")  # and wrong_copy, on which it goes on below


def apart(fault):
    return pytest.param(
        [fault], marks=pytest.mark.full("some of seven faults in the fast tests"), id=fault
    )


@pytest.mark.slow
@pytest.mark.parametrize("faults", [SAMPLE, *map(apart, FAULTS)], ids=" ".join)
def test_faults_of_a_machine_are_reported(faults, tmp_path):
    folder = begin(
        tmp_path / "proof",
        *(name for fault in faults for name in FAULTS[fault][0]),
    )
    completed = prove(folder, fault=" ".join(faults), timeout=600)
    assert completed.returncode == 3, completed.stdout + completed.stderr
    for names, says in map(FAULTS.get, faults):
        row = found(folder, names[-1])
        assert row["status"] == "wrong" and re.search(says, row["line"]), row
        assert row["todo"] and f"try: {row['todo']}" in completed.stdout
    assert "WRONG" in completed.stdout.splitlines()[-1]
    assert proof(folder)["status"] == "wrong" and "**WRONG**" in (folder / "proof.md").read_text()
    assert "Traceback" not in completed.stdout + completed.stderr


@pytest.mark.slow
def test_a_machine_without_a_fault_is_right(tmp_path, full):
    names = ["copies", "sums", "resume", "links"]
    names += ["doctor", "repeat", "mode ddp", "precision fp16", "rates"] * full
    folder = begin(tmp_path / "proof", *names)
    completed = prove(folder, timeout=600)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[-1].endswith("correctly on 2 CPU processes")
    rows = [found(folder, name) for name in names]
    assert {row["status"] for row in rows} <= {"right", "measured"}
    assert all(row["todo"] is None for row in rows)
    messages = [line for line in completed.stdout.splitlines() if line.startswith("[")]
    assert len(messages) == len(names) and f"/{len(CHECKS)}]" in messages[0]
    page = (folder / "proof.md").read_text()
    assert str(tmp_path) not in page and os.path.expanduser("~") not in page


# --- stopped, and gone on with
# ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_machine_that_was_found_wrong_stays_wrong_after_a_stop(tmp_path):
    folder = begin(tmp_path / "proof", "copies", "links")
    words = [
        sys.executable,
        "-m",
        "trainer",
        "prove",
        "devices=[cpu,cpu]",
        f"output={folder}",
        "minutes=60",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = warm.Popen(words, env=environment(**faulty("wrong_copy")), **pipes)
    assert any("WRONG" in line for line in started.stdout)  # read until then
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 143, out + err
    kept = json.loads((folder / proving.KEPT).read_text())["checks"]
    assert proof(folder)["status"] == "wrong" and "links" not in kept
    for minutes, left in (("0.01", "left out"), ("60", "measured")):
        completed = prove(folder, f"minutes={minutes}", fault="wrong_copy")
        assert completed.returncode == 3, completed.stdout + completed.stderr
        assert found(folder, "copies")["status"] == "wrong"
        assert "WRONG" in completed.stdout.splitlines()[-1]
        assert found(folder, "links")["status"] == left


# --- what fits
# --------------------------------------------------------------------------------------------------


def proving_of(tmp_path, checks, minutes, monkeypatch):
    monkeypatch.setattr(proving.right, "list_checks", lambda devices: checks)
    monkeypatch.setattr(proving.fast, "list_checks", lambda devices: [])
    return proving.Proving(tmp_path, DEVICES, minutes)


def test_the_most_important_checks_are_chosen_first_and_run_in_order(tmp_path, monkeypatch, capsys):
    finished = []
    clock = [0.0]
    monkeypatch.setattr(proving, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def check(name, seconds, rank, slower=1.0):
        def run(runner):
            finished.append(name)
            clock[0] += slower * seconds
            return is_right("fine")

        return Check(name, name, seconds, run, rank)

    checks = [
        check("a", 20, 2),
        check("b", 30, 0),
        check("c", 25, 1, slower=2),
        check("d", 100, 0),
        check("e", 15, 1),
    ]
    with pytest.raises(RecipeError, match=r"minutes=0\.01 .*type minutes=4"):
        proving_of(tmp_path, checks, 0.01, monkeypatch).announce()
    one = proving_of(tmp_path, checks, 1.8, monkeypatch)
    one.announce()
    output = capsys.readouterr().out
    assert "4 checks, about 2 minutes" in output
    assert re.search(r"skipped.*minutes=4 .*: d\b", output)
    one.run()
    assert finished == ["a", "b", "c"], (
        "the third took twice as long, so that nothing is left for the last"
    )


def test_a_check_that_raises_is_wrong_and_the_next_is_done(tmp_path, monkeypatch, capsys):
    def broken(runner):
        raise ValueError("odd")

    checks = [
        Check("one", "one", 1, broken),
        Check("two", "two", 1, lambda runner: measured("3 images/s"), part="fast"),
        Check("three", "three", 1, lambda runner: Outcome("not here", "no compiler")),
    ]
    one = proving_of(tmp_path, checks, 5, monkeypatch)
    one.run()
    assert [candidate.status for candidate in one.runner.outcomes.values()] == [
        "wrong",
        "measured",
        "not here",
    ]
    output = capsys.readouterr().out
    assert "[ 1/3] one ... WRONG: ValueError: odd" in output
    assert "two ... 3 images/s (0 s)" in output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / proving.KEPT).write_text('{"checks": {"one": {"status": "right"}}}')
    assert proving.load_outcomes(tmp_path / "other") == {}, "what is damaged is done again"
    again = proving_of(tmp_path, checks, 5, monkeypatch)
    assert again.runner.outcomes == one.runner.outcomes, "they come back as they were"
    assert [check.name for check in again.waiting] == ["one", "three"], (
        "only what is done well is not done again"
    )


def test_no_speed_is_printed_for_a_machine_that_others_use(tmp_path, monkeypatch, capsys):
    checks = [
        Check("one", "one", 1, lambda runner: is_right("fine")),
        Check("slow", "slow", 1, lambda runner: wrong("cpu:1 is slow", "see top"), part="fast"),
        Check(
            f"speed {fast.NETWORKS['cpu'][0].name} x2",
            "speed",
            1,
            lambda runner: measured("2 x", times_one=2),
            part="fast",
        ),
    ]
    monkeypatch.setattr(proving.reports.OtherProcesses, "cores", lambda self: 1.0)
    one = proving_of(tmp_path, checks, 5, monkeypatch)
    one.run()
    assert [candidate.status for candidate in one.runner.outcomes.values()] == [
        "right",
        "left out",
        "left out",
    ]
    message = build_proof(one.runner, checks, 5, 1.0, MACHINE, {})
    assert (
        message["times_one"] is message["slow_part"] is None and message["status"] == "incomplete"
    )
    assert [row["figures"] for row in message["checks"]] == [{}, *[{"busy_cores": 1.0}] * 2]
    capsys.readouterr()
    proving.report(tmp_path, message)
    output = capsys.readouterr().out
    assert output.count("other processes") == 1 and "minutes=" not in output
    page = render_markdown(message)
    assert re.search(r"^Skipped.*: slow \(other .*\); speed \(other", page, re.M)
    assert len(proving_of(tmp_path, checks, 5, monkeypatch).waiting) == 2, (
        "the same command measures it again"
    )


def test_the_identity_of_a_proof_names_nobody_and_depends_on_installed_versions():
    bound = ({"cpu": "AMD", "gpus": []}, {"torch": "2.11"}, ("cpu", "cpu"))
    actual = proving.list_bindings(*bound)
    assert actual["devices"] == "cpu,cpu"
    assert os.uname().nodename not in json.dumps(actual).split('"')
    for place, (key, other) in enumerate(
        {
            "machine": {"cpu": "Intel"},
            "versions": {},
            "devices": ("cpu",),
        }.items()
    ):
        again = proving.list_bindings(*bound[:place], other, *bound[place + 1 :])
        assert [name for name in actual if again[name] != actual[name]] == [key]


# --- the proof
# --------------------------------------------------------------------------------------------------

GPUS = machine("cuda", 4)
CPUS = machine("cpu", 2)
MACHINE = {
    "cpu": "AMD EPYC",
    "cores": 32,
    "memory_bytes": 2**38,
    "gpus": [CARD] * 4,
    "system": "Linux-6.1",
}
SPEED = {
    "ratio": {"median": 0.99},
    "times_one": 3.7,
    "exposed_communication": 0.06,
    "step": {"optimizer": 0.02},
}


def made(tmp_path, devices=GPUS, **changes):
    """Return a proof in which all checks are right except `changes`: name -> Outcome, or None for a
    check that is left out.
    """
    one = CheckRunner(tmp_path, devices, {})
    checks = [*right.list_checks(devices), *fast.list_checks(devices)]
    for check in checks:
        one.outcomes[check.name] = (
            is_right("it is") if check.part == "right" else measured("3 GB/s")
        )
    first = f"speed {fast.NETWORKS[devices.kind][0].name} x{devices.count}"
    one.outcomes[first] = measured("9,000 images/s", **SPEED)
    assert changes.keys() <= one.outcomes.keys()
    one.outcomes = {name: outcome for name, outcome in (one.outcomes | changes).items() if outcome}
    return build_proof(one, checks, 10.0, 0.1, MACHINE, {"torch": "2.11", "cuda": None})


def test_all_right(tmp_path):
    proof = made(tmp_path)
    assert re.search(
        r"correctly .*\b4 GPUs; 3\.7 times .*; .*communication \(6% ", proof["sentence"]
    )
    assert (proof["status"], proof["times_one"], proof["format"]) == ("right", 3.7, 1)


def test_one_wrong_is_the_sentence(tmp_path):
    proof = made(
        tmp_path,
        sums=wrong("3 of 24", "set NCCL_P2P_DISABLE=1"),
        copies=wrong("odd", "see"),
    )
    assert proof["status"] == "wrong"
    title = next(row["title"] for row in proof["checks"] if row["name"] == "copies")
    assert "WRONG on 4 GPUs" in proof["sentence"]
    assert f"{title}: odd (and 1 more)" in proof["sentence"]
    page = render_markdown(proof)
    assert re.search(r"- \*\*sums .*\*\*: 3 of 24\. .*: set NCCL_P2P_DISABLE=1", page)


def test_skipped_checks_never_count_as_passed(tmp_path):
    nothing = build_proof(
        CheckRunner(tmp_path, CPUS, {}),
        [*right.list_checks(CPUS)],
        1.0,
        None,
        MACHINE,
        {},
    )
    assert re.match(r"nothing .*\b2 CPU processes\b", nothing["sentence"])
    assert nothing["status"] == "incomplete"
    proof = made(tmp_path, CPUS, **{"mode ddp": None, "compile": None})
    total = sum(row["part"] == "right" for row in proof["checks"])
    assert proof["status"] == "incomplete" and proof["counts"]["left out"] == 2
    assert re.match(
        rf"{total - 2} of {total} checks .*\b2 CPU processes\b.*skipped", proof["sentence"]
    )
    # The page lists the same number.
    assert f"({len(proof['checks'])} checks " in proof["sentence"]
    left = [row for row in proof["checks"] if row["status"] == "left out"]
    assert [row["name"] for row in left] == ["mode ddp", "compile"]
    assert all(row["line"] for row in left)
    titles = {row["name"]: row["title"] for row in proof["checks"]}
    page = render_markdown(proof)
    assert re.search("Skipped in 10 minutes: .*ddp.*; compile", page)
    assert f"| {titles['mode split']} |" in page
    assert f"| {titles['mode ddp']} |" not in page


def test_missing_features_of_a_machine_are_no_fault(tmp_path):
    proof = made(tmp_path, compile=Outcome("not here", "no compiler"))
    assert proof["status"] == "right" and "correctly on 4 GPUs" in proof["sentence"]
    assert re.search(r"\| compile=true .*\| not here \| no compiler \|", render_markdown(proof))


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, r"communication \(6% .*\)"),
        ({"ratio": {"median": 0.7}}, r".*\bloop \(0\.70 times .*\)"),
        ({"step": {"optimizer": 0.3}}, r".*\boptimizer \(30% .*\)"),
        (
            {"exposed_communication": None, "times_one": 2.0},
            r".*\bdevices .*\(50% .*\)",
        ),
        ({"exposed_communication": 0.01, "times_one": 3.9}, r"[^(]*\bResNet-50\b[^(]*"),
    ],
)
def test_the_slow_part_is_what_costs_most(figures, says, tmp_path):
    proof = made(
        tmp_path,
        **{"speed resnet50 x4": measured("", **{**SPEED, **figures})},
    )
    assert re.fullmatch(says, proof["slow_part"])


def test_the_keys_are_those_of_the_guide(tmp_path):
    proof = made(tmp_path)
    assert json.loads(json.dumps(proof, allow_nan=False)) == proof
    table = (GUIDE / "prove.md").read_text().partition("## proof.json")[2]
    keys = re.findall(r"^- `(\w+)`: ", table, re.M)
    assert keys == [*proof], "an interface: keys are added, never changed"
    row = ["name", "part", "title", "status", "line", "todo", "figures", "seconds"]
    assert all([*candidate] == row for candidate in proof["checks"])


def test_the_page_names_nobody_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    line = "in /home/ada/a-secret-project: cd; node17: /data/x/y.jpg (ada), 3 images/s"
    page = render_markdown(made(tmp_path, repeat=wrong(line, "cd ~/elsewhere/x")))
    assert not re.search("ada|node17|secret|/home|/data|elsewhere", page), page
    text = (
        "12 images/s of /dev/shm; 3/4 ViT-B/16 at "
        "https://github.com/pytorch/pytorch devices=[cuda:0] photos"
    )
    assert anonymize(text) == text
    assert anonymize("(/opt/x.py:12, '~/photos/cat')") == "(PATH:12, 'PATH')"
    assert "in PATH: cd; NAME: PATH (NAME), 3 images/s" in page
