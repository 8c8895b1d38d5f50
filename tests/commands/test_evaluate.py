"""A trained run is evaluated again, on any number of ranks, and from files with incomplete
metadata.
"""

import errno
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer
from tests.command_line import QUIET, ok, result, rows, torchrun
from tests.data.archives.making import tarred
from tests.data.photo_folders import coloured
from trainer.commands import class_metrics
from trainer.commands.evaluate import evaluate_run
from trainer.data import open_datasets
from trainer.data.folders.layout import Before
from trainer.errors import CheckpointError, DiskFullError, RecipeError, SetupError
from trainer.recipe import load
from trainer.saving import files
from trainer.saving.weights import read_metadata


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 96 synthetic images, with 37 held out."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    words = [
        "data.name=synthetic",
        "data.samples=96",
        "data.val_samples=37",
        "data.image_size=8",
        "model.name=cnn_gn",
    ]
    ok("mode=single", *words, "batch_size=48", "epochs=1", *QUIET, f"output={folder}")
    return folder


@pytest.fixture(scope="module")
def worsened(tmp_path_factory):
    """A run whose first epoch was its best."""
    folder = tmp_path_factory.mktemp("best") / "run"
    rate = ["optimizer.lr=1", "epochs=2", "schedule.warmup_epochs=2", "schedule.name=constant"]
    ok("recipe=digits", "mode=single", *rate, *QUIET, f"output={folder}")
    run_result = result(folder)
    assert run_result["best_epoch"] == 1
    assert run_result["best_top1"] > run_result["val_top1"]
    return folder


@pytest.mark.slow
def test_every_entry_point_uses_the_best_weights_or_those_that_are_named(worsened, tmp_path):
    run_result = result(worsened)
    expected = {"": run_result["best_top1"], "best": run_result["best_top1"]}
    expected["last"] = run_result["val_top1"]
    tensors = {name: load_file(worsened / f"{name}.safetensors") for name in ("best", "last")}
    for choice, top1 in expected.items():
        words = [choice] if choice else []
        assert evaluate_run(worsened, *words)["val_top1"] == pytest.approx(top1)
        loaded = trainer.load(worsened, *words)
        state = loaded.model.state_dict()
        for name, tensor in tensors[choice or "best"].items():
            assert torch.equal(state[name], tensor), name
        assert f"top-1 {top1:.2%}" in " ".join(ok("evaluate", str(worsened), *words).stdout.split())
        labels = tmp_path / f"labels{choice}"
        ok("predict", str(worsened), *words, f"output={labels}")
        assert json.loads((labels / "predict.json").read_text())["top1"] == pytest.approx(top1)
        exported = tmp_path / f"weights{choice}.pt2"
        ok("export", str(worsened), *words, "format=exported_program", f"output={exported}")
        stored = torch.export.load(exported).state_dict
        for name, tensor in tensors[choice or "best"].items():
            # The exported program contains a wrapper, and no counters of batches.
            if not name.endswith("num_batches_tracked"):
                assert torch.equal(stored[f"model.{name}"], tensor), name


@pytest.mark.slow
def test_the_line_about_the_best_weights_has_only_what_their_file_contains(worsened, tmp_path):
    metadata = read_metadata(worsened / "best.safetensors")
    run_result = result(worsened)
    assert json.loads(metadata["epoch"]) == run_result["best_epoch"]
    assert json.loads(metadata["value"]) == run_result["best_top1"]
    line = ok("evaluate", f"{worsened}").stdout.splitlines()[0]
    assert "checkpoint=last" in line
    assert f"epoch 1 (step {metadata['step']}), best top-1 {run_result['best_top1']:.2%}" in line
    # The line is absent if the weights were named, and if the run has no best weights.
    assert "best top-1" not in ok("evaluate", str(worsened), "checkpoint=last").stdout
    shutil.copytree(worsened, tmp_path / "old")
    tensors = load_file(worsened / "best.safetensors")
    old = {key: metadata[key] for key in metadata if key not in ("epoch", "metric", "value")}
    save_file(tensors, tmp_path / "old" / "best.safetensors", old)
    line = ok("evaluate", f"{tmp_path / 'old'}").stdout.splitlines()[0]
    assert f"step {metadata['step']}, best weights" in line
    assert "epoch" not in line
    (tmp_path / "old" / "best.safetensors").unlink()
    line, *_ = ok("evaluate", f"{tmp_path / 'old'}").stdout.splitlines()
    assert f"top-1 {run_result['val_top1']:.2%}" in line
    with pytest.raises(CheckpointError):
        evaluate_run(tmp_path / "old", "best")


@pytest.mark.parametrize("given", [None, 5, {"output": "runs/x"}])
def test_a_folder_that_is_no_run_is_refused(given):
    with pytest.raises(RecipeError, match=rf"evaluate\('runs/x'\).*\b{type(given).__name__}$"):
        evaluate_run(given)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_any_number_of_ranks_gives_the_same_figures(trained, ranks):
    arguments = ["--standalone", f"--nproc_per_node={ranks}"]
    with torchrun(
        "evaluate", f"checkpoint={trained}", "batch_size=128", arguments=arguments
    ) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    run_result = result(trained)
    [line] = [line for line in out.splitlines() if "held-out" in line]
    assert "on 37 held-out images" in line and f"top-1 {run_result['val_top1']:.2%}" in line
    assert f"val loss {run_result['val_loss']:.4f}" in line


def test_a_damaged_recipe_is_no_matter_where_its_paths_are_none(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_bytes(bytes(range(256)))
    assert evaluate_run(str(tmp_path / "run"))["val_loss"] == pytest.approx(
        result(trained)["val_loss"]
    )


def test_other_classes_are_not_those_it_was_trained_on(trained):
    for path in (trained, trained / "checkpoints" / "step-00000002"):
        with pytest.raises(
            CheckpointError, match=r"\b10 classes \(0, 1, .* and 2 more\).*\b7 classes"
        ):
            evaluate_run(str(path), "model.num_classes=7")


@pytest.fixture(scope="module")
def three_parts(tmp_path_factory):
    """Save the same photos as folders, as a table and as tars; those of the split test have wrong
    labels.
    """
    root = tmp_path_factory.mktemp("parts")
    rows = "file,label,split\n"
    for part, count in {"train": 8, "val": 4, "test": 3}.items():
        members = []
        for name, colour in (("blue", (30, 30, 200)), ("red", (200, 30, 30))):
            label = name if part != "test" else {"blue": "red", "red": "blue"}[name]
            for n in range(count):
                path = root / "folders" / part / label / f"{n}.png"
                coloured(path, colour, (8, 8), seed=n)
                members.append((f"{label}/{n}.png", path.read_bytes()))
                rows += f"{path.relative_to(root)},{label},{part}\n"
        tarred(root / "tars" / f"{part}-0.tar", members)
    (root / "labels.csv").write_text(rows)
    words = {"folders": ["data.name=imagefolder", f"data.root={root / 'folders'}"]}
    words["table"] = [
        "data.name=imagefolder",
        f"data.root={root}",
        f"data.labels={root / 'labels.csv'}",
    ]
    words["tars"] = ["data.name=shards", f"data.root={root / 'tars'}"]
    return root, words


@pytest.mark.parametrize("kind", ["folders", "table", "tars"])
def test_a_test_part_is_left_for_evaluate(three_parts, kind, tmp_path, monkeypatch):
    """Without a val split the test images are used for validation, and a message says so."""
    root, words = three_parts
    monkeypatch.setenv("TRAINER_DATA", str(root / "kept"))
    recipe = load(None, *words[kind])
    datasets = open_datasets(recipe)
    again = open_datasets(recipe, Before(test=True))
    assert (len(datasets.train), len(datasets.val), len(again.val)) == (
        16,
        8,
        6,
    )
    assert again.classes == datasets.classes
    names = [again.val.where(n) if kind != "table" else None for n in range(6)]
    assert all("test" in (name or "test") for name in names) and "test" in datasets.notes["beside"]
    assert "test" not in datasets.notes and "test" not in datasets.holdout.rpartition("/")[2]
    shutil.copytree(
        root,
        tmp_path / "all",
        ignore=lambda at, names: [name for name in names if name.startswith("val")],
    )
    labels = tmp_path / "all" / "labels.csv"
    labels.write_text(
        "".join(line for line in labels.read_text().splitlines(True) if not line.endswith("val\n"))
    )
    recipe = load(
        None,
        *(word.replace(str(root), str(tmp_path / "all")) for word in words[kind]),
    )
    datasets = open_datasets(recipe)
    again = open_datasets(recipe, Before(test=True))
    assert len(datasets.val) == 6 and re.search(r"\bbest epoch\b", datasets.notes["test"])
    assert len(again.val) == 6 and "test" not in again.notes


def test_the_command_reads_it(three_parts, tmp_path):
    """All validation images are right, and all images of the split test are wrong because of their
    labels.
    """
    _, words = three_parts
    run = tmp_path / "run"
    fast = ["model.name=mlp", "batch_size=8", "optimizer.lr=0.02", "epochs=4", "threads=1"]
    ok("mode=single", *words["table"], *fast, *QUIET, "schedule.warmup_epochs=0", f"output={run}")
    assert result(run)["val_top1"] == 1
    output = ok("evaluate", f"checkpoint={run}", "split=test").stdout
    assert "top-1 0.00%" in output and "6 test images" in output
    assert evaluate_run(run)["val_top1"] == 1 == evaluate_run(run, "split=val")["val_top1"]
    actual = evaluate_run(run, "split=test")
    assert (actual["test_top1"], actual["test_samples"]) == (0, 6)
    assert actual.keys().isdisjoint(result(run))
    with pytest.raises(RecipeError, match=r"split=train\b.*split=test"):
        evaluate_run(run, "split=train")


@pytest.mark.parametrize(
    "words",
    [
        ["data.name=digits"],
        ["data.name=imagefolder", "data.root={root}", "data.labels={root}/none.csv"],
        ["data.name=shards", "data.root={root}/tars/train-0.tar"],
    ],
)
def test_evaluating_a_missing_test_split_is_refused(three_parts, words, tmp_path, monkeypatch):
    root, _ = three_parts
    monkeypatch.setenv("TRAINER_DATA", str(root / "kept"))
    shutil.copytree(root, tmp_path / "all", ignore=shutil.ignore_patterns("test"))
    (tmp_path / "all" / "none.csv").write_text(
        (root / "labels.csv").read_text().replace(",test\n", ",val\n")
    )
    recipe = load(None, *(word.format(root=tmp_path / "all") for word in words))
    shutil.copytree(root / "folders" / "test", tmp_path / "all" / "folders" / "test")
    with pytest.raises((RecipeError, SetupError), match=r"split=test\b"):
        open_datasets(recipe, Before(test=True))


@pytest.mark.parametrize(
    "word", ["epochs=3", "optimizer.lr=1", "resume=auto", "schedule.restart=true"]
)
def test_arguments_without_effect_are_refused(word, trained):
    with pytest.raises(RecipeError, match=rf"^{re.escape(word)} does nothing with a trained model"):
        evaluate_run(str(trained), word)


def read_metrics(path):
    """Return the overall row and the rows of the classes by (checkpoint, split)."""
    overall = {}
    classes = {}
    for row in rows(path):
        key = row["checkpoint"], row["split"]
        if row["class"]:
            classes.setdefault(key, []).append(row)
        else:
            overall[key] = row
    return overall, classes


@pytest.mark.slow
def test_metrics_of_each_evaluation_are_kept(three_parts, tmp_path):
    """Classes of the split test have each other's labels."""
    from sklearn.metrics import precision_recall_fscore_support

    _, words = three_parts
    run = tmp_path / "run"
    fast = ["model.name=mlp", "batch_size=8", "optimizer.lr=0.02", "epochs=1", "threads=1"]
    ok("mode=single", *words["table"], *fast, *QUIET, f"output={run}")
    for _ in range(2):
        evaluate_run(run)
    out = ok("evaluate", f"checkpoint={run}", "split=test").stdout
    evaluate_run(run / "checkpoints" / "step-00000002", "task.metrics=[top1]")
    overall, classes = read_metrics(run / "metrics.csv")
    last = "best.safetensors"
    assert [*overall] == [(last, "val"), (last, "test"), ("checkpoints/step-00000002", "val")]
    assert [*map(len, classes.values())] == [2, 2, 2]
    for key in ("loss", "top1", "f1_macro", "auroc"):
        expected = result(run)[f"val_{key}"]
        assert float(overall[last, "val"][key]) == pytest.approx(expected), key
    assert overall["checkpoints/step-00000002", "val"]["auroc"] == ""
    ok("predict", f"checkpoint={run}", "predict.split=val", f"output={tmp_path}", "devices=[cpu]")
    predictions = rows(tmp_path / "predictions.csv")
    figures = precision_recall_fscore_support(
        [row["label"] for row in predictions],
        [row["class"] for row in predictions],
        labels=["blue", "red"],
        zero_division=0,
    )
    for name, expected in zip(("precision", "recall", "f1", "support"), figures, strict=True):
        ours = [float(row[name]) for row in classes[last, "val"]]
        assert ours == pytest.approx(expected), name
    last_words = [line.split()[-1] for line in out.splitlines()[2:5]]
    assert last_words == ["class", "blue", "red"]
    named = tmp_path / "own.csv"
    named.write_text("a,b\n1,2\n")
    with pytest.raises(RecipeError, match=r"own\.csv .*output="):
        evaluate_run(run, f"output={named}")
    with pytest.raises(RecipeError, match=rf"output={run} is a folder"):
        evaluate_run(run, f"output={run}")
    assert named.read_text() == "a,b\n1,2\n"
    evaluate_run(run, f"output={tmp_path / 'new' / 'x.csv'}")
    assert [*read_metrics(tmp_path / "new" / "x.csv")[0]] == [(f"../run/{last}", "val")]


def test_the_table_of_classes_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    count = 50
    names = [f"{'long name ' * 4}{n}." if n % 2 else f"{'x' * 40}{n}." for n in range(count)]
    columns = {
        "precision": [1.0] * count,
        "recall": [1.0] * count,
        "f1": [(7 * n % count) / count for n in range(count)],
        "auroc": [math.nan] * count,
        "average_precision": [1.0] * count,
        "support": [float(n) for n in range(count)],
    }
    lines = class_metrics.format_classes(names, columns)
    assert max(map(len, lines)) <= 80
    text = re.sub(r"\s", "", "".join(lines))
    worst = sorted(range(1, count), key=lambda n: columns["f1"][n])
    for place, n in enumerate(worst):
        assert (names[n].replace(" ", "") in text) is (place < 20)
    assert "nan" not in text.replace("longname", "")
    few = {name: values[:3] for name, values in columns.items()}
    assert len([line for line in class_metrics.format_classes(names, few) if "%" in line]) == 2


def test_evaluations_at_the_same_time_keep_each_others_rows(tmp_path):
    file = tmp_path / "metrics.csv"

    def write(number):
        key = {"checkpoint": f"run-{number}", "split": "val", "data": "digits"}
        class_metrics.write_rows(file, [{**key, "loss": f"{number}"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    assert {row["loss"] for row in rows(file)} == {f"{number}" for number in range(40)}
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_an_error_only_for_a_file_that_was_asked_for(monkeypatch, tmp_path, capsys):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "replace_file", fail)
    key = {"checkpoint": "best.safetensors", "split": "val", "data": "digits"}
    file = tmp_path / "metrics.csv"
    class_metrics.report(None, file, key, {"loss": 1.0}, (), {})
    line = capsys.readouterr().out
    assert "left out" in line
    # There is no run to resume.
    assert line.endswith(f"{class_metrics.AGAIN}\n")
    with pytest.raises(DiskFullError):
        class_metrics.report("metrics.csv", file, key, {"loss": 1.0}, (), {})
