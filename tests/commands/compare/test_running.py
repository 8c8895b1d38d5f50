"""How long a run is, how fast it was, what it said last."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from trainer.commands.compare import running
from trainer.commands.compare.running import choose_length, speed
from trainer.recipe import load


def checked(step, samples=1437, batch=32, synthetic=False):
    return {
        "data": {"train_samples": samples, "synthetic": synthetic}, "batch_size": batch, "step_time_s": {"mean": step}
    }  # fmt: skip


def test_a_run_is_as_long_as_its_speed_allows():
    recipe = load("digits")  # 30 epochs, 10 steps of warm-up
    assert choose_length(recipe, [checked(0.02), checked(0.01), checked(9)]).steps == 10 + 200  # 4 s of the median
    assert choose_length(recipe, [checked(30.0)]).steps == 10 + running.FEWEST
    quick = choose_length(recipe, [checked(1e-4, batch=96)])
    assert quick.steps == 10 + running.MOST and quick.epochs * (1437 // 96) >= quick.steps
    assert choose_length(recipe, [checked(0.01)], steps=7).steps == 17
    assert choose_length(load("resnet50"), [checked(0.01, synthetic=True)]).steps == 20  # the data is missing


def test_a_length_that_the_user_gives_stays():
    recipe = load("digits", "epochs=3")
    assert choose_length(recipe, [checked(0.01, batch=100)], fixed=True) == running.Length(42, 3, 2)


def rows(*windows):
    ends = [sum(steps for steps, _ in windows[: n + 1]) for n in range(len(windows))]
    return [{"step": str(end), "samples_per_sec": str(rate)} for end, (_, rate) in zip(ends, windows, strict=True)]


def test_the_speed_of_a_run_is_the_median_of_its_windows():
    calm = [(10, ""), (10, 1000.0), (10, 1010.0), (10, 1020.0), (10, 990.0)]
    assert speed(rows(*calm, (10, 5.0)), 700.0) == 1000.0  # a burst of something else
    assert speed(rows(*calm, (200, 900.0)), 700.0) == 900.0  # windows weigh their steps
    assert speed(rows(*calm), 700.0) == 700.0  # too few


def test_averaging_between_steps_counts():
    assert running.in_steps(
        {"seconds_in": {"steps": 6.0, "averaging": 2.0, "start-up": 2.0}, "verdict": None}
    ) == pytest.approx(0.75)
    assert running.in_steps({"seconds_in": {"steps": 1.0}}) == 1.0


def test_a_run_that_is_done_anew_is_one_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "finished", lambda path, command: {})
    runner, entry = running.Runner(tmp_path, "digits", None), SimpleNamespace(slug="ddp")
    for number in (1, 2):
        runner.path(entry, 1).mkdir(parents=True, exist_ok=True)
        (runner.path(entry, 1) / f"events.out.tfevents.{number}").touch()
        for _ in range(2):  # what is done stays
            runner.run(entry, 1, [])
            assert [path.name[-1] for path in (tmp_path / "tensorboard/ddp").iterdir()] == [str(number)]
    runner.path(entry, 2).mkdir()
    (runner.path(entry, 2) / "events.out.tfevents.3").touch()
    runner.run(entry, 2, [])
    assert not list(runner.path(entry, 2).iterdir()), "repeats would lie on each other"


def test_the_last_line_of_a_run_that_failed(tmp_path):
    log = tmp_path / "log"
    log.write_text("epoch 1\ntrainer: error: no data\n")
    assert running.failure_line(log, 3) == "no data"
    log.write_text("Traceback\n  file\nValueError: odd\n\n")
    assert running.failure_line(log, 1) == "ValueError: odd"
    assert running.failure_line(log, -signal.SIGKILL) == "killed by SIGKILL"
    log.write_text("")
    assert "exit code 1" in running.failure_line(log, 1)
