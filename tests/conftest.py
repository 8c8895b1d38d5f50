"""Options of the test run: `--slow` adds tests of several seconds, `--all` the full counts, `-m
gpu` runs tests on a CUDA device.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
import warnings
from collections.abc import Iterator

import pytest

from tests import warm

# Before torch is imported; see `tests.command_line.environment`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's `&` ignores this signal for all its child processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # The command nohup ignores this signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
_numbers = itertools.count()
warm.start_requested_warm()  # multiprocessing's servers need not import torch either


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests of several seconds too")
    parser.addoption(
        "--all", action="store_true", help="and the full counts instead of a sample of each"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees the machine's cards: other tests are the same on every machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the processes that run tests warm, except if they use a GPU, because CUDA does not
    survive a fork.
    """
    if config.option.markexpr != "gpu":
        warm.start_all_warm()


@pytest.fixture(autouse=True)
def _same_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Restore the environment after each test, and use a new folder for files that a run keeps for
    this machine.
    """
    before = {**os.environ}
    os.environ["TRAINER_DATA"] = f"{tmp_path_factory.getbasetemp()}/kept-{next(_numbers)}"
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _room_on_the_card(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Allow GPU tests to run at the same time, except those that fill the memory of the GPU."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "card").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "too_many" in request.fixturenames else fcntl.LOCK_SH)
        yield


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Put back the threads and warnings of this process, which a worker of predict sets."""
    import torch

    before = torch.get_num_threads()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def warm_commands() -> Iterator[None]:
    """Commands that the code under test starts from this process are forked warm too."""
    warm.start_all_warm()
    yield
    warm.start_requested_warm()


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full counts are wanted."""
    return bool(request.config.getoption("--all"))


def _find_marker(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the marker `slow` or `full` of a test, if it applies to the test's parameters.

    A marker with `cases` applies to the parameters with these ids, one with `but` to all others.
    """
    for marker in item.iter_markers(name):
        cases = marker.kwargs.get("cases")
        exceptions = marker.kwargs.get("but", ())
        if cases is None and not exceptions:
            return marker
        chosen = item.callspec.id
        if chosen not in exceptions and (cases is None or chosen in cases):
            return marker
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if marker := _find_marker(item, "full"):
                reason = next(iter(marker.args), "one of several alike, or long")
                item.add_marker(pytest.mark.skip(reason=f"{reason}: --all"))
            elif _find_marker(item, "slow") and not config.getoption("--slow"):
                item.add_marker(pytest.mark.skip(reason="takes seconds: --slow"))
    from trainer.recipe.checks import list_refused_schedules

    refused = re.compile(rf"\b({'|'.join(list_refused_schedules())})\b")
    for item in items if list_refused_schedules() else ():
        if hasattr(item, "callspec") and refused.search(str(item.callspec.params)):
            item.add_marker(pytest.mark.skip(reason="of a schedule that needs a newer torch"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        from trainer.devices import cards

        if not cards.detect().count:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and -m gpu"))
