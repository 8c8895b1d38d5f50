"""Arguments that become entries of a comparison."""

from tests.commands.trials.stand_in import listed
from trainer.commands.compare import entries
from trainer.commands.compare.entries import parse_modes
from trainer.recipe import MODES, TRAITS


def test_all_modes_run_on_two_cpu_devices(monkeypatch):
    monkeypatch.setattr("trainer.processes.resources.count_cores", lambda: 4)
    entries_by_name = listed()
    assert list(entries_by_name) == list(MODES)
    assert not any(entry.problem for entry in entries_by_name.values())
    for mode, traits in TRAITS.items():
        entry = entries_by_name[mode]
        expected = (2, 2) if traits.processes == "many" else (1, 4)
        assert (entry.ranks, entry.threads) == expected, mode
    assert "devices=[cpu]" in entries_by_name["single"].words
    assert "devices=[cpu,cpu]" in entries_by_name["dp"].words
    assert "threads=2" in entries_by_name["ddp"].words
    assert "nproc=2" in entries_by_name["ddp"].words
    with_threads = listed("threads=1", modes=["single", "ddp"])
    assert [entry.threads for entry in with_threads.values()] == [1, 1]
    assert with_threads["single"].words.count("threads=1") == 1


def test_an_entry_has_words_of_its_own():
    modes = ["single", "pipeline nproc=2 pipeline.microbatches=4", "ddp batch_size=64"]
    single, pipeline, ddp = entries.build_entries("digits", ["devices=[cpu]"], modes, nproc="4")
    assert (single.ranks, pipeline.ranks, ddp.ranks) == (1, 2, 4)
    assert ddp.recipe.batch_size == 64 and pipeline.recipe.pipeline.microbatches == 4


def test_keys_that_no_entry_reads():
    words = ["augment.crop_padding=3", "augment.crop=none", "pipeline.microbatches=2"]

    def find(*modes):
        rows = entries.build_entries("digits", words, modes)
        return [note.partition("=")[0] for note in entries.find_unused("digits", rows)]

    assert find("single", "ddp") == ["augment.crop_padding", "pipeline.microbatches"]
    assert find("single", "pipeline") == ["augment.crop_padding"]
    assert find("pipeline", "pipeline augment.crop=pad") == []


def test_which_entries_there_are():
    assert list(listed("mode=split")) == ["split"]
    assert list(listed(modes=["single", "single"])) == ["single", "single (2)"]


def test_modes_as_a_shell_gives_them():
    modes = ["single", "pipeline nproc=2", "ddp precision=bf16"]
    assert parse_modes('[single,"pipeline  nproc=2",ddp precision=bf16]') == modes
    assert parse_modes("ddp") == ["ddp"]
