"""Features that an older torch lacks: known from its version alone, refused before torch is
imported, or replaced.
"""

from __future__ import annotations

import re
import tomllib

import pytest

import trainer as package
from tests.command_line import PROJECT, QUIET, losses, ok, trainer
from trainer import versions
from trainer.commands.compare.entries import build_entries
from trainer.recipe.checks import SPLIT_BACKWARD, TWO_PARTS
from trainer.versions import SINCE, VERSION, parse_release, torch_has


def test_this_version_is_that_of_the_package():
    assert tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    assert package.__version__ == VERSION


PIPE = ["recipe=digits", "mode=pipeline", "nproc=2"]


@pytest.mark.parametrize(
    ("version", "has_all_of"),
    [
        ("2.11.0", (2, 11)),
        ("2.13.0+cu130", (2, 13)),
        ("2.14.1+rocm7.2", (2, 14)),
        ("2.14.0+git1234abc", (2, 14)),
        ("2.13.0.post2", (2, 13)),
        ("2.14", (2, 14)),
        ("2.14.0a0+git1234abc", (2, 13)),  # built from the sources of any day
        ("2.14.0a0+ecf3bae40a.nv26.04", (2, 13)),
        ("2.15.0.dev20261101+cu130", (2, 14)),
        ("2.14.0rc3", (2, 13)),
        ("3.0.0", (3, 0)),
        ("3.0.0a0", (3, -1)),  # older than 3.0, newer than every 2
        ("not installed", None),
    ],
)
def test_a_version_has_all_older_features(version, has_all_of, monkeypatch):
    assert parse_release(version) == has_all_of
    monkeypatch.setattr(versions, "read_version", lambda name: version)
    for what, since in SINCE.items():
        assert torch_has(what) == (has_all_of is None or has_all_of >= since), what


def test_versions_are_asked_for_in_one_place():
    """A row that pyproject.toml's lowest torch has reached must be removed."""
    text = (PROJECT / "pyproject.toml").read_text()
    lowest = re.search(
        r"torch>=([\d.]+)", " ".join(tomllib.loads(text)["project"]["dependencies"])
    )[1]
    assert all(since > parse_release(lowest) for since in SINCE.values())
    files = {path: path.read_text() for path in (PROJECT / "trainer").rglob("*.py")}
    used = "".join(files.values())
    assert all(used.count(f'"{what}"') > 1 for what in SINCE), "its row, and where it is asked for"
    asking = re.compile(
        r"TorchVersion|__version__\s*([<>]|==)|version_info|hasattr\((torch|dist|nn|F)\b"
    )
    assert [path.name for path, content in files.items() if asking.search(content)] == []


@pytest.fixture
def older(tmp_path):
    """Return an environment in which torch claims to be 2.13 and cannot be imported."""
    (tmp_path / "older" / "torch-2.13.0.dist-info").mkdir(parents=True)
    (tmp_path / "older" / "torch-2.13.0.dist-info" / "METADATA").write_text(
        "Name: torch\nVersion: 2.13.0+cu130\n"
    )
    (tmp_path / "older" / "torch.py").write_text("raise AssertionError('torch is imported')")
    return {"PYTHONPATH": f"{tmp_path / 'older'}:{PROJECT}"}


@pytest.mark.slow(cases=["dualpipev-plan", "interleavedzerobubble-train", "dualpipev-train"])
@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_combinations_that_crash_are_refused_at_once(schedule, command, older):
    completed = trainer(command, *PIPE, f"pipeline.schedule={schedule}", env=older, python=["-B"])
    major, minor = SINCE[TWO_PARTS]
    assert completed.returncode == 2 and completed.stdout == "", completed.stderr
    advice = "use pipeline.schedule=interleaved1f1b, 1f1b, gpipe or loopedbfs"
    names = f"pipeline.schedule={schedule}", f"torch {major}.{minor} ", "2.13.0+cu130", advice
    assert all(name in completed.stderr for name in names) and completed.stderr.count("\n") == 1, (
        completed.stderr
    )
    assert not re.search("|".join(SPLIT_BACKWARD), advice)


def test_a_comparison_leaves_a_refused_schedule_out(monkeypatch):
    monkeypatch.setattr(versions, "read_version", lambda name: "2.13.0")
    entry, other = build_entries(
        "digits", modes=["pipeline pipeline.schedule=zbv", "pipeline"], nproc="2"
    )
    assert entry.problem.code == 2
    assert re.search(r"\bzbv .*\btorch 2\.14 ", str(entry.problem))
    assert other.problem is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "pipeline"])
def test_replacements_for_missing_features_train_the_same(mode, tmp_path):
    """The first stage's check differs below 2.12 and buffers below 2.13; newer versions accept both
    forms.
    """
    says = "from trainer import versions\nversions.read_version = lambda name: '2.11.0'\n"
    (tmp_path / "says_older.py").write_text(says)
    words = ["recipe=digits", f"mode={mode}", "nproc=2", "model.name=cnn", "max_steps=3", *QUIET]
    words += ["pipeline.microbatches=4"] if mode == "pipeline" else []
    ok(*words, f"output={tmp_path / 'now'}")
    older = {"PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    ok(*words, "plugin=says_older", f"output={tmp_path / 'older'}", env=older)
    assert losses(tmp_path / "older") == losses(tmp_path / "now")
