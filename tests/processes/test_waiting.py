"""A process that waits for others says so after some seconds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.command_line import QUIET, free_port, trainer
from trainer.processes import terminal
from trainer.processes.silence import call_within
from trainer.processes.terminal import explain_delay


def test_a_word_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with explain_delay(lambda: "too soon"):
        pass
    monkeypatch.setattr(terminal, "PATIENCE", 0.01)
    with explain_delay(lambda: "node 0 waits"):
        time.sleep(0.5)
    with explain_delay(lambda: ""):
        time.sleep(0.5)
    assert capsys.readouterr().err == "trainer: node 0 waits\n"


def test_a_hanging_call_is_abandoned() -> None:
    assert call_within(60, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        call_within(60, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        call_within(0.2, lambda: time.sleep(20))


WAITING = [
    (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "rank 0 waits for the other of 2 at 127.0.0.1:{port}, as RANK and WORLD_SIZE",
    ),
    (
        {"NNODES": "2", "NODE_RANK": "0"},
        "node 0 waits for the other of 2 nodes at 127.0.0.1:{port}, 7 s at most: start them with "
        "NODE_RANK=1",
    ),
]


def waiting(
    variables: dict[str, str], says: str, folder: Path
) -> tuple[CompletedProcess[str], str]:
    """Return a run that waits for others in vain, and its messages."""
    port = free_port()
    words = ["recipe=digits", "model.name=mlp", "devices=[cpu]", "timeout=7", "max_steps=1", *QUIET]
    ours = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return trainer(*words, f"output={folder}", env=ours), says.format(port=port)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    """And it keeps no other run out of the folder."""
    with ThreadPoolExecutor() as both:
        waits = [
            both.submit(
                waiting,
                *case,
                tmp_path / str(place),
            )
            for place, case in enumerate(WAITING)
        ]
    for finished, says in (wait.result() for wait in waits):
        assert f"trainer: {says}" in finished.stderr
        assert finished.returncode in (3, 7) and "Traceback" not in finished.stderr
    assert not any(tmp_path.iterdir())
