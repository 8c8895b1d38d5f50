"""Published weights: fetched once a machine, and one line where they cannot be had."""

import re

import pytest
import torch
import torchvision

from tests.command_line import PROJECT, QUIET, trainer
from trainer.errors import RecipeError, SetupError
from trainer.models import torchvision_zoo, zoo
from trainer.recipe import ModelRecipe

NAME, FILE = "squeezenet1_1", "squeezenet1_1-b8a52dc0.pth"
HUB = """
import sys, time, torch, torchvision

def download(url, place, *more, **options):
    print("Downloading", url, file=sys.stderr, flush=True)
    time.sleep(2)  # so that the other rank comes while it lasts
    {what}

torch.hub.download_url_to_file = download
"""
SAVE = "torch.save(torchvision.models.squeezenet1_1().state_dict(), place)"
FAIL = "raise ConnectionResetError('the line broke')"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Where torch keeps what it downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


def two_ranks(tmp_path, what):
    (tmp_path / "hubs.py").write_text(HUB.format(what=what))
    words = ["recipe=digits", "plugin=hubs", "data.channels=3", "data.image_size=32", f"model.name={NAME}"]
    words += ["model.weights=DEFAULT", "batch_size=64", "epochs=1"]
    words += [*QUIET, "mode=ddp", f"output={tmp_path / 'run'}"]
    known = {"NPROC": "2", "TORCH_HOME": str(tmp_path / "torch"), "PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    return trainer(*words, env=known, cwd=tmp_path)


@pytest.mark.slow
def test_two_ranks_download_once(tmp_path):
    done = two_ranks(tmp_path, SAVE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Downloading") == 1, done.stderr


def test_where_one_could_not_the_other_does_not_try(tmp_path):
    done = two_ranks(tmp_path, FAIL)
    assert done.returncode == 3 and done.stderr.count("Downloading") == 1, done.stderr
    assert re.search(r"model\.weights=DEFAULT .*the line broke.*https://", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and then nothing", b"<html>no such file</html>"])
def test_a_damaged_file_is_named(hub, content):
    hub.mkdir(parents=True)
    (hub / FILE).write_bytes(content)
    with pytest.raises(SetupError, match=rf"{FILE} .*\bremove\b"):
        zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)


def test_no_memory_is_no_damage(hub, monkeypatch):
    hub.mkdir(parents=True)
    (hub / FILE).write_bytes(b"")

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    monkeypatch.setattr(torchvision.models._api.WeightsEnum, "get_state_dict", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)


def test_what_is_there_needs_no_lock(hub):
    hub.mkdir(parents=True)
    model = torchvision.models.get_model(NAME)
    torch.save(model.state_dict(), hub / FILE)
    found = zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)
    assert torch.equal(found.features[0].weight, model.features[0].weight)
    assert [path.name for path in hub.iterdir()] == [FILE]


def test_names_that_are_not_published():
    with pytest.raises(RecipeError, match=r"BEST.*\bIMAGENET1K_V1, DEFAULT"):
        torchvision_zoo.published(ModelRecipe(name=NAME, weights="BEST"))
