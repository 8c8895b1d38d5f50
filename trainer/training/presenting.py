"""A run in TensorBoard: the recipe, the images as its model sees them, its mistakes, and a page of text.

Drawn once at the start and once at the end, on rank 0; what other ranks have comes to it there.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer import tasks
from trainer.data import Batch, as_pictures, held_out_pictures
from trainer.devices import precision
from trainer.errors import TrainerError, text_of
from trainer.processes.resources import cores
from trainer.processes.terminal import as_typed
from trainer.recipe import flatten
from trainer.recipe.loading import words_of
from trainer.recipe.recipe_files import word_value
from trainer.telemetry import dashboards, gallery
from trainer.telemetry.tracking import NullTracker
from trainer.telemetry.verdict import Verdict
from trainer.training import banner, reporting, wrong_labels
from trainer.training.evaluation import WORST, Mistake, Mistakes
from trainer.training.results import Result
from trainer.training.run import Run

SEEN, PIXELS = 32, 2**22  # samples of the first batch that are shown, and their pixels: of large images fewer
PAGE = "run"
COLUMNS = ("mode", "model.name", "devices", "batch_size", "optimizer.lr", "precision")  # that each line has anyway


def begin(run: Run) -> None:
    """What a run is, once: the layout of its charts, its line among other runs, its page."""
    tracker, task = run.tracker, run.task
    if not tracker.shows:
        return
    tracker.show(_layout(run), 0)
    words = words_of(run.recipe)
    changed = {key: value for key, value in _changed(words).items() if key not in COLUMNS}
    kinds = dict.fromkeys((type(task), *tasks.SHIPPED))  # TensorBoard takes the columns of one run for all
    metrics = {kind.metric: kind.titles.get(kind.metric, kind.metric) for kind in kinds}
    for summary in dashboards.columns(_main(run), changed, metrics):
        tracker.show(summary, 0)
    tracker.text(PAGE, opening(run, words), 0)


def first_batch(run: Run, batch: Batch) -> None:
    """The first batch as the model sees it, augmented, with its labels where this rank has them.

    Only the first step waits for it, which counts for no speed.
    """
    if not run.tracker.shows:
        return
    with dispensable(run.tracker):
        some = min(SEEN, max(1, PIXELS // max(1, batch.inputs.shape[2:].numel())))
        images = as_pictures(run.datasets, batch.inputs[:some])
        if images is not None and len(images):
            targets = batch.targets[:some].cpu()
            captions = [[(label, "")] if (label := named(run, target)) else [] for target in targets]
            _picture(run, "batch as the model sees it", gallery.grid(images.numpy(), captions), 0)


def mistakes(run: Run, collected: Mistakes) -> None:
    """The worst predictions of the last evaluation, and the accuracy of each class. Collective."""
    worst = collected.gathered(run.world)
    if run.tracker.path is not None and not run.datasets.synthetic and (rows := _rows(run, worst)):
        run.tracker.replace(wrong_labels.FILE, wrong_labels.table(rows))
    if run.tracker.shows:
        with dispensable(run.tracker):
            _worst(run, worst[:WORST])
            _classes(run, collected)


def _rows(run: Run, worst: list[Mistake]) -> list[wrong_labels.Doubt]:
    """Of worst.csv; none where samples have not one class."""
    return [
        wrong_labels.Doubt(
            path_of(run, mistake.place),
            named(run, mistake.target),
            name(run, mistake.predicted[0][0]),
            mistake.label_probability,
            mistake.predicted[0][1],
        )
        for mistake in worst
        if mistake.label_probability is not None and mistake.predicted
    ]


def path_of(run: Run, sample: int) -> str:
    """A held-out sample's path, or what else tells which it is."""
    where = getattr(run.datasets.val, "where", None)
    return f"{run.datasets.name}/val/{sample}" if where is None else str(where(sample))


def _worst(run: Run, worst: list[Mistake]) -> None:
    try:
        images = held_out_pictures(run.datasets, [mistake.place for mistake in worst])
    except Exception:  # a user's data set may raise anything, also for what it could read before
        return
    if images is not None:
        captions = [[*_caption(run, mistake), ("", _short_name(run, mistake.place))] for mistake in worst]
        right = [_is_right(run, mistake) for mistake in worst]
        sheet = gallery.grid(images.numpy(), captions, columns=4, side=gallery.WIDE_TILE, right=right)
        _picture(run, "worst predictions", sheet, run.state.position.step)


def _short_name(run: Run, sample: int) -> str:
    """The last part of a held-out sample's path: its folder is its class."""
    path = path_of(run, sample)
    return path if getattr(run.datasets.val, "where", None) is None else os.path.basename(path) or path


def _is_right(run: Run, mistake: Mistake) -> bool | None:
    """None where a sample has not one class."""
    if mistake.label_probability is None or not mistake.predicted:
        return None
    return mistake.predicted[0][0] == int(mistake.target)


def _classes(run: Run, collected: Mistakes) -> None:
    if collected.hits is not None and collected.counts is not None:
        step = run.state.position.step
        held = collected.counts.nonzero().flatten().tolist()  # classes of which there is a sample
        names = [name(run, place) for place in range(len(collected.counts))]
        shares = [(collected.hits[n] / collected.counts[n]).item() for n in held]
        title = "accuracy of each class, the worst first"
        counts = [int(collected.counts[n]) for n in held]
        _picture(run, "accuracy a class", gallery.class_bars(shares, counts, [names[n] for n in held], title), step)
        if collected.pairs is not None:
            _picture(run, "confusion matrix", gallery.confusion(collected.pairs.numpy(), names), step)


def timeline(run: Run) -> None:
    """The pipeline's, as drawn in the run folder at the end of the last epoch."""
    path = run.tracker.path
    if run.tracker.shows and run.recipe.pipeline.timeline and path is not None and (path / "timeline.png").is_file():
        encoded = (path / "timeline.png").read_bytes()
        size = int.from_bytes(encoded[16:20]), int.from_bytes(encoded[20:24])  # of a PNG's first chunk
        _picture(run, "timeline", gallery.EncodedImage(encoded, size), run.state.position.step)


def end(run: Run, result: Result, verdict: Verdict | None) -> None:
    """How it went, above what ran; the part of a step that is only known at the end."""
    tracker, step = run.tracker, run.state.position.step
    if not tracker.shows:
        return
    if run.speed_only:
        tracker.scalars(reporting.summary(run), step)
    if verdict is not None:
        alone = 1e3 * verdict.step_seconds * verdict.step["communication"]
        if alone:
            tracker.scalars({"speed/part_communication_ms": alone}, step)
            tracker.show(_layout(run, communication=True), step)
    tracker.text(PAGE, outcome(run, result, verdict), step)
    tracker.show(dashboards.ended(), step)


def ended_early(run: Run, status: str, reason: str) -> None:
    """Why it ended before its time, above what ran, and how to go on; `status` is result.json's."""
    tracker, step = run.tracker, run.state.position.step
    if not tracker.shows:
        return
    with dispensable(run.tracker):
        again, words = _next(run, words_of(run.recipe)), reason[:1].upper() + reason[1:]
        ended, advice = "Failed", "#### To go on from its newest checkpoint, if there is one"
        if status == "preempted":
            ended, advice = "Stopped", "#### How to go on"
        page = {f"### {ended} at step {step}": escaped(words)}
        tracker.text(PAGE, _markdown(page | {advice: _commands(again[:1])}), max(1, step))
        tracker.show(dashboards.ended(well=False), step)


def _layout(run: Run, communication: bool = False) -> Any:
    task = run.task
    pipeline = run.recipe.traits.micro_batches
    return dashboards.layout(task.metric_names(), task.titles, communication, pipeline, run.timer.cuda)


def opening(run: Run, words: Sequence[str]) -> str:
    """Markdown, the lower half of the page: what runs, what was changed, on which machine, how to continue it."""
    changed, values = _changed(words), flatten(run.recipe.to_dict())
    settled = {key: f"{values[key]}, {reason}" for key, reason in run.resolved.reasons.items()}
    return _markdown(
        {
            f"### {run.recipe.name}, {run.recipe.mode}": _list(run.observer.facts),
            "#### What was changed": _list(changed) if changed else "Nothing: the recipe as it is.",
            "#### What was left open": _list(settled),
            "#### Machine": _list(_machine(run)),
            "#### If it is interrupted": _commands(_next(run, words)[:1]),
            "#### The whole recipe": "```yaml\n" + run.recipe.to_yaml() + "```",
        }
    )


def outcome(run: Run, result: Result, verdict: Verdict | None) -> str:
    """Markdown, the upper half: how it went, where the time went, what to do next."""
    lines = reporting.last_lines(run, result)
    title = next(iter(lines))
    kept = ["bubble", "warning", "weights"] + ["verdict"] * (verdict is None)
    return _markdown(
        {
            f"### {title}: {lines[title]}": "\n\n".join(f"{what}: {lines[what]}" for what in kept if what in lines),
            "#### Where the time went": verdict.to_markdown() if verdict is not None else "",
            "#### How to continue": _commands(_next(run, words_of(run.recipe))[1:]),
        }
    )


def _markdown(parts: Mapping[str, str]) -> str:
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts.items() if text or title.startswith("### "))


def _commands(commands: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {what}: `{as_typed(f'python -m trainer {words}')}`" for what, words in commands)


def _next(run: Run, words: Sequence[str]) -> list[tuple[str, str]]:
    """What one may do, with the words to type; the first while it is not over."""
    where, world = shlex.quote(str(run.tracker.path)), run.world
    ranks = [f"nproc={world.size}"] * (1 < world.size == world.place.local_size)
    kept = [shlex.quote(word) for word in words if not word.startswith(("output=", "resume="))]
    again = " ".join([*kept, *ranks])
    fresh = " ".join([*(word for word in kept if not word.startswith(("model.init_from=", "model.weights="))), *ranks])
    commands = [("go on", f"{again} output={where} resume=auto")]
    commands += [("the same run again", " ".join([f"recipe={where}/recipe.yaml", *ranks]))]
    if not run.speed_only:
        commands += [("its accuracy once more", f"evaluate checkpoint={where}")]
        commands += [("a new run from these weights", f"{fresh} model.init_from={where}")]
    return commands


def _machine(run: Run) -> dict[str, str]:
    facts = {"host": platform.node(), "system": platform.platform(), "cores": f"{cores()} for this process"}
    if run.world.device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(run.world.device)
    return facts | {what: version for what, version in reporting.versions().items() if version}


def _main(run: Run) -> dict[str, Any]:
    recipe = run.recipe
    return {
        "mode": recipe.mode,
        "model": recipe.model.name,
        "devices": banner.few_names(run.world.devices),
        "batch_size": recipe.batch_size,
        "lr": recipe.optimizer.lr,
        "precision": precision.computed_in(recipe.precision, run.world.device),
        "recipe": recipe.name,
    }


def _changed(words: Sequence[str]) -> dict[str, Any]:
    """Keys that differ from the recipe's own, apart from where things lie."""
    pairs = (word.partition("=") for word in words)
    changed = {key: word_value(key, value) for key, _, value in pairs if key not in ("recipe", "output", "resume")}
    plain = bool | int | float
    return {k: v if isinstance(v, plain) else "null" if v is None else str(v) for k, v in changed.items()}


def _list(rows: Mapping[str, Any]) -> str:
    return "\n".join(f"- **{escaped(key)}**: {escaped(value)}" for key, value in rows.items())


def escaped(value: Any) -> str:
    """A text as it is, in one line of Markdown."""
    return re.sub(r"([\\`*_{}\[\]#])", r"\\\1", " ".join(str(value).split())).replace("<", "&lt;")


@contextmanager
def dispensable(tracker: NullTracker) -> Iterator[None]:
    """A picture that cannot be drawn ends no run."""
    try:
        yield
    except TrainerError:  # of the folder that it is written to
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
        tracker.say(f"  a picture is left out: {reason}")


def _picture(run: Run, tag: str, picture: gallery.EncodedImage, step: int) -> None:
    run.tracker.show(dashboards.image(tag, picture.encoded, picture.size), step)


def name(run: Run, place: int) -> str:
    """Of a class or a value; a model may have more outputs than there are names."""
    names = run.datasets.classes
    return names[place] if 0 <= place < len(names) else str(place)


def named(run: Run, target: Tensor) -> str:
    """One sample's target in words; empty where words cannot say it."""
    if target.dim() == 0 and not target.is_floating_point():
        return name(run, int(target))
    if target.dim() > 1 or target.numel() == 0:
        return ""
    if run.task.reads == "values" or target.dim() == 0:
        return ", ".join(f"{value:.4g}" for value in target.flatten().tolist()[:3])
    if not target.is_floating_point():
        return ""
    shares = [(fraction, place) for place, fraction in enumerate(target.tolist()) if fraction > 0]
    best = sorted(shares)[::-1][:3]
    labels = [f"{name(run, place)}{'' if fraction == 1 else f' {fraction:.0%}'}" for fraction, place in best]
    return ", ".join(labels) or "none"


def _caption(run: Run, mistake: Mistake) -> list[gallery.Line]:
    """What it is and what was said of it; of the worst, some may be right, and hardly."""
    actual, ranked = named(run, mistake.target), mistake.predicted
    prediction = end = ""
    if run.task.reads == "values":
        prediction = ", ".join(f"{number:.4g}" for _, number in ranked)
    elif run.task.reads == "classes":
        above = [(place, number) for place, number in ranked if number > 0.5]
        prediction = ", ".join(f"{name(run, place)} {number:.0%}" for place, number in above) or "none"
    elif ranked:
        (place, number), *_ = ranked
        prediction = name(run, place)
        end = f" {number:.0%}{', right' if prediction == actual else ''}"
    lines = [(f"is {actual}", "")] * bool(actual)
    return [*lines, (f"said {prediction}", end) if prediction else (f"loss {mistake.loss:.3g}", "")]
