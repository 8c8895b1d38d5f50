"""Words -> entries."""

from trainer.commands.compare import entries
from trainer.commands.compare.entries import parse_modes
from trainer.recipe import MODES

SMALL = ["model.name=cnn_gn", "devices=[cpu,cpu]", "batch_size=32", "optimizer.lr=0.01"]


def listed(*words, modes=None, **options):
    """Entries on a small model, by name."""
    return {entry.name: entry for entry in entries.entries("digits", [*SMALL, *words], modes, **options)}


def test_all_modes_run_on_two_cpu_devices(monkeypatch):
    monkeypatch.setattr("trainer.processes.resources.cores", lambda: 4)
    found = listed()
    assert list(found) == list(MODES) and not any(entry.problem for entry in found.values())
    assert {name: (entry.ranks, entry.threads) for name, entry in found.items()} == {
        "single": (1, 4), "dp": (1, 4), "ddp": (2, 2), "split": (1, 4), "pipeline": (1, 4), "fsdp": (2, 2),
        "local_sgd": (2, 2), "hogwild": (2, 2),
    }  # fmt: skip
    assert "devices=[cpu]" in found["single"].words and "devices=[cpu,cpu]" in found["dp"].words
    assert "threads=2" in found["ddp"].words and "nproc=2" in found["ddp"].words
    given = listed("threads=1", modes=["single", "ddp"])
    assert [entry.threads for entry in given.values()] == [1, 1] and given["single"].words.count("threads=1") == 1


def test_an_entry_has_words_of_its_own():
    modes = ["single", "pipeline nproc=2 pipeline.microbatches=4", "ddp batch_size=64"]
    single, pipeline, ddp = entries.entries("digits", ["devices=[cpu]"], modes, nproc="4")
    assert (single.ranks, pipeline.ranks, ddp.ranks) == (1, 2, 4)
    assert ddp.recipe.batch_size == 64 and pipeline.recipe.pipeline.microbatches == 4


def test_which_entries_there_are():
    assert list(listed("mode=split")) == ["split"]
    assert list(listed(modes=["single", "single"])) == ["single", "single (2)"]


def test_modes_as_a_shell_gives_them():
    modes = ["single", "pipeline nproc=2", "ddp precision=bf16"]
    assert parse_modes('[single,"pipeline  nproc=2",ddp precision=bf16]') == modes
    assert parse_modes("ddp") == ["ddp"]
