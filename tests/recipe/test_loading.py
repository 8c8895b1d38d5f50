"""Recipes: merging, and one clear line for everything that is wrong."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checks import refusal
from tests.command_line import ok, suggested, trainer
from trainer import recipe as recipes
from trainer.errors import RecipeError
from trainer.recipe import Recipe, changed_keys, flatten, load, reflection
from trainer.recipe.loading import format_arguments
from trainer.recipe.recipe_files import find_recipe
from trainer.recipe.text import format_yaml

DEFAULTS = flatten(Recipe().to_dict())


# Names like those of layers in nn.Sequential.
@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("epochs=3", "epochs", 3),
        ("epochs=0x10", "epochs", 16),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer={lr: 0.2}", "optimizer.lr", 0.2),
        ("augment.crop_scale=[0.8,0.9]", "augment.crop_scale", [0.8, 0.9]),
        ("data.root=/a=b/c=d", "data.root", "/a=b/c=d"),
        ("data.root=null", "data.root", None),
        ("logging.wandb=true", "logging.wandb", True),
        ("save.every_epochs=null", "save.every_epochs", None),
        ("devices=auto", "devices", "auto"),
        ("pipeline.microbatches=auto", "pipeline.microbatches", "auto"),
        ("pipeline.schedule=1f1b", "pipeline.schedule", "1f1b"),
        ("pipeline.cuts=[layer2.3,layer4]", "pipeline.cuts", ["layer2.3", "layer4"]),
        (
            "pipeline.cuts=[3, 6]",
            "pipeline.cuts",
            ["3", "6"],
        ),
        ("pipeline.cuts=[layer1, 0.30, yes]", "pipeline.cuts", ["layer1", "0.30", "yes"]),
        ("model.freeze=-1", "model.freeze", -1),
        ("model.freeze=conv1", "model.freeze", ["conv1"]),
        ("model.freeze=[0, layer1]", "model.freeze", ["0", "layer1"]),
        ("devices=[cuda:2,cuda:3]", "devices", ["cuda:2", "cuda:3"]),
    ],
)
def test_words_are_yaml(word: str, key: str, value: object) -> None:
    actual = flatten(load(None, word).to_dict())
    assert actual == {**DEFAULTS, key: value}
    assert type(actual[key]) is type(value)


# Texts that YAML, OmegaConf or a shell would read as another value.
NASTY = [
    "a #2",
    " a",
    "a ",
    "a\nb",
    "a\n",
    "\ta",
    "~",
    "[2024] a",
    "[a",
    "{a}",
    "{a,b}.tar",
    "*.tar",
    "!a",
    "&a",
    "*a",
    "a: b",
    "a:",
    "- a",
    "-",
    "?",
    "%a",
    "@a",
    "`a`",
    "'a'",
    '"a',
    "a\\b",
    "a=b",
    "007",
    "1e3",
    "0x1f",
    "1_0",
]
NASTY += ["1:30"]
NASTY += [
    "yes",
    "off",
    "true",
    "Null",
    "2024-01-02",
    "???",
    "$HOME",
    "<<",
    "|",
    ">",
    "a,",
    ";",
    "\r\na",
    "\x1b[31m",
]
NASTY += ["\x85a", "a\u2028b", "\ufeffa", "\ufffea", "\x7f", "\xe4 \U0001f600", "x  " * 60]
TEXTS = [
    "data.root",
    "data.labels",
    "data.image_column",
    "data.cache_dir",
    "output",
    "model.init_from",
    "model.name",
]
TEXTS += ["distill.teacher"]
TEXTS += ["task.name", "logging.mlflow"]


@pytest.mark.slow(cases=["data.root", "task.name"])
@pytest.mark.parametrize("key", TEXTS)
def test_a_text_is_taken_letter_by_letter_and_comes_back(
    tmp_path: Path, key: str, full: bool
) -> None:
    file = tmp_path / "recipe.yaml"
    # Each key is tested together with others.
    for text in NASTY if full or key == TEXTS[0] else NASTY[TEXTS.index(key) :: 8]:
        if key.startswith("logging") and text == "true":
            continue
        loaded = load(None, f"{key}={text}")
        assert flatten(loaded.to_dict()) == {**DEFAULTS, key: text}
        file.write_text(loaded.to_yaml(), encoding="utf-8")
        assert load(file).to_dict() == loaded.to_dict()
        assert load(None, *format_arguments(loaded)).to_dict() == loaded.to_dict()
        file.write_text(f"{key.rpartition('.')[2]}: {format_yaml(text)}\n", encoding="utf-8")
        section = key.rpartition(".")[0]
        file.write_text(
            (f"{section}:\n  " if section else "") + file.read_text(encoding="utf-8"),
            encoding="utf-8",
        )
        # The text needs no quotes for data.cache, and is refused as it is no text.
        if text != "off":
            assert load(file).to_dict() == loaded.to_dict()


def test_every_key_that_takes_text_is_among_those() -> None:
    texts = {
        key
        for key, kinds in reflection.list_key_types().items()
        if str in kinds and list not in kinds
    }
    names = {"data.name", "optimizer.name", "schedule.name", "task.metric"}
    assert texts == {
        *TEXTS,
        *names,
        "model.weights",
        "logging.wandb",
        "max_time",
        "data.fold",
        "verify.every",
    }


def test_defaults_then_file_then_words_then_keywords(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 3\nbatch_size: 64\noptimizer: {lr: 0.5, momentum: 0.5}\n")
    loaded = load(file, "optimizer.lr=0.25", "batch_size=32", epochs=7)
    assert (loaded.epochs, loaded.batch_size, loaded.seed) == (7, 32, 0)
    assert (loaded.optimizer.lr, loaded.optimizer.momentum) == (0.25, 0.5)
    assert loaded.name == "mine"
    assert load({"optimizer": {"lr": 0.5}}, optimizer={"momentum": 0.5}).optimizer.lr == 0.5


def test_a_section_may_be_given_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: mlp\noptimizer: {name: adamw, lr: 0.5}\n")
    by_name = [
        load(file, "optimizer=adam", "task=multilabel"),
        load(file, optimizer="adam", task="multilabel"),
        load({"model": "mlp", "optimizer": "adam", "task": "multilabel"}, optimizer={"lr": 0.5}),
    ]
    by_key = load(file, "optimizer.name=adam", "task.name=multilabel").to_dict()
    assert [recipe.to_dict() for recipe in by_name] == [by_key] * 3
    assert by_key["optimizer"]["lr"] == 0.5 and by_key["model"]["name"] == "mlp"
    for words in (["optimizer=adam", "optimizer.name=sgd"], ["logging=x"], ["optimizer=null"]):
        with pytest.raises(RecipeError):
            load(file, *words)


# Wrong arguments, each with what the line names: the key, its valid values, the value that was
# meant.
WRONG = {
    # unknown keys, with the nearest
    "optimzer.lr=1": "optimzer optimizer?",
    "optimizer.lrr=1": "optimizer.lrr optimizer.lr?",
    "lr=1": "optimizer.lr?",
    "pipeline=gpipe": "pipeline=gpipe section pipeline.schedule=",
    "xyz=1": "xyz recipes",
    # types
    "epochs=x": "epochs=x integer",
    "epochs=1.5": "epochs=1.5 integer",
    "epochs='3'": "epochs=3 integer",
    "epochs=null": "epochs=null integer",
    "max_steps=x": "max_steps=x integer null",
    "optimizer.lr=fast": "optimizer.lr=fast number",
    "compile=1": "compile=1 true false",
    "logging=sgd": "logging=sgd section logging.every_steps=",
    # ranges
    "epochs=0": "epochs=0 1",
    "optimizer.lr=0": "optimizer.lr=0 above",
    "optimizer.lr=.inf": "optimizer.lr=inf finite",
    "optimizer.momentum=1": "optimizer.momentum=1 below",
    "ema=1": "ema=1 below null",
    "seed=9223372036854775808": "seed=9223372036854775808 below",
    # choices
    "mode=dpp": "mode=dpp single dp ddp split pipeline local_sgd hogwild mode=dp?",
    "data.channels=65": "data.channels=65 64",
    "resume=yes": "resume=true auto null",
    "pipeline.schedule=1F1B": "pipeline.schedule=1f1b?",
    "resume.weights_only=true": "resume= weights_only auto null",
    # numbers or auto
    "pipeline.microbatches=0": "pipeline.microbatches=0 auto number",
    "pipeline.microbatches=true": "pipeline.microbatches=true auto number",
    "pipeline.split_size=auto": "pipeline.split_size=auto integer null",
    "pipeline.stages=1": "pipeline.stages=1 2 null",
    # lists
    "pipeline.cuts=layer3": "pipeline.cuts=layer3 auto list [layer2.3] ['0.3']",
    "pipeline.cuts=[]": "pipeline.cuts=[] auto list",
    **{
        f"model.freeze={value}": "model.freeze= number list [conv1] null"
        for value in ("0", "[]", "['']")
    },
    "optimizer.layer_decay=0": "optimizer.layer_decay=0 above null",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9] 2",
    "optimizer.betas=0.9": "optimizer.betas=0.9 list",
    "optimizer.betas=[0.9,2]": "optimizer.betas[1]=2 below",
    # devices
    "devices=[cuda:x]": "devices cuda:x cpu cuda:0",
    "devices=cuda:1": "devices=cuda:1 auto devices=[cuda:1]",
    "devices=4": "devices=4 auto devices=[cuda:0]",
    # keys that are right alone
    "pipeline={split_size: 4, microbatches: 8}": "pipeline.split_size pipeline.microbatches",
    "accumulate=3": "batch_size=128 accumulate=3 batch_size=126 129",
    "schedule.min_lr=3": "schedule.min_lr=3.0 optimizer.lr=0.1",
    "augment.crop_scale=[1.0,0.1]": "augment.crop_scale=[1.0,0.1] [0.1,1.0]",
    # Texts that are no arguments
    "epochs": "'epochs' epochs=30 quotes",
    "=3": "'=3' key=value",
    "--epochs=3": "'--epochs=3' key=value",
    "pipeline.cuts=[a": "'pipeline.cuts=[a'",
    "data.root=": "data.root= empty",
    "optimizer={lr: 1, lr: 2}": "optimizer lr",
    "data.root=${oc.env:HOME}": "data.root=${oc.env:HOME}",
    "data.root=/caf\udce9": "data.root= UTF-8 ln",
    f"seed={'[' * 50}{']' * 50}": "seed= 20",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_word_is_one_line(word: str) -> None:
    text = refusal(load, None, word)
    assert not [part for part in WRONG[word].split() if part not in text], text
    for setting in suggested(text):
        load(None, setting)


def test_words_are_text() -> None:
    arguments: Any
    for arguments in (5, ["epochs=2"], {"epochs": 2}):
        assert "'epochs=2'" in refusal(load, "digits", arguments)


def test_a_repeated_key_is_refused() -> None:
    expected = "epochs is given twice, as 'epochs=1' and as 'epochs=2': keep one"
    assert refusal(load, None, "epochs=1", "seed=3", "epochs=2") == expected


def test_nesterov_needs_momentum() -> None:
    for name in ("sgd", "muon"):
        words = [f"optimizer.name={name}", "optimizer.nesterov=true", "optimizer.momentum=0"]
        assert "optimizer.momentum above 0" in refusal(load, None, *words)
    assert load(None, "optimizer.nesterov=true").optimizer.nesterov


def test_the_learning_rate_of_a_batch() -> None:
    """The whole batch counts, for any number of processes and micro-batches."""
    words = ["optimizer.lr=0.1", "optimizer.lr_per=256", "batch_size=1024"]
    for more in ([], ["accumulate=4"], ["mode=single"], ["mode=local_sgd"]):
        assert load(None, *words, *more).peak_lr == 0.4
    low = refusal(
        load,
        None,
        "optimizer.lr=0.1",
        "optimizer.lr_per=256",
        "batch_size=64",
        "schedule.min_lr=0.05",
    )
    assert re.search(
        r"schedule\.min_lr=0\.05 .*optimizer\.lr=0\.1\b.*\b0\.025 .*batch_size=64", low
    )


LAUGHS = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
BOMB = "".join(f'k{n}: "${{k{n + 1}}}${{k{n + 1}}}"\n' for n in range(60)) + "k60: x\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", r"my_recipe\.yaml: .*\bempty; .*\brecipes digits\b"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", r"my_recipe\.yaml: line 1: .*\bUTF-8\b"),
        (b"\x00\x01\x02", r"my_recipe\.yaml: "),
        (b"- a\n- b\n", r"my_recipe\.yaml: .*'key: value'"),
        (b"optimizer.lr: 0.1\n", r"optimizer\.lr .*\boptimizer: \{lr: 0\.1\}$"),
        ("epochs: 3\n".encode("utf-16"), r"my_recipe\.yaml: line 1: .*\bUTF-8\b"),
        (
            b"epochs: !!python/object/apply:os.getcwd []\n",
            r"my_recipe\.yaml: line 1: .*'tag:yaml\.org,2002:python/object/apply:os\.getcwd'",
        ),
        (b"optimizer: &o\n  lr: *o\n", r"my_recipe\.yaml: "),
        (LAUGHS.encode(), r"my_recipe\.yaml: .*\b20 aliases\b"),
        (BOMB.encode(), r"my_recipe\.yaml: .*\$\{\.\.\.\}"),
        (b"[" * 100, r"my_recipe\.yaml: nested .*\b20\b"),
        (b"a: " * 5000, r"my_recipe\.yaml: "),
        (b"# " + b"x" * 300_000, r"my_recipe\.yaml: 300002 bytes .*\b262144\b"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "my_recipe.yaml").write_bytes(content)
    assert re.search(expected, refusal(load, tmp_path / "my_recipe.yaml"))


def test_recipes_are_found(tmp_path: Path) -> None:
    assert find_recipe("digits").name == "digits.yaml"
    (tmp_path / "recipe.yaml").write_text("epochs: 3\n")
    assert load(tmp_path).epochs == 3
    assert load(tmp_path).name == tmp_path.name
    assert "recipe=digits" in suggested(refusal(load, "digts"))
    assert "absent.yaml" in refusal(load, str(tmp_path / "absent.yaml"))
    assert "recipe=" in refusal(load, "a\0b")
    assert "recipe=" in refusal(load, "x" * 5000)
    assert "recipe=~nobody-here/x.yaml" in refusal(load, "~nobody-here/x.yaml")


@pytest.mark.parametrize("name", recipes.shipped_recipes())
def test_a_shipped_recipe_says_what_it_is_for_and_what_weight_decay_acts_on(name: str) -> None:
    text = recipes.shipped_recipes()[name].read_text(encoding="utf-8")
    loaded = load(name)
    assert loaded.name == name and text.startswith("# "), "the first line says what it is for"
    message = "norm_weight_decay" in text or loaded.optimizer.norm_weight_decay is not None
    assert " weight_decay: " not in text or message


def test_replace_checks_like_load() -> None:
    assert load(None).replace(data__root="x", epochs=2).data.root == "x"
    assert "epochs=0 " in refusal(load(None).replace, epochs=0)


def test_changed_keys_are_those_that_compute_something_else() -> None:
    old = load(None)
    assert changed_keys(old, load(None, "epochs=3", "optimizer.lr=0.5")) == {
        "epochs": (10, 3),
        "optimizer.lr": (0.1, 0.5),
    }
    free = (
        "mode=single",
        "threads=2",
        "data.root=x",
        "data.workers=0",
        "save.keep=5",
        "logging.progress=false",
    )
    assert changed_keys(old, load(None, *free, "output=x", "resume=auto")) == {}


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3.5,
    1e400,
    float("nan"),
    2**80,
    "",
    "x",
    "auto",
    "cuda:0",
    "???",
]
VALUES += [
    "${a}",
    "a=b",
    "ö\u2028",
    "\ud7ff",
    "!!x",
    [],
    [1, [2, [3]]],
    {},
    {"name": "x"},
    {1: 2},
    {"lr": {"lr": 1}},
]


def mutate(generator: random.Random, tree: dict[str, Any]) -> bytes:
    """A recipe with a few wrong keys and values, or with wrong bytes."""
    keys = list(flatten(tree))
    for _ in range(generator.randint(1, 4)):
        node: Any = tree
        *parents, last = generator.choice(keys).split(".")
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, dict):
                node[parent] = child = {}
            node = child
        if generator.random() < 0.2:
            last = generator.choice(
                [
                    last.upper(),
                    last[:-1],
                    last + "x",
                    "a.b",
                    "",
                    "~",
                ]
            )
        node[last] = generator.choice(VALUES)
    text = yaml.safe_dump(tree, allow_unicode=True).encode()
    if generator.random() < 0.6:
        return text
    data = bytearray(text)
    for _ in range(generator.randint(1, 8)):
        at = generator.randrange(len(data))
        kind = generator.randrange(4)
        if kind == 0:
            data[at] = generator.randrange(256)
        elif kind == 1:
            del data[at : at + generator.randint(1, 40)]
        elif kind == 2:
            data[at:at] = bytes(
                generator.choice(b"{}[]&*!|>'\"%@`:,-#?\t\n \\$~") for _ in range(3)
            )
        else:
            data[at:at] = data[: generator.randint(1, 60)]
        data = data or bytearray(b"x")
    return bytes(data)


@pytest.mark.slow
def test_fuzzed_recipes_raise_nothing_but_recipe_errors(tmp_path: Path, full: bool) -> None:
    generator = random.Random(9)
    file = tmp_path / "fuzzed.yaml"
    outcomes = {True: 0, False: 0}
    for number in range(5000 if full else 100):
        content = mutate(generator, Recipe().to_dict())
        file.write_bytes(content)
        try:
            load(file)
            outcomes[True] += 1
        except RecipeError as error:
            outcomes[False] += 1
            assert "\n" not in str(error), (number, content)
        except BaseException as error:
            pytest.fail(f"recipe {number} raised {error!r}: {content!r}")
    assert outcomes[False] > outcomes[True] > 0


def test_names_that_are_not_utf8_are_answered_in_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run\udce9"
    file = tmp_path / "caf\udce9.yaml"
    file.write_text("extends: digits_single\n")
    ok("recipe=digits_single", "max_steps=1", f"output={tmp_path / 'run'}")
    (tmp_path / "run").rename(run)
    for words in (
        [f"recipe={file}"],
        [f"recipe={file}", "mode=ddp", "nproc=2"],
        [f"recipe={run}"],
        ["evaluate", f"checkpoint={run}"],
        ["predict", f"checkpoint={run}"],
        ["export", str(run), "format=exported_program"],
    ):
        completed = trainer(*words, cwd=tmp_path)
        assert completed.returncode in (2, 4) and completed.stderr.count("\n") == 1, (
            words,
            completed.stdout,
            completed.stderr,
        )
        assert "UTF-8" in completed.stderr, (words, completed.stderr)
