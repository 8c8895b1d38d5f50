"""The worst predictions and the classes taken for each other, over batches and ranks."""

import pytest
import torch

from trainer.data import Batch
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel, Regression, Task
from trainer.training import evaluation
from trainer.training.evaluation import Mistakes


class Ranks:
    """Stands in for a world: its ranks' parts come together on rank 0."""

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return [value, *self.others]


class Catch:
    def gather(self, value):
        self.value = value
        return []


RECIPE = load("digits")


def batch(targets, count, start=0):
    """Of held-out samples from `start` on."""
    return Batch(torch.empty(0), torch.as_tensor(targets), count, range(start, start + count))


def logits(predicted, sure=4.0, classes=3):
    found = torch.zeros(len(predicted), classes)
    found[range(len(predicted)), predicted] = sure
    return found


def test_the_worst_are_found_by_their_places_and_padding_is_left_out():
    task = Classification(RECIPE, ["a", "b", "c"])
    found = Mistakes(task)
    found.add(logits([0, 1, 2, 0]), batch([0, 1, 1, 0], 4))  # sample 2 is wrong
    found.add(logits([1, 1, 2, 2], 6.0), batch([1, 0, 0, 0], 2, 4))  # sample 5 is, more surely; two rows are padding
    worst = found.gathered(Ranks())
    assert [one.place for one in worst[:2]] == [5, 2] and {one.place for one in worst} == set(range(6))
    assert worst[0].predicted[0][0] == 1 and worst[0].predicted[0][1] > 0.9 and int(worst[0].target) == 0
    assert found.pairs.tolist() == [[2, 1, 0], [0, 2, 1], [0, 0, 0]]
    assert found.hits.tolist() == [2, 2, 0] and found.counts.tolist() == [3, 3, 0]


def test_ranks_are_added_and_those_without_outputs_add_nothing():
    task = Classification(RECIPE, ["a", "b", "c"])
    other, catch = Mistakes(task), Catch()
    other.add(logits([2, 2], 9.0), batch([2, 0], 2, 4))
    assert other.gathered(catch) == []
    found = Mistakes(task)
    found.add(logits([0, 1]), batch([0, 0], 2))
    worst = found.gathered(Ranks(catch.value, None))
    assert [one.place for one in worst[:2]] == [5, 1]
    assert found.pairs.sum() == 4 and found.counts.tolist() == [3, 0, 1]
    assert Mistakes(task).gathered(Ranks(None)) == []


def test_the_worst_of_many_are_kept(monkeypatch):
    """Those that a sort of all of them would give, in however many batches and ranks they come."""
    monkeypatch.setattr(evaluation, "ROWS", 20)
    task, drawn = Classification(RECIPE, ["a", "b", "c"]), torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(400, 3, generator=drawn), torch.randint(3, (400,), generator=drawn)
    parts = []
    for rank in range(2):
        found, catch = Mistakes(task), Catch()
        for start in range(50 * rank, 400, 100):
            found.add(outputs[start : start + 50], batch(targets[start : start + 50], 50, start))
        found.gathered(catch)
        parts.append(catch.value)
    worst = Mistakes(task).gathered(Ranks(*parts))
    probabilities = outputs.softmax(1)[range(400), targets]
    assert [one.place for one in worst] == probabilities.argsort()[:20].tolist()
    assert worst[0].label_probability == pytest.approx(probabilities.min().item(), rel=1e-4)


def test_of_samples_that_were_left_out_the_others_keep_their_places():
    found = Mistakes(Classification(RECIPE, ["a", "b", "c"]))
    found.add(logits([0, 2, 2, 0]), Batch(torch.empty(0), torch.tensor([0, 1, 2, 0]), 3, [4, 6, 7]))
    assert [one.place for one in found.gathered(Ranks())] == [6, 4, 7] and found.counts.sum() == 3


def test_labels_and_values_have_worst_samples_and_no_classes():
    recipe = load("digits", "task.name=multilabel")
    labels = Mistakes(Multilabel(recipe, ["a", "b"]))
    labels.add(torch.tensor([[5.0, -5.0], [5.0, 5.0]]), batch([[1.0, 0.0], [0.0, 0.0]], 2))
    assert [one.place for one in labels.gathered(Ranks())] == [1, 0] and labels.counts is None
    values = Mistakes(Regression(load("digits", "task.name=regression"), ["age"]))
    values.add(torch.tensor([[1.0], [2.0]]), batch([[1.1], [9.0]], 2))
    worst = values.gathered(Ranks())
    assert [one.place for one in worst] == [1, 0] and worst[0].loss == pytest.approx(49.0)
    assert worst[0].predicted == ((0, 2.0),) and worst[0].label_probability is None


class Own(Task):
    """A user's task: a loss and nothing else."""

    def loss(self, outputs, targets):
        self.asked = getattr(self, "asked", 0) + 1
        return torch.nn.functional.cross_entropy(outputs, targets)


def test_a_task_with_a_loss_alone_has_classes_and_no_worst_samples():
    task = Own(RECIPE, ["a", "b", "c"])
    found = Mistakes(task)
    found.add(torch.randn(300, 3), batch(torch.randint(3, (300,)), 300))
    assert found.gathered(Ranks()) == [] and not hasattr(task, "asked") and found.counts.sum() == 300


class Broken(Own):
    def losses(self, outputs, targets):
        raise ZeroDivisionError


def test_a_task_that_fails_at_this_ends_no_run():
    found = Mistakes(Broken(RECIPE, ["a"]))
    for _ in range(2):
        found.add(torch.randn(2, 4, 5, 5), batch(torch.zeros(2, 5, 5), 2))
    assert found.gathered(Ranks()) == [] and found.pairs is None


def test_a_loss_that_is_no_number_is_not_shown_as_the_worst():
    found = Mistakes(Classification(RECIPE, ["a", "b", "c"]))
    found.add(torch.tensor([[torch.nan] * 3, [0.0, 4.0, 0.0]]), batch([0, 0], 2))
    assert found.gathered(Ranks())[0].place == 1
