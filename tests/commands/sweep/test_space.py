"""Meaning of arguments: which keys vary, over which values, and where trials run."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from trainer.commands import sweep
from trainer.commands.sweep import space
from trainer.commands.sweep.space import Dimension, SearchSpace, parse_dimension
from trainer.errors import RecipeError, SetupError
from trainer.processes import resources
from trainer.recipe.reflection import defaults, list_key_types

BAD = [
    (["epochs=3"], "type the values to try, as in optimizer.lr=[0.01,0.03,0.1]"),
    (["optimizer.lr=[0.1]"], "optimizer.lr=0.1 is one trial"),
    (["optimizer.lr=[]"], "lists no values"),
    (["optimizer.lr=[0.1,1e-1]"], "values that are the same"),
    (["optimizer.lr=[0.1,-1]"], "a trial with optimizer.lr=-1 cannot run"),
    (["optimizer.lrr=[0.1,0.2]"], "did you mean optimizer.lr?"),
    (["optimizer.lr=0.1", "optimizer.lr=[0.1,0.2]"], "given twice"),
    (["optimizer.lr=1..0.1"], "two numbers, the smaller first, as in optimizer.lr=0.001..0.1"),
    (["batch_size=1.5..8"], "two whole numbers"),
    (["data.mean=[[0.5],[0.5,0.5]]"], "a trial with data.mean=[0.5,0.5] cannot run"),
    (["devices=[[cpu],[cpu,cpu]]"], "where trials run"),
    (["mode=[single,ddp]"], "compare 'modes=[...]'"),
    (
        ["optimizer.lr=[0.1,0.2]", "trials=5"],
        "lists are tried in every combination, here 2: trials= is for ranges",
    ),
    (["seed=[1,2]", "repeats=3"], "keep repeats="),
    (["optimizer.lr=[0.1,0.2]", "resume=never"], "may be left out"),
    (["batch_size=[96,97]", "mode=local_sgd", "nproc=2"], "a trial with batch_size=97 cannot run"),
    (
        [
            "seed=[" + ",".join(map(str, range(40))) + "]",
            "epochs=[" + ",".join(map(str, range(1, 40))) + "]",
        ],
        "1,560",
    ),
]


@pytest.mark.parametrize(
    ("words", "says"), BAD, ids=lambda value: " ".join(value)[:60] if value else "none"
)
def test_arguments_that_no_trial_can_run_with_are_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RecipeError) as caught:
        sweep.command(["recipe=digits", *words])
    line = str(caught.value)
    assert says in line and "\n" not in line and not list(tmp_path.iterdir())


def test_a_range_without_optuna_says_what_to_install_and_what_to_type_instead(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SetupError, match=r"install optuna, .*: optimizer\.lr=\[0\.001,1\]$"):
        sweep.command(["recipe=digits", "optimizer.lr=0.001..1"])


def over(key: str, low: float, high: float, whole: bool = False) -> Dimension:
    texts = [str(int(end)) if whole else f"{end:.12g}" for end in (low, high)]
    return Dimension(key, tuple(texts), (float(low), float(high)), whole)


# [96,128] are two squares.
SIZES = ("data.image_size", "data.cache_size", "data.train_size", "data.resize")
LISTS = [key for key, taken in list_key_types().items() if list in taken and key not in SIZES]


def test_a_list_is_taken_for_values_only_where_it_is_not_the_value():
    for key in defaults():
        assert (parse_dimension(key, "[1,2]") is None) == (key in LISTS), key
        assert parse_dimension(key, "[[1],[2]]") == Dimension(key, ("[1]", "[2]"))
        assert parse_dimension(key, "1") is None
    assert parse_dimension("shares", "[auto,null]") == Dimension("shares", ("auto", "null"))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optimizer.lr=0.001..1", over("optimizer.lr", 0.001, 1.0, whole=False)),
        ("optimizer.lr=1e-3..1E-1", over("optimizer.lr", 0.001, 0.1, whole=False)),
        ("batch_size=16..256", over("batch_size", 16.0, 256.0, whole=True)),
        ("optimizer.lr=[0.1, 1e-2]", Dimension("optimizer.lr", ("0.1", "1e-2"))),
        ("clip_grad_norm=[null,1.0]", Dimension("clip_grad_norm", ("null", "1.0"))),
        ("model.name=[cnn,'mlp']", Dimension("model.name", ("cnn", "mlp"))),
        (
            "augment.crop_scale=[[0.1,1.0],[0.5,1]]",
            Dimension("augment.crop_scale", ("[0.1,1.0]", "[0.5,1]")),
        ),
        (
            "loss.class_weights=[balanced,[1,2]]",
            Dimension("loss.class_weights", ("balanced", "[1,2]")),
        ),
        ("data.root=a..b", None),
        ("optimizer.lr=0.1,0.2", Dimension("optimizer.lr", ("0.1", "0.2"))),
        ("data.fold=1/3,2/3", Dimension("data.fold", ("1/3", "2/3"))),
        # A path and a list of names may contain a comma.
        ("data.root=a,b", None),
        ("model.freeze=a,b", None),
        ("nproc=[1,2]", None),
    ],
)
def test_arguments_become_dimensions(word, meant):
    assert parse_dimension(*word.split("=", 1)) == meant


def test_a_range_has_a_scale_and_short_numbers_within_it():
    assert [over("k", low, 1.0).log for low in (0.0, 0.1, 0.11)] == [False, True, False]
    part = over("optimizer.lr", 0.12342, 0.2)
    assert part.typed(0.123421) == "0.12342" and part.typed(0.15555555) == "0.1556"
    assert over("batch_size", 16, 64, whole=True).typed(17) == "17"


def of(
    *words: str,
    nproc: str | None = None,
    repeats: int = 1,
) -> SearchSpace:
    return SearchSpace("digits", words, repeats, None, nproc, None)


def places(
    cores: int, *words: str, cuda: int = 0, monkeypatch: pytest.MonkeyPatch, **options
) -> list[Sequence[str]]:
    monkeypatch.setattr(resources, "count_cores", lambda: cores)
    monkeypatch.setattr(resources, "count_cuda_devices", lambda *_: cuda)
    return of("seed=[1,2,3,4,5]", *words, **options).places()


def test_on_cpus_each_core_trains_one(monkeypatch):
    assert places(2, monkeypatch=monkeypatch) == [["devices=[cpu]", "threads=1"]] * 2
    # No more than runs.
    assert places(16, monkeypatch=monkeypatch) == [["devices=[cpu]", "threads=3"]] * 5
    assert places(4, "threads=2", monkeypatch=monkeypatch) == [["devices=[cpu]", "threads=2"]] * 2
    assert (
        places(4, "devices=[cpu]", monkeypatch=monkeypatch) == [["devices=[cpu]", "threads=1"]] * 4
    )
    assert (
        places(4, "devices=[cpu,cpu]", monkeypatch=monkeypatch)
        == [["devices=[cpu]", "threads=2"]] * 2
    )
    # The two readers must not read at the same time.
    photos = (
        "data.name=imagefolder",
        "data.root=photos",
        "batch_size=32",
    )
    assert (
        places(4, *photos, monkeypatch=monkeypatch)
        == [["devices=[cpu]", "threads=1", "data.workers=1"]] * 4
    )


def test_trials_of_several_processes_take_as_many_cores(monkeypatch):
    words = ["devices=[cpu]", "threads=1", "nproc=2"]
    assert places(4, "mode=local_sgd", nproc="2", monkeypatch=monkeypatch) == [words] * 2
    # One process uses all devices.
    streams = (
        "devices=[cpu,cpu]",
        "mode=pipeline",
        "batch_size=96",
    )
    assert places(4, *streams, monkeypatch=monkeypatch) == [
        ["devices=[cpu,cpu]", "threads=4", "nproc=1"]
    ]


def test_on_gpus_each_card_trains_one(monkeypatch):
    assert places(8, cuda=2, monkeypatch=monkeypatch) == [
        [f"devices=[cuda:{n}]", "threads=4"] for n in range(2)
    ]
    assert places(8, "devices=[cuda:1]", cuda=2, monkeypatch=monkeypatch) == [
        ["devices=[cuda:1]", "threads=8"]
    ]
    pairs = places(8, "mode=ddp", cuda=4, nproc="2", monkeypatch=monkeypatch)
    assert pairs == [[f"devices=[cuda:{n},cuda:{n + 1}]", "threads=2", "nproc=2"] for n in (0, 2)]


def test_a_trial_has_one_device_where_that_computes_the_same():
    assert of("seed=[1,2]").base.mode == "single"
    assert of("seed=[1,2]", "mode=local_sgd").base.mode == "local_sgd"
    assert of("seed=[1,2]", nproc="2").base.mode == "ddp"


@pytest.mark.skipif(find_spec("optuna") is None, reason="pip install optuna")
def test_ranges_are_sampled_about_twenty_times_by_default():
    assert (
        SearchSpace("digits", ["optimizer.lr=0.001..1"], 1, None, None, None).count()
        == space.SAMPLED
    )
    assert SearchSpace("digits", ["optimizer.lr=0.001..1"], 1, 3, None, None).count() == 3
    with pytest.raises(RecipeError, match=r"optimizer.lr=0 cannot run"):
        SearchSpace("digits", ["optimizer.lr=0..1"], 1, 3, None, None)
