"""The worst predictions and the classes taken for each other, over batches and ranks."""

import pytest
import torch

from trainer.data import Batch
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel
from trainer.training import evaluation
from trainer.training.evaluation import Mistakes


class Ranks:
    """Stands in for a world: it gathers the rows of all ranks
    on rank 0, which is another process if `parts` is given.
    """

    def __init__(self, *others, parts=None):
        self.others = others
        self.parts = parts

    def gather(self, value):
        if self.parts is None:
            return [value, *self.others]
        self.parts.append(value)
        return []


TASK = Classification(load("digits"), ["a", "b", "c"])


def batch(targets, count, start=0):
    """Return a batch of validation samples from `start` on."""
    return Batch(
        torch.empty(0),
        torch.as_tensor(targets),
        count,
        range(start, start + count),
    )


def logits(predicted, sure=4.0, classes=3):
    actual = torch.zeros(len(predicted), classes)
    actual[range(len(predicted)), predicted] = sure
    return actual


def test_the_worst_are_found_by_their_places_and_padding_is_left_out():
    mistakes = Mistakes(TASK)
    mistakes.add(logits([0, 1, 2, 0]), batch([0, 1, 1, 0], 4))  # sample 2 is wrong
    # Sample 5 is, more surely; two rows are padding.
    mistakes.add(logits([1, 1, 2, 2], 6.0), batch([1, 0, 0, 0], 2, 4))
    worst = mistakes.gathered(Ranks())
    assert [one.place for one in worst[:2]] == [5, 2]
    assert {one.place for one in worst} == set(range(6))
    assert (worst[0].predicted, worst[0].target) == (1, 0)
    assert worst[0].predicted_probability > 0.9
    assert mistakes.pairs.tolist() == [[2, 1, 0], [0, 2, 1], [0, 0, 0]]


def test_ranks_are_added_and_those_without_outputs_add_nothing():
    other = Mistakes(TASK)
    parts = []
    other.add(logits([2, 2], 9.0), batch([2, 0], 2, 4))
    assert other.gathered(Ranks(parts=parts)) == []
    mistakes = Mistakes(TASK)
    mistakes.add(logits([0, 1]), batch([0, 0], 2))
    worst = mistakes.gathered(Ranks(*parts, None))
    assert [one.place for one in worst[:2]] == [5, 1]
    assert mistakes.pairs.sum(1).tolist() == [3, 0, 1]
    assert Mistakes(TASK).gathered(Ranks(None)) == []


def test_the_worst_of_many_are_kept(monkeypatch):
    """The result equals the first rows of a full sort, for every number of batches and ranks."""
    monkeypatch.setattr(evaluation, "ROWS", 20)
    drawn = torch.Generator().manual_seed(0)
    outputs = torch.randn(400, 3, generator=drawn)
    targets = torch.randint(3, (400,), generator=drawn)
    parts = []
    for rank in range(2):
        mistakes = Mistakes(TASK)
        for start in range(50 * rank, 400, 100):
            mistakes.add(
                outputs[start : start + 50],
                batch(
                    targets[start : start + 50],
                    50,
                    start,
                ),
            )
        mistakes.gathered(Ranks(parts=parts))
    worst = Mistakes(TASK).gathered(Ranks(*parts))
    probabilities = outputs.softmax(1)[range(400), targets]
    assert [one.place for one in worst] == probabilities.argsort()[:20].tolist()
    assert worst[0].label_probability == pytest.approx(probabilities.min().item(), rel=1e-4)


def test_samples_keep_their_index_when_others_are_left_out():
    mistakes = Mistakes(TASK)
    mistakes.add(
        logits([0, 2, 2, 0]),
        Batch(
            torch.empty(0),
            torch.tensor([0, 1, 2, 0]),
            3,
            [4, 6, 7],
        ),
    )
    assert [one.place for one in mistakes.gathered(Ranks())] == [6, 4, 7]
    assert mistakes.pairs.sum() == 3


def test_tasks_without_a_single_class_have_no_mistakes():
    labels = Mistakes(Multilabel(load("digits", "task.name=multilabel"), ["a", "b"]))
    labels.add(torch.tensor([[5.0, -5.0], [5.0, 5.0]]), batch([[1.0, 0.0], [0.0, 0.0]], 2))
    assert labels.gathered(Ranks()) == [] and labels.pairs is None


def test_a_task_that_fails_at_this_ends_no_run(monkeypatch):
    monkeypatch.setattr(TASK, "label_probabilities", lambda outputs, targets: 1 / 0)
    mistakes = Mistakes(TASK)
    for _ in range(2):
        mistakes.add(torch.randn(2, 4, 5, 5), batch(torch.zeros(2, 5, 5), 2))
    assert mistakes.gathered(Ranks()) == [] and mistakes.pairs is None


def test_a_loss_that_is_no_number_is_not_shown_as_the_worst():
    mistakes = Mistakes(TASK)
    mistakes.add(torch.tensor([[torch.nan] * 3, [0.0, 4.0, 0.0]]), batch([0, 0], 2))
    assert mistakes.gathered(Ranks())[0].place == 1
