"""What a person finds in TensorBoard: the real server on real runs, every dashboard's data read over HTTP."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests import warm
from tests.command_line import environment, ok, trainer
from trainer.data import Batch
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel, Regression
from trainer.training import presenting
from trainer.training.evaluation import Mistake

SMALL = ["recipe=digits", "model.name=cnn_gn", "epochs=2", "logging.every_steps=2", "logging.warmup_steps=1"]
SMALL += ["logging.progress=false", "threads=1"]
FIRST = ["1_train_loss", "2_val_loss", "3_val_top1", "4_samples_per_sec", "5_val_samples_per_sec"]
FIRST += ["6_data_wait_pct"]
PICTURES = ["1 batch as the model sees it", "2 worst predictions", "3 confusion matrix", "4 accuracy a class"]


class Page:
    """A TensorBoard server, asked as its page asks it."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port=0", "--host=127.0.0.1"]
        self.server = warm.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        for line in self.server.stderr:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                self.address = found[0]
                return
        raise AssertionError("TensorBoard ended")

    def ask(self, path, body=None, **words):
        query = f"?{urllib.parse.urlencode(words)}" if words else ""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/data/{path}{query}", data)
        if data:
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
            return json.loads(content) if "json" in answer.headers["Content-Type"] else content

    def wait(self, runs):
        """Until it has read the last values of all runs."""
        deadline = time.monotonic() + 120
        while True:
            found = self.ask("plugin/text/tags")
            ends = [run for run in runs if run in found and len(self.text(run)) == 2]
            if len(ends) == len(runs):
                return self
            assert time.monotonic() < deadline, found
            time.sleep(0.5)

    def text(self, run):
        return self.ask("plugin/text/text", run=run, tag="run/text_summary")

    def steps(self, run, tag):
        return [step for _, step, _ in self.ask("plugin/scalars/scalars", run=run, tag=tag)]

    def close(self):
        self.server.kill()
        self.server.wait()
        self.server.stderr.close()


@cache
def charted(page, run):
    """What charts of custom scalars can show of a run: each tag with its values."""
    return page.ask("plugin/custom_scalars/scalars", run=run, tag=".*")["tag_to_events"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run in one process, one that was killed and continued, and a pipeline."""
    folder = tmp_path_factory.mktemp("runs")
    ok(*SMALL, "mode=single", "optimizer.momentum=0.8", f"output={folder / 'single'}")
    killed = [*SMALL, "mode=ddp", "nproc=2", "save.every_steps=9", f"output={folder / 'ddp'}"]
    assert trainer(*killed, env={"TRAINER_FAULT": "kill@0:12"}).returncode != 0
    ok(*killed, "resume=auto")
    wild = [*SMALL, "mode=single", "optimizer.lr=1e30", f"output={folder / 'wild'}"]
    assert trainer(*wild).returncode == 5
    ok(
        *SMALL,
        "mode=pipeline",
        "nproc=2",
        "pipeline.microbatches=4",
        "pipeline.timeline=true",
        f"output={folder / 'pipe'}",
    )
    found = Page(folder)
    try:
        yield found.wait(["single", "ddp", "pipe", "wild"])
    finally:
        found.close()


@pytest.mark.parametrize("run", ["single", "ddp", "pipe"])
def test_the_first_group_is_the_overview_and_memory_is_last(page, run):
    tags = page.ask("plugin/timeseries/tags")["scalars"]["runTagInfo"][run]
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in sorted(tags)))
    pipeline = ["z_pipeline"] if run == "pipe" else []
    assert groups == ["overview", "save", "speed", "train", "val", "z_memory", *pipeline, "z_summary"]
    assert [tag.removeprefix("overview/") for tag in sorted(tags) if tag.startswith("overview/")] == FIRST
    for tag, twin in (("1_train_loss", "train/loss"), ("3_val_top1", "val/top1")):
        assert page.steps(run, f"overview/{tag}") == page.steps(run, twin) != []


def test_a_continued_run_is_one_curve(page):
    assert page.steps("ddp", "train/loss") == page.steps("single", "train/loss") == list(range(2, 29, 2))
    assert page.steps("ddp", "val/top1") == page.steps("ddp", "z_summary/best_top1") == [14, 28]


@pytest.mark.parametrize("run", ["single", "ddp", "pipe"])
def test_every_chart_of_custom_scalars_has_values(page, run):
    layout = page.ask("plugin/custom_scalars/layout")
    assert [row["title"] for row in layout["category"]][:-1] == [
        "does it learn", "how fast", "where a step's time goes", "how full"
    ]  # fmt: skip
    for row in layout["category"]:
        titles = [chart["title"] for chart in row["chart"]]
        assert len(titles) == len(set(titles)), "a chart is of all runs"
        for chart in row["chart"]:
            wanted = chart["multiline"]["tag"]
            found = {}
            for tag in wanted:
                found |= {name: line for name, line in charted(page, run).items() if re.match(tag, name)}
            shared = not re.search("bubble|stages at work|communication, ms", chart["title"])
            if shared or (run == "pipe" and "communication, ms" not in chart["title"]):
                assert found and all(found.values()), chart["title"]
            assert len({"speed/samples_per_sec", "speed/samples_per_sec_per_device"} & set(found)) < 2
            if chart["title"].startswith("loss"):
                assert set(found) == {"train/loss", "val/loss"}


def test_no_chart_of_custom_scalars_is_empty(page):
    """What a run cannot tell, such as its communication where it is short, has no chart."""
    for row in page.ask("plugin/custom_scalars/layout")["category"]:
        for chart in row["chart"]:
            tags = chart["multiline"]["tag"]
            shown = [name for run in ("single", "ddp", "pipe") for name, line in charted(page, run).items() if line]
            assert any(re.match(tag, name) for tag in tags for name in shown), chart["title"]


def test_the_table_of_runs(page):
    experiment = page.ask("plugin/hparams/experiment", {"experimentName": ""})
    shown = [info.get("displayName") for info in experiment["hparamInfos"]]
    main = ["mode", "model", "devices", "batch_size", "lr", "precision", "recipe", "changed"]
    assert shown[:8] == main and "epochs" in shown and "data.name" not in shown
    metrics = [info["name"] for info in experiment["metricInfos"]]
    assert [info["displayName"] for info in experiment["metricInfos"]] == [
        "best top-1", "last top-1", "images/s", "step, ms", "hours", "best F1", "last F1", "best loss", "last loss",
    ]  # fmt: skip
    asked = {"experimentName": "", "allowedStatuses": ["STATUS_SUCCESS"], "startIndex": 0, "sliceSize": 10}
    asked["colParams"] = [{"metric": name} for name in metrics]
    lines = {line["name"]: line for line in page.ask("plugin/hparams/session_groups", asked)["sessionGroups"]}
    assert set(lines) == {"single", "ddp", "pipe"}, "each ended well"
    told = {run: line["hparams"] for run, line in lines.items()}
    assert told["ddp"]["1_mode"] == "ddp" and told["ddp"]["3_devices"] == "2 x cpu"
    assert "optimizer.momentum=0.8" in told["single"]["8_changed"] and "momentum" not in told["ddp"]["8_changed"]
    for line in lines.values():
        values = {value["name"]["tag"]: value["value"] for value in line["metricValues"]}
        assert set(values) == {name["tag"] for name in metrics[:5]} and 0 < values["z_summary/best_top1"] <= 1


@pytest.mark.parametrize("run", ["single", "ddp", "pipe"])
def test_one_page_of_words_a_run(page, run):
    assert page.ask("plugin/text/tags")[run] == ["run/text_summary"]
    opening, outcome = (entry["text"] for entry in sorted(page.text(run), key=lambda entry: entry["step"]))
    for title in ("What was changed", "Machine", "If it is interrupted", "The whole recipe"):
        assert f"{title}</h4>" in opening, title
    assert "resume=auto" in opening and "<strong>epochs</strong>: 2" in opening
    assert f"<strong>mode</strong>: {'pipeline' if run == 'pipe' else 'single'}" in opening or run == "ddp"
    assert "done: top-1" in outcome and "Where the time went" in outcome and "model.init_from=" in outcome


def test_a_run_that_failed_says_so_and_what_was_typed(page):
    """Its page is what people open to see why; the table of runs can leave it out."""
    opening, end = (entry["text"] for entry in sorted(page.text("wild"), key=lambda entry: entry["step"]))
    assert "optimizer.lr</strong>: 1e+30" in opening
    assert "Failed at step" in end and "not finite" in end and "Try optimizer.lr below" in end
    asked = {"experimentName": "", "allowedStatuses": ["STATUS_FAILURE"], "startIndex": 0, "sliceSize": 10}
    lines = page.ask("plugin/hparams/session_groups", {**asked, "colParams": []})["sessionGroups"]
    assert [line["name"] for line in lines] == ["wild"]


def test_a_command_to_type_holds_each_word_once(tmp_path):
    world = SimpleNamespace(size=1, place=SimpleNamespace(local_size=1))
    run = SimpleNamespace(tracker=SimpleNamespace(path=tmp_path), world=world, speed_only=False)
    words = ["recipe=finetune", "model.init_from=runs/first", "epochs=2", "output=runs/second"]
    commands = dict(presenting._next(run, words))
    assert commands["go on"].count("model.init_from=") == 1
    assert commands["a new run from these weights"] == f"recipe=finetune epochs=2 model.init_from={tmp_path}"


@pytest.mark.parametrize("text", ["a_b_c", "*.tar", "<b>", "[x](y)", "`", "a\\b"])
def test_words_are_shown_as_they_are(text):
    import markdown

    assert markdown.markdown(presenting.escaped(text)) == f"<p>{text.replace('<', '&lt;').replace('>', '&gt;')}</p>"


@pytest.mark.parametrize("run", ["single", "ddp", "pipe"])
def test_pictures(page, run):
    tags = page.ask("plugin/images/tags")[run]
    assert sorted(tags) == [f"view/{name}" for name in PICTURES + ["5 timeline"] * (run == "pipe")]
    for tag in tags:
        [picture] = page.ask("plugin/images/images", run=run, tag=tag, sample=0)
        content = page.ask(f"plugin/images/individualImage?{picture['query']}")
        assert content.startswith(b"\x89PNG")


def test_a_server_that_reads_while_a_run_is_continued_forgets_what_comes_again(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    from trainer.saving.checkpoint import Position
    from trainer.saving.run_folder import RunFolder
    from trainer.telemetry.tracking import Tracker

    recipe = load("digits", f"output={tmp_path / 'run'}", "resume=auto")
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)  # what is saved is continued
    reader = EventAccumulator(str(tmp_path / "run"))
    for position, last in ((Position(0, 0, 0), 8), (Position(5, 0, 5), 10)):
        tracker = Tracker(recipe, RunFolder(recipe))
        tracker.start(position, 10, "top1")
        for step in range(position.step + 1, last + 1):
            tracker.scalars({"train/loss": float(step)}, step)
        tracker.close()
        reader.Reload()
    assert [event.step for event in reader.Tensors("train/loss")] == list(range(1, 11))


def test_a_picture_that_cannot_be_drawn_ends_no_run():
    said = []
    run = SimpleNamespace(tracker=SimpleNamespace(shows=True, say=said.append), datasets=None)
    presenting.first_batch(run, Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), 2))
    [line] = said
    assert "AttributeError" in line


@pytest.mark.parametrize(("shape", "shown"), [((8, 1, 4, 4), 8), ((96, 3, 224, 224), 32), ((4, 1, 2048, 2048), 1)])
def test_of_large_images_fewer_are_shown(shape, shown, monkeypatch):
    looked = []
    monkeypatch.setattr(presenting, "as_pictures", lambda datasets, inputs: looked.append(len(inputs)))
    run = SimpleNamespace(tracker=SimpleNamespace(shows=True), datasets=None)
    presenting.first_batch(run, Batch(torch.empty(shape), torch.empty(0), shape[0]))
    assert looked == [shown]


class Told:
    """What `presenting` asks of a run to put a target into words."""

    def __init__(self, task, names):
        self.task, self.datasets = task, type("Named", (), {"classes": tuple(names)})


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        (Classification, torch.tensor(1), "dog"),
        (Classification, torch.tensor(7), "7"),
        (Classification, torch.tensor([0.3, 0.7]), "dog 70%, cat 30%"),
        (Classification, torch.zeros(4, 4, dtype=torch.int64), ""),
        (Classification, torch.empty(0), ""),
        (Multilabel, torch.tensor([1.0, 1.0]), "dog, cat"),
        (Multilabel, torch.tensor([0.0, 0.0]), "none"),
        (Regression, torch.tensor([31.0, 1.72]), "31, 1.72"),
    ],
)
def test_a_target_in_words(kind, target, words):
    assert presenting.named(Told(kind(load("digits"), ["cat", "dog"]), ["cat", "dog"]), target) == words


@pytest.mark.parametrize("named", [True, False])
def test_a_worst_prediction_has_its_file_and_its_frame(named, monkeypatch):
    drawn = {}
    monkeypatch.setattr(presenting, "held_out_pictures", lambda data, places: torch.zeros(len(places), 8, 8, 1))
    monkeypatch.setattr(
        presenting.gallery, "grid", lambda images, captions, **words: drawn.update(words, lines=captions)
    )
    monkeypatch.setattr(presenting, "_picture", lambda *_: None)
    val = SimpleNamespace(where=(lambda place: f"photos/cat/{place}.jpg") if named else None)
    data = SimpleNamespace(classes=("cat", "dog"), name="pets", val=val)
    task = Classification(load("digits"), ["cat", "dog"])
    run = SimpleNamespace(datasets=data, task=task, state=SimpleNamespace(position=SimpleNamespace(step=1)))
    worst = [Mistake(7, 5.0, 0.01, torch.tensor(0), ((1, 0.9),)), Mistake(3, 0.5, 0.6, torch.tensor(1), ((1, 0.6),))]
    presenting._worst(run, worst)
    assert drawn["right"] == [False, True]
    assert [lines[-1][1] for lines in drawn["lines"]] == (["7.jpg", "3.jpg"] if named else ["pets/val/7", "pets/val/3"])
