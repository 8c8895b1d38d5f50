"""What is kept: whole at any moment, of one machine only, and damage is no reason to stop."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from trainer.commands.prove.check_runner import measured, right, wrong
from trainer.commands.prove.proving import HOME, KEPT, Kept, bound_to
from trainer.commands.trials.engine import claim
from trainer.errors import FolderInUseError

BOUND = {"machine": "a", "versions": "b", "devices": "cpu,cpu"}


def test_outcomes_come_back_as_they_were(tmp_path):
    one = Kept(tmp_path)
    one.keep("sums", replace(right("fine", done=24), seconds=3.2))
    one.keep("speed", measured("9 images/s", rate=9.0))
    one.keep("copies", wrong("odd", "mend it"))
    again = Kept(tmp_path)
    assert again.outcomes == {
        "sums": right("fine", done=24), "speed": measured("9 images/s", rate=9.0), "copies": wrong("odd", "mend it"),
    }  # fmt: skip
    assert [*again.done()] == ["sums", "speed"] and again.outcomes["sums"].seconds == 3.2


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", '{"checks": 3}', '{"checks": {"sums": {"status": "right"}}}', '{"checks": {"sums": 1}}'],
)
def test_damage_is_done_again(text, tmp_path):
    (tmp_path / KEPT).write_text(text)
    assert Kept(tmp_path).outcomes == {}


@pytest.mark.parametrize("key", BOUND)
def test_of_another_machine_versions_or_devices_it_is_refused(key, tmp_path):
    def held(bound):
        with claim(str(tmp_path / "proof"), HOME, "proof", KEPT, bound) as folder:
            return Kept(folder)

    held(BOUND).keep("sums", right("fine"))
    assert [*held(BOUND).outcomes] == ["sums"]
    with pytest.raises(FolderInUseError, match=rf"\bproof .*\b{key}\b.*output="):
        held({**BOUND, key: "c"})


def test_what_binds_names_nobody():
    found = bound_to({"cpu": "AMD", "gpus": []}, {"torch": "2.11"}, ("cpu", "cpu"))
    assert found.keys() == BOUND.keys() and found == bound_to(
        {"cpu": "AMD", "gpus": []}, {"torch": "2.11"}, ("cpu", "cpu")
    )
    assert found["versions"] != bound_to({"cpu": "AMD", "gpus": []}, {"torch": "2.12"}, ("cpu", "cpu"))["versions"]
    assert os.uname().nodename not in json.dumps(found).split('"')
