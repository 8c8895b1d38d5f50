"""The command `compare`: arguments, runs, tables.

Most with a stand-in for the runs' processes, some through the real command line.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.checks import odd
from tests.command_line import ok
from tests.commands.trials.stand_in import SMALL
from trainer.commands import compare
from trainer.commands.compare.ranking import NO_DIFFERENCE, STAND_IN, EntryFigures
from trainer.commands.trials.significance import Difference
from trainer.errors import FolderInUseError, Interrupted, RecipeError
from trainer.recipe import MODES, load
from trainer.telemetry import plots
from trainer.telemetry.events import read_events

KEYS = [  # Keys of compare.json, which is an interface: keys are added, never changed.
    "recipe",
    "status",
    "command",
    "asked",
    "length",
    "repeats",
    "steps",
    "warmup_steps",
    "batch_size",
    "model",
    "entries",
    "pairs",
    "conclusion",
    "other_programs_cores",
    "machine",
    "versions",
    "seconds",
]
BAD = [
    ([], "needs recipe="),
    (["modes=[sngle]"], "did you mean mode=single?"),
    (["modes=[]"], "modes=[] compares nothing"),
    (["modes=[single"], "modes=[single must be a list"),
    (["modes=[single output=x]"], "output=x cannot be set for one entry"),
    (["mode=ddp", "modes=[single]"], "keep modes="),
    (["repeats=0"], "repeats=0 must be a whole number, 1 or more"),
    (["sweep=seed:[1,2]"], "sweep"),
    (["resume=auto"], "say which with output="),
    (["model.name=cnnn"], "did you mean model.name=cnn?"),
]


@pytest.mark.parametrize(
    ("words", "says"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_arguments_that_no_entry_can_run_with_are_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        compare.command(["recipe=digits", *words] if words else [])
    line = str(caught.value)
    assert says in line and "\n" not in line and not list(tmp_path.iterdir())


def compared(*modes, **options):
    options = {"output": "out", "repeats": 3, "steps": 40, **options}
    report = compare.compare("digits", modes, words=SMALL, **options)
    return report, {row["entry"]: row for row in report["entries"]}


def test_a_comparison_matches_its_type(machine, tmp_path):
    machine.faults["split/1"] = 5
    report, table = compared("single", "ddp", "split", "hogwild sync_bn=true")
    assert [line for row in report["entries"] for line in odd(row, EntryFigures)] == []
    assert [line for pair in report["pairs"] for line in odd(pair, Difference)] == []
    assert report["pairs"]
    assert table["ddp"]["compared"] and table["split"]["error"]
    kept = json.loads((tmp_path / "out/compare.json").read_text())
    assert [*kept] == KEYS and kept["length"].keys() == {"steps", "epochs", "every"}
    assert kept == json.loads(json.dumps(report))


def test_repeats_are_interleaved_after_a_check(machine):
    compared("single", "ddp", "split", repeats=2)
    names = ["single", "ddp", "split"]
    assert machine.ran == [f"{name}/{repeat}" for repeat in range(3) for name in names]


def test_losses_are_compared_in_full_precision(machine):
    """A GPU computes without TF32, and without kernels whose rounding depends on the shape."""
    compared("single", "ddp precision=tf32", "ddp precision=bf16", repeats=1)
    actual = [words.get("precision") for words in machine.words]
    assert actual == [None, "fp32", "bf16", None, "tf32", "bf16"]
    assert [variables.get("TRAINER_EXACT") for variables in machine.environments] == ["1"] * 3 + [
        None
    ] * 3


@pytest.mark.slow
def test_more_repeats_where_a_difference_could_hide(machine, capsys, tmp_path):
    machine.faults["ddp/2"] = 5  # asks for no more
    report, _ = compared("single", "split", "ddp", repeats=None)
    assert report["repeats"] == 5
    assert not any("ddp" in sentence for sentence in report["conclusion"])
    assert re.search(r"\b5, 10, 15 repeats\b", Path("out/compare.md").read_text())
    assert "repeats=" not in report["command"]
    shutil.rmtree("out")
    machine.noise = 0.04
    report, table = compared("single", "pipeline", repeats=None)
    assert report["repeats"] == 15 and machine.ran[-1] == "pipeline/15"
    assert table["pipeline"]["compared"]["verdict"] == NO_DIFFERENCE
    assert re.search(r"\bsingle\b.*\bpipeline\b", report["conclusion"][0])
    assert "difference of 10%" in capsys.readouterr().out
    machine.ran.clear()
    (tmp_path / "out/compare.json").write_text(json.dumps({**report, "status": "interrupted"}))
    again, _ = compared("single", "pipeline", repeats=None, resume="auto")
    assert not machine.ran and again["repeats"] == 15


def test_the_table_and_the_files(machine, tmp_path, monkeypatch):
    drawn = []
    draw = plots.draw_bars
    monkeypatch.setattr(
        plots,
        "draw_bars",
        lambda *all_: (drawn.append(all_[-1]), draw(*all_)),
    )
    report, table = compared("single", "ddp", "dp", "local_sgd", repeats=5)
    claims = {"faster": "▲", "slower": "▼"}
    verdicts = {name: row["compared"]["verdict"] for name, row in table.items() if row["compared"]}
    marked = {name: claims[verdict] for name, verdict in verdicts.items() if verdict in claims}
    assert drawn == [marked] and "ddp" in marked
    assert table["ddp"]["ratio"]["median"] == pytest.approx(1.6, rel=0.02)
    assert len(table["ddp"]["ratio"]["runs"]) == 5
    assert table["single"]["ratio"] is None
    assert table["ddp"]["compared"]["verdict"] == "faster" and table["ddp"]["label"] == STAND_IN
    assert any(STAND_IN in sentence and "GPUs" in sentence for sentence in report["conclusion"])
    assert table["dp"]["label"].startswith("pass-through")
    assert table["dp"]["ratio"] is table["dp"]["compared"] is None
    assert table["dp"]["samples_per_sec"]["mean"] > 0
    assert not any("dp" in (pair["first"], pair["second"]) for pair in report["pairs"])
    assert table["local_sgd"]["exactness"]["verdict"] == "other maths"
    assert table["ddp"]["peak_memory_bytes"] == {"cpu:0": 2**30}
    assert table["ddp"]["ranks"] == 2
    assert report["conclusion"][0] == "fastest: local_sgd"
    out = tmp_path / "out"
    assert json.loads((out / "compare.json").read_text())["entries"] == json.loads(
        json.dumps(report["entries"])
    )
    with (out / "compare.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["entry"] for line in lines] == ["single", "ddp", "dp", "local_sgd"]
    assert float(lines[1]["samples_per_sec"]) == table["ddp"]["samples_per_sec"]["mean"]
    assert lines[1]["compared"] == "faster" and lines[1]["exactness"] == "exact"
    markdown = (out / "compare.md").read_text()
    assert re.search(r"^\| entry \|.*\| images/s \|", markdown, re.M) and "Machine: " in markdown
    assert "python -m trainer compare recipe=digits 'modes=[single,ddp,dp,local_sgd]'" in markdown
    assert (out / "compare.png").stat().st_size > 5000
    [bars] = (out / "tensorboard/single").glob("events*")
    assert [value.tag for event in read_events(bars) for value in event.summary.value] == [
        "compare/speed"
    ]
    assert not list(out.rglob("*.safetensors")) and not list(out.rglob("checkpoints"))


def test_a_mode_that_computes_something_else_is_red_and_never_the_fastest(
    machine, monkeypatch, capsys
):
    machine.losses["ddp"] = 1.01
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report, table = compared("single", "ddp", "split", repeats=5)
    assert table["ddp"]["exactness"]["verdict"] == "disagrees"
    assert table["split"]["exactness"]["verdict"] == "exact"
    assert re.search(r"\bddp DISAGREES .*\bsingle\b", report["conclusion"][0])
    assert report["conclusion"][1] == "fastest: single"
    (red,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\033[31m")]
    assert "DISAGREES by 1.0%" in red


def test_shares_of_a_batch_are_printed_and_compared_with_single(machine):
    report, table = compared(
        "single", "ddp shares=[3,1]", "local_sgd shares=auto", "split shares=auto", repeats=1
    )
    assert table["ddp shares=[3,1]"]["exactness"]["verdict"] == "exact"
    assert [row["shares"] for row in report["entries"]] == [None, [24, 8], [24, 8], None]
    assert Path("out/compare.md").read_text().count("(24 + 8 images)") == 2
    refused = table["split shares=auto"]
    assert refused["exit_code"] == 2 and re.search(
        r"\bshares=auto .*\bmode=split\b", refused["error"]
    )
    report = compare.compare(
        "digits", ["single", "ddp"], words=[*SMALL, "shares=auto"], repeats=1, steps=40
    )
    assert [row["exit_code"] for row in report["entries"]] == [0, 0], (
        "single has no shares, and is the reference"
    )
    assert report["entries"][1]["exactness"]["verdict"] == "exact"


def test_on_gpus_single_measures_the_effect_of_rounding(machine):
    machine.device = "cuda"
    machine.rounding = 1.0002
    machine.losses = {"ddp": 0.9995, "split": 1.002}
    _, table = compared("single", "ddp", "split", repeats=1)
    verdicts = {name: row["exactness"]["verdict"] for name, row in table.items()}
    assert verdicts == {"single": "reference", "ddp": "exact", "split": "disagrees"}
    assert machine.ran[:4] == ["single/0", "single/-1", "ddp/0", "split/0"]
    assert table["single"]["repeats"] == 1
    machine.faults = {"single/-1": 1}  # Without this run the tolerance is that of the CPU.
    _, table = compared("single", "ddp", repeats=1, output="other")
    assert table["ddp"]["exactness"]["verdict"] == "disagrees" and table["single"]["error"] is None


def test_runs_disturbed_by_other_processes_are_not_compared(machine):
    machine.busy = {f"ddp/{repeat}" for repeat in (1, 2)}
    report, table = compared("single", "ddp", repeats=5)
    assert (table["single"]["disturbed"], table["ddp"]["disturbed"]) == (0, 2)
    assert [*table["ddp"]["samples_per_sec"]["runs"]] == [3, 4, 5]
    assert len(table["ddp"]["ratio"]["runs"]) == 3
    assert [pair["pairs"] for pair in report["pairs"]] == [3]


def test_a_machine_that_others_use_has_no_fastest_mode(machine):
    machine.busy = {f"{mode}/{repeat}" for mode in ("single", "ddp") for repeat in range(6)}
    report, table = compared("single", "ddp", repeats=5)
    assert not report["pairs"] and table["ddp"]["ratio"] is table["ddp"]["compared"] is None
    text = " ".join([*report["conclusion"], Path("out/compare.md").read_text()])
    assert "fastest" not in text and "faster" not in text and "10 of 10 timed runs" in text
    machine.busy = {}
    machine.ran.clear()
    report, _ = compared("single", "ddp", repeats=5, resume="auto")
    assert len(machine.ran) == 10, (
        "what was disturbed is measured again, the checks of the losses are not"
    )
    assert report["conclusion"] == ["fastest: ddp", report["conclusion"][-1]]


STOPS = [  # before which run, and what ran until then
    ("single/0", None),
    ("single/1", None),
    ("ddp/1", ["single"]),
    ("split/1", ["single", "ddp"]),
    ("single/2", ["single", "ddp", "split"]),
]


@pytest.mark.parametrize(("repeat", "drawn"), STOPS)
def test_a_comparison_that_is_stopped_draws_and_says_only_what_ran(
    machine, monkeypatch, repeat, drawn
):
    bars = []
    draw = plots.draw_bars
    monkeypatch.setattr(
        plots,
        "draw_bars",
        lambda path, rows, *more: (bars.append(rows), draw(path, rows, *more)),
    )
    machine.faults[repeat] = KeyboardInterrupt()
    with pytest.raises(Interrupted):
        compared("single", "ddp", "split")
    assert [[name for name, *_ in rows] for rows in bars] == ([drawn] if drawn else [])
    assert Path("out/compare.png").exists() == bool(drawn)
    report = json.loads(Path("out/compare.json").read_text())
    named = {
        name
        for name in ("single", "ddp", "split")
        if any(name in each for each in report["conclusion"])
    }
    missing = {"single", "ddp", "split"} - {*(drawn or [])}
    assert report["status"] == "interrupted" and (named & missing) == missing


def test_a_mode_that_failed_has_no_bar(machine, monkeypatch):
    bars = []
    monkeypatch.setattr(
        plots,
        "draw_bars",
        lambda path, rows, *more: (bars.append([name for name, *_ in rows]), path.touch()),
    )
    machine.faults["ddp/0"] = 5
    compared("single", "ddp", "hogwild sync_bn=true", "dp")
    assert bars == [["single", "dp"]]


@pytest.mark.parametrize("repeat", [0, 2])
def test_a_crash_is_a_row_and_the_others_go_on(repeat, machine):
    machine.faults[f"ddp/{repeat}"] = 5
    report, table = compared("single", "ddp", repeats=3)
    assert (table["ddp"]["error"], table["ddp"]["exit_code"]) == ("broken ddp", 5)
    assert table["ddp"]["repeats"] == max(0, repeat - 1)
    assert table["single"]["repeats"] == 3
    assert f"ddp/{repeat + 1}" not in machine.ran
    assert "broken ddp" in Path("out/compare.md").read_text()
    assert report["status"] == "completed"


def test_where_no_run_has_a_speed_the_exit_code_is_the_first_rows(machine, tmp_path):
    machine.timed = False
    with pytest.raises(RecipeError, match="long enough"):
        compare.command(["recipe=digits", "modes=[single]", "repeats=1", "output=short", *SMALL])
    machine.faults = {"ddp/0": 3, "single/0": 5}
    assert (
        compare.command(["recipe=digits", "modes=[ddp,single]", "devices=[cpu,cpu]", "output=out"])
        == 3
    )


def test_an_existing_comparison_continues_only_on_request_and_may_get_more_repeats(machine):
    before, _ = compared("single", "ddp", repeats=2)
    machine.ran.clear()
    with pytest.raises(FolderInUseError, match="resume=auto"):
        compared("single", "ddp", repeats=2)
    with pytest.raises(RecipeError, match="other modes"):
        compared("single", repeats=2, resume="auto")
    report, _ = compared("single", "ddp", repeats=3, resume="auto")
    assert machine.ran == ["single/3", "ddp/3"] and report["length"] == before["length"]
    runs, more = (each["entries"][0]["samples_per_sec"]["runs"] for each in (before, report))
    assert more.items() > runs.items()
    assert [row["repeats"] for row in report["entries"]] == [3, 3]


def test_recipes_and_numbers_may_be_python_objects(machine, tmp_path):
    mlp = {"data.name": "digits", "model.name": "mlp"}
    for number, recipe in enumerate((Path("digits"), mlp, load("digits", "model.name=mlp"))):
        report = compare.compare(
            recipe, "single", repeats="2", steps="40", output=tmp_path / str(number)
        )
        assert [row["mode"] for row in report["entries"]] == ["single"]
        assert report["entries"][0]["samples_per_sec"]


@pytest.mark.slow
def test_through_the_command_line(full, tmp_path):
    """The full count runs all seven modes.

    The fast tests run two modes of one process, and one that is refused.
    """
    modes = MODES if full else ("single", "split")
    words = [
        "recipe=digits",
        f"modes=[{','.join(modes)},hogwild sync_bn=true]",
        *SMALL,
        "repeats=1",
        "steps=12",
    ]
    completed = ok(
        "compare",
        *words,
        f"output={tmp_path / 'out'}",
        "logging.warmup_steps=1",
        cwd=tmp_path,
        timeout=600,
    )
    report = json.loads((tmp_path / "out/compare.json").read_text())
    *table, refused = report["entries"]
    assert [row["mode"] for row in table] == list(modes)
    for row in table:
        assert row["error"] is None and row["samples_per_sec"]["mean"] > 0 and row["train_loss"] > 0
        assert row["peak_memory_bytes"]
        assert row["step_time_s"] > 0
        assert f"{row['entry']}, repeat 1" in completed.stdout
        expected = {"single": "reference", "local_sgd": "other maths", "hogwild": "other maths"}
        assert row["exactness"]["verdict"] == expected.get(row["mode"], "exact"), row["exactness"]
    curves = {path.parent.name for path in (tmp_path / "out/tensorboard").glob("*/events*")}
    assert curves == {*modes}, "the curves of all in one chart"
    assert refused["exit_code"] == 2 and "sync_bn=true " in refused["error"]
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"compare.png"}
    # One repeat shows no difference; runs that other processes disturbed are not compared.
    assert re.search(r"\brepeats=2\b|\bresume=auto\b", completed.stdout)
    assert not completed.stderr
