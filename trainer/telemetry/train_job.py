"""Progress of a TrainJob of Kubeflow Trainer: how much is done, how long the rest takes, the newest figures.

Its controller (2.2 or newer, with its feature TrainJobStatus) tells each pod where by three variables; `kubectl get
trainjob NAME -o jsonpath={.status.trainerStatus}` then shows it. A thread sends it, so that no step waits.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
EVERY = 10.0  # seconds between two reports
ANSWER = 5.0  # seconds in which the controller must take one


class TrainJobProgress:
    """Reports the newest state of a run, at most every `EVERY` seconds and at its end."""

    def __init__(self, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._url = environment[URL]
        self._certificate, self._token = environment.get(CERTIFICATE), environment.get(TOKEN)
        self._say = say
        self._figures: dict[str, float] = {}
        self._state: tuple[int, int | None] = (0, None)  # per cent, seconds left
        self._changed, self._ended = threading.Event(), threading.Event()
        self._reason = ""
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="train job", daemon=True)
        self._thread.start()

    def scalars(self, values: Mapping[str, float]) -> None:
        """The newest figures, by TensorBoard's tags; those of training and of the held-out images are reported."""
        self._figures |= {tag: value for tag, value in values.items() if tag.startswith(("train/", "val/"))}

    def progress(self, step: int, total: int, left: float | None) -> None:
        """Training is at this step of so many; `left` in seconds."""
        self._state = (min(99, 100 * step // max(1, total)), None if left is None else round(left))
        self._changed.set()
        if self._reason and not self._warned:
            self._warned = True
            self._say(f"warning: the TrainJob's progress is not reported, and the run goes on ({self._reason})")

    def close(self, completed: bool) -> None:
        """Report the end; does not wait long for it."""
        if completed:
            self._state = (100, 0)
        self._ended.set()
        self._changed.set()
        self._thread.join(ANSWER + 1)

    def _work(self) -> None:
        while not self._ended.is_set():
            self._changed.wait()
            self._changed.clear()
            if not self._ended.is_set():
                self._report()
                self._ended.wait(EVERY)
        self._report()

    def _report(self) -> None:
        try:
            self._post()
        except Exception as error:  # whatever a network may answer; the next report is tried all the same
            self._reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def _post(self) -> None:
        percent, left = self._state
        status: dict[str, Any] = {
            "progressPercentage": percent,
            "metrics": [{"name": tag, "value": f"{value:.6g}"} for tag, value in dict(self._figures).items()],
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if left is not None:
            status["estimatedRemainingSeconds"] = left
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {Path(self._token).read_text().strip()}"  # it is renewed there
        request = Request(self._url, json.dumps({"trainerStatus": status}).encode(), headers)
        context = ssl.create_default_context(cafile=self._certificate)
        with build_opener(ProxyHandler({}), HTTPSHandler(context=context)).open(request, timeout=ANSWER):
            self._reason = ""
