"""Runs and measurements in fresh processes: how they end, and the messages about that."""

import pytest

from tests.commands.prove.proofs import DEVICES
from trainer.commands.prove import cards, find_devices
from trainer.commands.prove.check_runner import CheckRunner, Devices
from trainer.devices.cards import Cards
from trainer.errors import RecipeError, SetupError

pytestmark = pytest.mark.usefixtures("warm_commands")
SHORT = ["recipe=digits", "mode=single", "max_steps=2", "epochs=1", "logging.warmup_steps=0"]


@pytest.mark.slow
def test_a_run_that_is_there_is_not_done_again_but_where_it_is_timed(tmp_path):
    one = CheckRunner(tmp_path, DEVICES, {})
    first = one.train("x", SHORT)
    assert (first["steps"], first["status"]) == (2, "completed")
    assert (one.path("x") / "last.safetensors").exists()
    assert one.train("x", SHORT) == first, "the same run, found"
    again = one.train("x", SHORT, timed=True)
    assert again["seconds"] != first["seconds"]
    assert not (one.path("x") / "last.safetensors").exists()
    assert one.train("x", [*SHORT, "seed=1"])["steps"] == 2, "of other words another run"


def test_words_of_devices():
    assert DEVICES.in_ranks(2) == ["devices=[cpu]", "nproc=2"]
    cards = Devices(("cuda:1", "cuda:3"), "cuda", ("A", "A"))
    assert cards.in_ranks(2) == ["devices=[cuda:1,cuda:3]", "nproc=2"]
    assert cards.in_one_process() == ["devices=[cuda:1]"]
    assert cards.in_one_process(3) == ["devices=[cuda:1,cuda:3,cuda:1]"], (
        "a device may stand for several"
    )
    assert (DEVICES.called(1), DEVICES.called(2), cards.called(2)) == (
        "1 CPU process",
        "2 CPU processes",
        "2 GPUs",
    )


def test_devices_that_are_named(monkeypatch):
    monkeypatch.setattr(cards, "detect", lambda: Cards(0, SetupError("the driver is too old")))
    with pytest.raises(SetupError, match="too old"):
        find_devices(None)
    assert find_devices("[cpu,cpu]").count == 2, (
        "what is named is not kept from working by a card that does not"
    )
    monkeypatch.setattr(cards, "detect", lambda: Cards(2))
    for text, says in {
        "[cuda:0,cuda:0]": "names a card twice",
        "[cuda:0,cpu]": "must be GPUs or CPU processes",
        "[]": "must be GPUs or CPU processes",
        "[cuda:5]": "is not here",
        "tpu": "is not a device",
    }.items():
        with pytest.raises(RecipeError, match=says):
            find_devices(text)
