"""What all tests share: `--slow` for what takes seconds, `--all` for full counts too, `-m gpu` for a CUDA device."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests import warm

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; see `tests.command_line.environment`
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, and all that is started from here
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
_numbers = itertools.count()
warm.what_is_asked_for()  # multiprocessing's servers need not import torch either


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests of several seconds too")
    parser.addoption("--all", action="store_true", help="and the full counts instead of a sample of each")


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees the machine's cards: other tests are the same on every machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """The processes that run tests are forked warm too; not where they use a GPU, which goes with no fork."""
    if config.option.markexpr != "gpu":
        warm.everything()


@pytest.fixture(autouse=True)
def _same_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a run in this process sets for libraries is gone with its test, and what it keeps for this machine."""
    before = {**os.environ}
    os.environ["TRAINER_DATA"] = f"{tmp_path_factory.getbasetemp()}/kept-{next(_numbers)}"
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _room_on_the_card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that need a GPU may run side by side, but for those that fill it."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "card").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "too_many" in request.fixturenames else fcntl.LOCK_SH)
        yield


@pytest.fixture
def warm_commands() -> Iterator[None]:
    """Commands that the code under test starts from this process are forked warm too."""
    warm.everything()
    yield
    warm.what_is_asked_for()


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full counts are wanted."""
    return bool(request.config.getoption("--all"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if marker := item.get_closest_marker("full"):
                reason = next(iter(marker.args), "one of several alike, or long")
                item.add_marker(pytest.mark.skip(reason=f"{reason}: --all"))
            elif item.get_closest_marker("slow") and not config.getoption("--slow"):
                item.add_marker(pytest.mark.skip(reason="takes seconds: --slow"))
    from trainer.recipe.checks import refused_schedules

    refused = re.compile(rf"\b({'|'.join(refused_schedules())})\b")
    for item in items if refused_schedules() else ():
        if hasattr(item, "callspec") and refused.search(str(item.callspec.params)):
            item.add_marker(pytest.mark.skip(reason="of a schedule that needs a newer torch"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        from trainer.devices import cards

        if not cards.detect().count:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and -m gpu"))
