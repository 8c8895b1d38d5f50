"""The worst predictions and the classes taken for each other, over batches and ranks."""

import pytest
import torch

from trainer.data import Batch
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel
from trainer.training import evaluation
from trainer.training.evaluation import Mistakes


class Ranks:
    """Stands in for a world: its ranks' parts come together on rank 0, which is another where there are `parts`."""

    def __init__(self, *others, parts=None):
        self.others, self.parts = others, parts

    def gather(self, value):
        if self.parts is None:
            return [value, *self.others]
        self.parts.append(value)
        return []


TASK = Classification(load("digits"), ["a", "b", "c"])


def batch(targets, count, start=0):
    """Of held-out samples from `start` on."""
    return Batch(torch.empty(0), torch.as_tensor(targets), count, range(start, start + count))


def logits(predicted, sure=4.0, classes=3):
    found = torch.zeros(len(predicted), classes)
    found[range(len(predicted)), predicted] = sure
    return found


def test_the_worst_are_found_by_their_places_and_padding_is_left_out():
    found = Mistakes(TASK)
    found.add(logits([0, 1, 2, 0]), batch([0, 1, 1, 0], 4))  # sample 2 is wrong
    found.add(logits([1, 1, 2, 2], 6.0), batch([1, 0, 0, 0], 2, 4))  # sample 5 is, more surely; two rows are padding
    worst = found.gathered(Ranks())
    assert [one.place for one in worst[:2]] == [5, 2] and {one.place for one in worst} == set(range(6))
    assert (worst[0].predicted, worst[0].target) == (1, 0) and worst[0].predicted_probability > 0.9
    assert found.pairs.tolist() == [[2, 1, 0], [0, 2, 1], [0, 0, 0]]


def test_ranks_are_added_and_those_without_outputs_add_nothing():
    other, parts = Mistakes(TASK), []
    other.add(logits([2, 2], 9.0), batch([2, 0], 2, 4))
    assert other.gathered(Ranks(parts=parts)) == []
    found = Mistakes(TASK)
    found.add(logits([0, 1]), batch([0, 0], 2))
    worst = found.gathered(Ranks(*parts, None))
    assert [one.place for one in worst[:2]] == [5, 1]
    assert found.pairs.sum(1).tolist() == [3, 0, 1]
    assert Mistakes(TASK).gathered(Ranks(None)) == []


def test_the_worst_of_many_are_kept(monkeypatch):
    """Those that a sort of all of them would give, in however many batches and ranks they come."""
    monkeypatch.setattr(evaluation, "ROWS", 20)
    drawn = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(400, 3, generator=drawn), torch.randint(3, (400,), generator=drawn)
    parts = []
    for rank in range(2):
        found = Mistakes(TASK)
        for start in range(50 * rank, 400, 100):
            found.add(outputs[start : start + 50], batch(targets[start : start + 50], 50, start))
        found.gathered(Ranks(parts=parts))
    worst = Mistakes(TASK).gathered(Ranks(*parts))
    probabilities = outputs.softmax(1)[range(400), targets]
    assert [one.place for one in worst] == probabilities.argsort()[:20].tolist()
    assert worst[0].label_probability == pytest.approx(probabilities.min().item(), rel=1e-4)


def test_of_samples_that_were_left_out_the_others_keep_their_places():
    found = Mistakes(TASK)
    found.add(logits([0, 2, 2, 0]), Batch(torch.empty(0), torch.tensor([0, 1, 2, 0]), 3, [4, 6, 7]))
    assert [one.place for one in found.gathered(Ranks())] == [6, 4, 7] and found.pairs.sum() == 3


def test_what_has_not_one_class_has_no_mistakes():
    labels = Mistakes(Multilabel(load("digits", "task.name=multilabel"), ["a", "b"]))
    labels.add(torch.tensor([[5.0, -5.0], [5.0, 5.0]]), batch([[1.0, 0.0], [0.0, 0.0]], 2))
    assert labels.gathered(Ranks()) == [] and labels.pairs is None


def test_a_task_that_fails_at_this_ends_no_run(monkeypatch):
    monkeypatch.setattr(TASK, "label_probabilities", lambda outputs, targets: 1 / 0)
    found = Mistakes(TASK)
    for _ in range(2):
        found.add(torch.randn(2, 4, 5, 5), batch(torch.zeros(2, 5, 5), 2))
    assert found.gathered(Ranks()) == [] and found.pairs is None


def test_a_loss_that_is_no_number_is_not_shown_as_the_worst():
    found = Mistakes(TASK)
    found.add(torch.tensor([[torch.nan] * 3, [0.0, 4.0, 0.0]]), batch([0, 0], 2))
    assert found.gathered(Ranks())[0].place == 1
