"""Stacks in the run folder, or on stderr without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.processes import stacks


@pytest.fixture(autouse=True)
def nowhere() -> None:
    stacks.write_to(None)
    yield
    stacks.write_to(None)


def test_a_traceback_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    stacks.write_to(tmp_path)
    assert (
        stacks.append("Traceback\n  one\n")
        == stacks.append("Traceback\n  two\n")
        == tmp_path / "stacks-rank3.txt"
    )
    text = (tmp_path / "stacks-rank3.txt").read_text()
    assert text.count(" rank 3\nTraceback\n  ") == 2 and text.index("one") < text.index("two")


def test_all_threads_in_the_run_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stacks.write_to(tmp_path)
    assert stacks.dump("silent").endswith(f" {tmp_path / 'stacks-rank0.txt'}")
    text = (tmp_path / "stacks-rank0.txt").read_text()
    assert " rank 0: silent\n" in text and "test_all_threads_in_the_run_folder" in text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("folder", [None, "absent"])
def test_stacks_without_a_run_folder_go_to_stderr(
    folder: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stacks.write_to(tmp_path / folder if folder else None)
    assert stacks.append("Traceback") is None
    assert stacks.dump("silent") == ""
    assert "test_stacks_without_a_run_folder_go_to_stderr" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
