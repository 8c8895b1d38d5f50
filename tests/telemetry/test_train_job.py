"""Progress of a TrainJob: reported as Kubeflow Trainer wants it, and never in the run's way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.command_line import ok
from tests.commands.submit.schemas import problems
from trainer.telemetry import train_job
from trainer.telemetry.train_job import TrainJobProgress

BUSY = ["logging.progress=false", "logging.every_steps=1", "logging.tensorboard=false"]


class Controller(HTTPServer):
    """Keeps what it is sent, and answers with `code`, after `pause` seconds."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reports: list[dict[str, object]] = []
        self.tokens: list[str | None] = []
        self.code, self.pause = 200, 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"


class Handler(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        self.server.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.tokens.append(self.headers["Authorization"])
        time.sleep(self.server.pause)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def controller() -> Iterator[Controller]:
    server = Controller()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def status(report: dict[str, object]) -> dict[str, object]:
    assert problems("status", report) == []
    found = report["trainerStatus"]
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_a_run_reports_its_progress_and_its_end(controller: Controller, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    variables = {train_job.URL: controller.url, train_job.TOKEN: str(token), "http_proxy": "http://127.0.0.1:9"}
    words = ["recipe=digits", "mode=single", "model.name=mlp", "epochs=2", *BUSY, f"output={tmp_path / 'run'}"]
    ok(*words, env=variables)
    last = status(controller.reports[-1])
    assert last["progressPercentage"] == 100 and last["estimatedRemainingSeconds"] == 0
    metrics = {metric["name"]: float(metric["value"]) for metric in last["metrics"]}  # type: ignore[attr-defined]
    assert 0 < metrics["val/top1"] <= 1 and metrics["train/loss"] > 0
    assert set(controller.tokens) == {"Bearer secret"}
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.*json"))


def test_the_newest_state_now_and_then(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.3)
    job = TrainJobProgress({train_job.URL: controller.url}, print)
    for step in range(50):
        job.progress(step, 200, 200.0 - step)
        time.sleep(0.02)
    job.close(completed=False)
    shares = [status(report)["progressPercentage"] for report in controller.reports]
    assert 2 <= len(shares) <= 8 and shares[0] == 0 and shares[-1] == 24  # stopped: as far as it came
    assert status(controller.reports[-1])["estimatedRemainingSeconds"] == 151


def test_all_steps_are_not_the_end(controller: Controller) -> None:
    job = TrainJobProgress({train_job.URL: controller.url}, print)
    job.progress(10, 10, 0.0)  # there is still to evaluate and to save
    job.close(completed=False)
    assert {status(report)["progressPercentage"] for report in controller.reports} == {99}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "pause"), [(500, 0.0), (403, 0.0), (200, 3.0)])
def test_a_controller_in_trouble_holds_nothing_up(
    controller: Controller, code: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.1)
    monkeypatch.setattr(train_job, "ANSWER", 0.5)
    controller.code, controller.pause = code, pause
    told: list[str] = []
    job = TrainJobProgress({train_job.URL: controller.url}, told.append)
    longest = 0.0
    end = time.monotonic() + 2
    while time.monotonic() < end:
        before = time.monotonic()
        job.progress(1, 10, 9.0)
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.05)
    before = time.monotonic()
    job.close(completed=True)
    assert longest < 0.4 and time.monotonic() - before < 3
    assert len(told) == 1 and "the run goes on" in told[0]


def test_a_missing_token_is_a_warning(controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.1)
    told: list[str] = []
    job = TrainJobProgress({train_job.URL: controller.url, train_job.TOKEN: str(tmp_path / "none")}, told.append)
    for _ in range(10):
        job.progress(1, 10, None)
        time.sleep(0.1)
    job.close(completed=True)
    assert len(told) == 1 and not controller.reports
