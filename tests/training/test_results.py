"""result.json is what its type and the guide say."""

from typing import get_args, get_type_hints, is_typeddict

from pydantic import TypeAdapter

from tests.command_line import QUIET, ok, result
from tests.pages import GUIDE
from trainer.tasks import Classification, Multilabel, Regression
from trainer.training.results import Metrics, Result, table

OF_CLASSIFICATION = {"val_loss", "val_top1", "val_top5", "best_top1"}


def test_the_guide_lists_the_keys():
    assert table() in (GUIDE / "result.md").read_text()


def test_a_runs_result_has_these_keys_and_types(tmp_path):
    words = ["recipe=digits", "mode=pipeline", "devices=[cpu,cpu]", "model.name=cnn_gn", "max_steps=4", *QUIET]
    ok(*words, f"output={tmp_path / 'run'}")
    found = result(tmp_path / "run")
    assert found.keys() == Result.__required_keys__ | OF_CLASSIFICATION
    assert found["pipeline"] and found["throughput"] and found["verdict"]
    hints = get_type_hints(Result)
    for key, value in found.items():
        fits(value, hints[key])


def fits(value, hint):
    """Hold a value of JSON against a type; dictionaries with known keys must have these."""
    kinds = [kind for kind in get_args(hint) or (hint,) if is_typeddict(kind)]
    if kinds and value is not None:
        assert value.keys() == get_type_hints(kinds[0]).keys()
        for key, inner in get_type_hints(kinds[0]).items():
            fits(value[key], inner)
    elif not kinds:
        TypeAdapter(hint).validate_python(value, strict=True)


def test_the_type_knows_the_metrics_of_the_tasks_that_ship():
    kinds = [Classification, Multilabel, Regression]
    told = {f"val_{name}" for kind in kinds for name in kind.metric_names()} | {f"best_{kind.metric}" for kind in kinds}
    assert told == Metrics.__optional_keys__


def test_another_tasks_metrics_take_the_place_of_accuracy(tmp_path):
    ok("recipe=digits", "mode=single", "task.name=multilabel", "epochs=1", *QUIET, f"output={tmp_path / 'run'}")
    found = result(tmp_path / "run")
    metrics = {"val_loss", "val_f1", "val_f1_macro", "best_f1"}
    assert found.keys() == Result.__required_keys__ | metrics and found["task"] == "multilabel"
