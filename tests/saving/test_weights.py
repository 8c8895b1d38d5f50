"""Weights for users: complete or absent, equal to the byte, and read from every kind of file."""

from __future__ import annotations

import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.saving.states import commit, flip, make, one_line, trace, whole
from trainer.errors import CheckpointError, DiskFullError
from trainer.processes import faults
from trainer.saving.weights import read_metadata, read_weights, save_weights


def test_weight_files_are_synced_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = trace(monkeypatch)
    save_weights(tmp_path / "last.safetensors", {"w": torch.ones(3)}, {})
    draft = ".last.safetensors"
    expected = [
        f"write {draft}",
        f"write {draft}",
        f"fsync {draft}",
        f"replace {draft}",
        f"fsync {tmp_path.name}",
    ]
    assert calls == expected


@pytest.mark.parametrize("point", ["write", "fsync", "rename"])
def test_a_disk_full_under_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = tmp_path / "last.safetensors"
    save_weights(path, {"w": torch.ones(3)}, {})
    monkeypatch.setattr(faults, "is_active", True)
    monkeypatch.setenv("TRAINER_FAULT", f"full@weights:{point}")
    with pytest.raises(DiskFullError):
        save_weights(path, {"w": torch.zeros(3)}, {})
    assert os.listdir(tmp_path) == [path.name]
    assert read_weights(path)[0]["w"].all()


def test_weight_files(tmp_path: Path) -> None:
    tied = torch.randn(4, 3)
    tensors = {
        "a": tied,
        "b": tied,
        "c": tied.t(),
        "n": torch.tensor(5),
    }
    metadata = {"ema": "true", "top1": "0.98", "recipe": "digits", "é": "ü"}
    path = tmp_path / "last.safetensors"
    save_weights(path, tensors, metadata)
    actual, message = read_weights(path)
    assert all(torch.equal(actual[name], tensors[name]) for name in tensors)
    assert actual.keys() == tensors.keys()
    assert message == {"format": "pt", **metadata}
    assert read_weights(tmp_path)[1] == message
    with safe_open(path, "pt") as file:  # the library itself agrees
        assert file.metadata() == message and sorted(file.keys()) == sorted(tensors)
    before = path.read_bytes()
    for _ in range(5):
        save_weights(path, tensors, dict(reversed(metadata.items())))
        assert path.read_bytes() == before  # equal weights are equal files
    assert os.listdir(tmp_path) == [path.name]


def test_weights_of_a_checkpoint_are_averaged_where_it_has_them(tmp_path: Path) -> None:
    state = make(4)
    for name in ("plain", "averaged"):
        (tmp_path / name).mkdir()
    path = commit(tmp_path / "plain", state, keep=2)
    actual, message = read_weights(path)
    assert message == {"format": "pt", "weights": "model", "step": "4", "epoch": "0"}
    assert torch.equal(actual["fc.weight"], state.tensors("model")["fc.weight"])
    state.shards.update(whole({"ema": {"fc.weight": torch.zeros(2, 32)}}))
    actual, message = read_weights(commit(tmp_path / "averaged", state, keep=2))
    assert message["weights"] == "ema"
    assert not actual["fc.weight"].any()
    assert actual["bn.num_batches_tracked"] == 4
    flip(path / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match="damaged"):
        read_weights(path)


@pytest.mark.parametrize("wrap", [None, "model", "state_dict"])
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_weights_of_torch_files(tmp_path: Path, wrap: str | None, suffix: str) -> None:
    weights = {"w": torch.ones(2)}
    torch.save({wrap: weights, "epoch": 3} if wrap else weights, tmp_path / f"x{suffix}")
    actual, message = read_weights(tmp_path / f"x{suffix}")
    assert list(actual) == ["w"]
    assert torch.equal(actual["w"], torch.ones(2))
    assert message == {}


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_hostile_pickle_is_not_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    torch.save({"w": torch.ones(2), "x": Hostile(target)}, tmp_path / "zip.pt")
    torch.save({"x": Hostile(target)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Hostile(target)))
    for name in ("zip.pt", "old.pth", "raw.pt"):
        with pytest.raises(CheckpointError, match="executed") as caught:
            read_weights(tmp_path / name)
        assert caught.value.code == 4 and name in one_line(caught.value)
    (tmp_path / "raw.safetensors").write_bytes(pickle.dumps(Hostile(target)))
    with pytest.raises(CheckpointError, match=r"raw\.safetensors .*safetensors file"):
        read_weights(tmp_path / "raw.safetensors")
    assert not target.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert target.exists()  # or this test would prove nothing


def test_a_file_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", 8) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(
                name, plain.read(name) + (bytes(10**8) if name.endswith("data/0") else b"")
            )
    assert (tmp_path / "bomb.pt").stat().st_size < 10**6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"bomb\.pt.*executed") as caught:
        read_weights(tmp_path / "bomb.pt")
    one_line(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"
    assert read_weights(tmp_path / "plain.pt")[0]["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "run"])
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path, name: str) -> None:
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        put(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"/{name}\b[^(]*; .*\.safetensors\b"):
            read_weights(tmp_path / name)
        (tmp_path / name).unlink()


def test_weights_that_are_not_there_or_no_weights(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.safetensors", {"w": torch.ones(99)}, {"x": "y"})
    data = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-1])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "image.jpg").write_bytes(b"x")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "number.pt")
    (tmp_path / "run" / "x.safetensors").mkdir(parents=True)
    bad = [
        "absent",
        "run",
        "run/x.safetensors",
        "cut.safetensors",
        "empty.safetensors",
        "empty.pt",
        "image.jpg",
    ]
    for name in (*bad, "list.pt", "number.pt", "n" * 300, "absent/step-00000001"):
        with pytest.raises(CheckpointError, match="give") as caught:
            read_weights(tmp_path / name)
        assert caught.value.code == 4 and str(tmp_path / name) in one_line(caught.value)
    path = commit(tmp_path / "run", make(1), keep=2)
    # Killed before its first epoch ended.
    with pytest.raises(CheckpointError, match=f"give {path}"):
        read_weights(tmp_path / "run")


def test_metadata_of_weights(tmp_path: Path) -> None:
    """A checkpoint has no class names, but its run has."""
    run = tmp_path / "run"
    run.mkdir()
    assert (
        read_metadata(run)
        == read_metadata(tmp_path / "nowhere")
        == read_metadata(tmp_path / "a.pth")
        == {}
    )
    save_weights(run / "last.safetensors", {"w": torch.zeros(2)}, {"classes": '["a", "b"]'})
    checkpoint = commit(run, make(5), 2)
    for place in (run, run / "last.safetensors", checkpoint):
        assert read_metadata(Path(place))["classes"] == '["a", "b"]'
    (run / "last.safetensors").write_bytes(b"damaged")
    assert read_metadata(run) == {}
