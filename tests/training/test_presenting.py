"""Charts and pictures in TensorBoard, read from the files of real runs."""

import functools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from google.protobuf import json_format
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

import trainer as program
from tests.command_line import ok, trainer
from trainer.data import Batch, DataShare, ImageSet, Loader, as_pictures, open_datasets
from trainer.data.feeds import read_pictures
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel, Regression, create_task
from trainer.telemetry.events import read_events
from trainer.training import drawing, presenting

SMALL = [
    "recipe=digits",
    "model.name=cnn_gn",
    "epochs=2",
    "logging.every_steps=2",
    "logging.warmup_steps=1",
]
SMALL += ["logging.progress=false", "threads=1"]
TOLD = [
    "train/lr",
    "train/grad_norm",
    "val/loss",
    "val/top1",
    "val/top5",
    "speed/samples_per_sec",
    "speed/step_ms",
]
TOLD += ["speed/samples_per_sec_per_device", "speed/data_wait_pct", "memory/peak_gib/cpu"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A pipeline that was killed and continued."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    killed = [
        *SMALL,
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "pipeline.microbatches=4",
        "save.every_steps=9",
        f"output={folder}",
    ]
    assert trainer(*killed, env={"TRAINER_FAULT": "kill@0:12"}).returncode != 0
    ok(*killed, "resume=auto")
    return EventAccumulator(str(folder)).Reload()


@pytest.mark.slow
def test_tags_are_plain_names(shown):
    tags = shown.Tags()["scalars"]
    groups = {tag.split("/")[0] for tag in tags}
    assert groups == {"final", "memory", "pipeline", "save", "speed", "train", "val"}
    assert {*TOLD} <= {*tags}


@pytest.mark.slow
def test_a_continued_run_is_one_curve(shown):
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(2, 29, 2))
    assert [event.step for event in shown.Scalars("val/top1")] == [14, 28]


def test_pictures(shown):
    """Each picture is there once, and the validation images once for each evaluation."""
    assert shown.Tags()["images"] == [
        "view/batch as the model sees it",
        "view/validation images",
        "view/confusion matrix",
        "view/worst mistakes",
    ]
    assert [picture.step for picture in shown.Images("view/validation images")] == [14, 28]
    for tag in shown.Tags()["images"]:
        picture = shown.Images(tag)[-1]
        assert picture.encoded_image_string.startswith(b"\x89PNG")


def test_a_server_that_reads_while_a_run_is_continued_forgets_what_comes_again(tmp_path):
    from trainer.saving.checkpoint import Position
    from trainer.saving.journal import OTHER
    from trainer.saving.run_folder import RunFolder
    from trainer.telemetry.clocks import Ledger
    from trainer.telemetry.tracking import Tracker

    recipe = load("digits", f"output={tmp_path / 'run'}", "resume=auto")
    # The saved step is resumed.
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    reader = EventAccumulator(str(tmp_path / "run"))
    for position, last in ((Position(0, 0, 0), 8), (Position(5, 0, 5), 10)):
        tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
        tracker.start(position, 10, "top1")
        for step in range(position.step + 1, last + 1):
            tracker.scalars({"train/loss": float(step)}, step)
        tracker.close()
        reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == list(range(1, 11))


def test_a_picture_that_cannot_be_drawn_ends_no_run():
    messages = []
    tracker = SimpleNamespace(shows=True, say=messages.append)
    presenting.show_first_batch(
        tracker, None, None, Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), 2)
    )
    [line] = messages
    assert "AttributeError" in line


@pytest.mark.parametrize(
    ("shape", "count"), [((8, 1, 4, 4), 8), ((96, 3, 224, 224), 32), ((4, 1, 2048, 2048), 1)]
)
def test_fewer_large_images_are_shown(shape, count, monkeypatch):
    looked = []
    monkeypatch.setattr(
        presenting, "as_pictures", lambda datasets, inputs: looked.append(len(inputs))
    )
    tracker = SimpleNamespace(shows=True)
    presenting.show_first_batch(
        tracker, None, None, Batch(torch.empty(shape), torch.empty(0), shape[0])
    )
    assert looked == [count]


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        (Classification, torch.tensor(1), "dog"),
        (Classification, torch.tensor(7), "7"),
        (Classification, torch.tensor([0.3, 0.7]), "dog 70%, cat 30%"),
        (Classification, torch.zeros(4, 4, dtype=torch.int64), ""),
        (Classification, torch.empty(0), ""),
        (Multilabel, torch.tensor([1.0, 1.0]), "dog, cat"),
        (Regression, torch.tensor([31.0, 1.72]), "31, 1.72"),
    ],
)
def test_a_target_in_words(kind, target, words):
    names = ["cat", "dog"]
    assert presenting.format_caption(kind(load("digits"), names), names, target) == words


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run of three evaluations in this process, and what it draws, by function."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    calls = {"draw_grid": [], "draw_confusion": []}

    def keep(name, function, *arguments):
        calls[name].append(arguments)
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presenting, "MAX_COST", 1.0)
        for name in calls:
            function = functools.partial(keep, name, getattr(drawing, name))
            patch.setattr(drawing, name, function)
        words = [*SMALL[1:], "mode=single", "epochs=3", "optimizer.lr=0.01", f"output={folder}"]
        words.remove("epochs=2")
        program.train("digits", *words)
    return folder, calls


@pytest.fixture(scope="module")
def looped(drawn):
    """Images, labels, probabilities of the validation split, from a plain loop over the model."""
    part = open_datasets(load("digits")).val
    loaded = program.load(drawn[0], "checkpoint=last")
    data = open_datasets(load("digits"))
    inputs = (part.images.float() / 255 - torch.tensor(data.mean)) / torch.tensor(data.std)
    with torch.no_grad():
        logits = torch.cat([loaded.model(one[None]) for one in inputs])
    return part.images, part.labels, logits


@pytest.mark.slow
def test_the_confusion_matrix_is_that_of_scikit_learn(drawn, looped):
    [(matrix, names)] = drawn[1]["draw_confusion"]
    _, labels, logits = looped
    assert matrix.tolist() == confusion_matrix(labels, logits.argmax(1)).tolist()
    assert names == [str(n) for n in range(10)]


def test_the_worst_mistakes_are_those_with_the_largest_losses(drawn, looped):
    shown, captions, _, frames = drawn[1]["draw_grid"][-1]
    images, labels, logits = looped
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    is_wrong = logits.argmax(1) != labels
    worst = [n for n in losses.argsort(descending=True).tolist() if is_wrong[n]][:16]
    assert len(worst) > 4 and shown.tolist() == images[worst].permute(0, 2, 3, 1).tolist()
    for sample, (true, predicted, loss) in zip(worst, captions, strict=True):
        assert true == f"true {labels[sample]}" and predicted == f"pred. {logits[sample].argmax()}"
        assert float(loss.split()[1]) == pytest.approx(losses[sample].item(), abs=1e-3)
    assert {*frames} == {drawing.WRONG}


def test_the_same_eight_images_are_shown_at_each_evaluation(drawn, looped):
    _, *evaluated = drawn[1]["draw_grid"][:-1]
    images, labels, logits = looped
    assert len(evaluated) == 3
    assert all((shown == evaluated[0][0]).all() for shown, *_ in evaluated)
    shown, captions, _, frames = evaluated[-1]
    assert len(shown) == 8 and len({true for true, *_ in captions}) == 8, "eight classes"
    for image, (true, predicted, probability), frame in zip(shown, captions, frames, strict=True):
        pixels = torch.tensor(image[..., 0])
        [sample] = [n for n, one in enumerate(images) if torch.equal(one[0], pixels)]
        answer = int(logits[sample].argmax())
        assert (true, predicted) == (f"true {labels[sample]}", f"pred. {answer}")
        assert probability == f"probability {logits[sample].softmax(0).max():.0%}"
        assert frame == (drawing.RIGHT if answer == labels[sample] else drawing.WRONG)


@pytest.mark.slow
def test_drawing_that_costs_too_much_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(presenting, "MAX_COST", 0.0)
    words = [*SMALL[1:], "epochs=3", "mode=single", f"output={tmp_path / 'run'}"]
    words.remove("epochs=2")
    program.train("digits", *words)
    pictures = EventAccumulator(str(tmp_path / "run")).Reload().Images("view/validation images")
    assert [picture.step for picture in pictures] == [14, 42], "the first and the last are shown"


@pytest.mark.parametrize(
    ("kind", "outputs", "targets", "lines", "frames"),
    [
        (
            Multilabel,
            [[3.0, -3.0], [-3.0, -3.0]],
            [[1.0, 0.0], [1.0, 1.0]],
            [["true cat", "pred. cat"], ["true dog, cat", "pred. -"]],
            [drawing.RIGHT, drawing.WRONG],
        ),
        (Regression, [[1.5, 2.0]], [[1.0, 2.25]], [["true 1, 2.25", "pred. 1.5, 2"]], []),
    ],
)
def test_predictions_of_other_tasks(kind, outputs, targets, lines, frames):
    names = ["cat", "dog"]
    words = ["task.name=multilabel"] * (kind is Multilabel)
    task = kind(load("digits", *words), names)
    captions, colours = presenting.describe_predictions(
        task, names, torch.tensor(outputs), torch.tensor(targets)
    )
    assert captions == lines and colours == frames


@pytest.mark.parametrize(
    ("labels", "classes"), [([0] * 90 + [1] * 3, 2), (list(range(1000)) * 2, 8), ([5] * 3, 1)]
)
def test_examples_are_spread_over_the_classes(labels, classes):
    part = ImageSet(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), torch.tensor(labels))
    chosen = presenting.choose_examples(SimpleNamespace(val=part))
    assert len({*chosen}) == len(chosen) == min(8, len(labels))
    counts = Counter(labels[sample] for sample in chosen)
    assert len(counts) == classes


def test_photos_are_shown_as_they_are_evaluated(tmp_path):
    """Those read for pictures equal the inputs of the evaluation, without normalization."""
    for n, image in enumerate(load_digits().images[:40]):
        path = tmp_path / "photos" / f"digit {n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).resize((60, 40)).save(path)
    recipe = load(
        "digits",
        "data.name=imagefolder",
        f"data.root={tmp_path / 'photos'}",
        "data.image_size=32",
        "data.channels=3",
        "data.workers=0",
        "batch_size=4",
    )
    data = open_datasets(recipe)
    task = create_task(recipe, data.classes, None, len(data.val))
    loader = Loader(data, recipe, task, DataShare(), torch.device("cpu"))
    evaluated = torch.cat([as_pictures(data, batch.inputs) for batch in loader.evaluation()])
    assert read_pictures(data, recipe, [6, 1]).tolist() == evaluated[[6, 1]].tolist()


def read_hparams(folder):
    """Return what TensorBoard's HPARAMS tab shows: {run: (keys, metrics)}, and all keys."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    backend = Context(TBContext(data_provider=provider, multiplexer=multiplexer))
    asked = context.RequestContext()
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_SUCCESS], slice_size=100
    )
    handler = list_session_groups.Handler(asked, backend, "", request)
    rows = {}
    for group in handler.run().session_groups:
        keys = {key: json_format.MessageToDict(value) for key, value in group.hparams.items()}
        rows[group.name] = keys, {one.name.tag: one.value for one in group.metric_values}
    found = backend.hparams_metadata(asked, "")
    experiment = backend.experiment_from_metadata(asked, "", True, found, [])
    return rows, {info.name for info in experiment.hparam_infos}


def test_runs_are_compared_by_the_keys_that_were_typed(tmp_path):
    words = ["mode=single", "model.name=cnn_gn", "logging.progress=false", "max_steps=4"]
    words.append("task.metrics=[auroc]")
    results = {}
    for name, more in (("a", ["optimizer.lr=0.1"]), ("b", ["optimizer.lr=0.05", "seed=0"])):
        results[name] = program.train("digits", *words, *more, output=tmp_path / name)
    rows, keys = read_hparams(tmp_path)
    shared = {"recipe": "digits", "mode": "single", "model.name": "cnn_gn", "max_steps": 4.0}
    shared["task.metrics"] = "[auroc]"
    # 0.1 and 0 are the values of digits, but they were typed.
    assert rows["a"][0] == {**shared, "optimizer.lr": 0.1}
    assert rows["b"][0] == {**shared, "optimizer.lr": 0.05, "seed": 0.0}
    assert keys == {*rows["b"][0]}
    for name, result in results.items():
        final = {tag: value for tag, value in rows[name][1].items() if tag.startswith("final/")}
        names = ["best_top1", "samples_per_sec", "train_loss", "val_auroc", "val_loss"]
        names += ["val_top1", "val_top5"]
        result["samples_per_sec"] = result["throughput"]["samples_per_sec"]
        assert final == pytest.approx({f"final/{key}": result[key] for key in names})


@pytest.mark.slow
def test_a_run_that_is_made_longer_is_one_row(tmp_path):
    words = ["mode=single", "model.name=cnn_gn", "logging.progress=false", f"output={tmp_path}/x"]
    for epochs in (1, 2):
        program.train("digits", *words, f"epochs={epochs}", "resume=auto")
    [(keys, _)] = read_hparams(tmp_path)[0].values()
    assert keys["epochs"] == 2
    logged = Counter()
    for path in (tmp_path / "x").glob("events*"):
        for event in read_events(path):
            logged.update(value.tag for value in event.summary.value)
    assert {logged[tag] for tag in logged if tag.startswith(("_hparams_/", "final/"))} == {1}


@pytest.mark.slow
def test_hparams_of_several_ranks_and_of_a_sweep(tmp_path):
    words = ["model.name=cnn_gn", "logging.progress=false", "max_steps=4", "threads=1"]
    program.train(
        "digits", *words, mode="ddp", nproc=2, optimizer__lr=0.1, output=tmp_path / "several"
    )
    ok("sweep", "recipe=digits", *words, "optimizer.lr=[0.1,0.01]", f"output={tmp_path / 'sweep'}")
    rows = read_hparams(tmp_path)[0]
    assert sorted(keys["optimizer.lr"] for keys, _ in rows.values()) == [0.01, 0.1, 0.1]
