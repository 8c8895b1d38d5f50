"""A measurement leaves no trace in a model, whatever its forward changes."""

import contextvars
import copy
import ctypes
import functools
import itertools
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import counted_passes
from trainer.errors import RecipeError
from trainer.models.equivalence import list_changing_state, observe
from trainer.models.host_state import read_host_state
from trainer.models.reachable import Reachable, find_doubts
from trainer.models.undisturbed import find_change, restore_after

CPU = torch.device("cpu")


class Changing(nn.Module):
    """A forward that changes one of each kind of thing."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.count, self.last, self.seen, self.names, self.state = 0, None, [], {}, torch.zeros(3)
        self.array, self.nested = (
            np.zeros(3),
            {
                "n": 0,
                "arrays": [np.zeros(2)],
                "tensors": (torch.zeros(2),),
            },
        )
        self.mask, self.system = torch.zeros(1, 4).expand(4, 4), random.SystemRandom()
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.mine, self.torchs = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.old, self.pythons = np.random.RandomState(0), random.Random(0)

    def draws(self):
        own = [
            self.mine.random(),
            torch.rand((), generator=self.torchs).item(),
            self.old.rand(),
            self.pythons.random(),
        ]
        return [
            *own,
            random.random(),
            np.random.rand(),
            torch.rand(()).item(),
        ]

    def forward(self, x):
        self.count += 1
        self.last = x
        self.norm.momentum = 1.0
        self.seen.append(1)
        self.names["a"] = 1
        self.state += 1
        self.array += 1
        self.nested["n"] += 1
        self.nested["arrays"][0] += 1
        self.nested["tensors"][0].add_(1)
        self.made = getattr(self, "made", 0) + 1
        self.train(not self.training)
        self.draws()
        return self.norm(x)


def described(model):
    plain = (
        model.count,
        model.last,
        model.seen,
        model.names,
        model.state.tolist(),
        model.training,
        model.norm.momentum,
    )
    plain = *plain, model.array.tolist(), repr(model.nested), hasattr(model, "made")
    return str(plain), {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_changes_of_a_forward_pass_are_undone():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    expected = Changing().draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = Changing()
    before = described(model)
    with restore_after([model], CPU):
        for _ in range(2):
            model(torch.randn(4, 3))
        assert described(model) != before
    assert described(model) == before
    assert model.draws() == expected


TOTALS = {"passes": 0}
PASSES = 0


class Pace:
    passes = 0


class SlottedPace:
    __slots__ = ("passes",)

    def __init__(self):
        self.passes = 0


def count_in_global(model):
    global PASSES
    PASSES += 1


def count_in_default(model, *, passes={"n": 0}):  # noqa: B006
    passes["n"] += 1


def count_in_closure(passes=0):
    def count():
        nonlocal passes
        passes += 1

    return count


def add_to(owner, name):
    setattr(owner, name, getattr(owner, name) + 1)


# Counters of passes: the start value, the function that counts, and the function that reads the
# count.
PLACES = {
    "object": (Pace, lambda model: add_to(model.kept, "passes"), lambda model: model.kept.passes),
    "slots": (
        SlottedPace,
        lambda model: add_to(model.kept, "passes"),
        lambda model: model.kept.passes,
    ),
    "namespace": (
        lambda: types.SimpleNamespace(inner=[types.SimpleNamespace(n=0)]),
        lambda model: add_to(model.kept.inner[0], "n"),
        lambda model: model.kept.inner[0].n,
    ),
    "Counter": (Counter, lambda model: model.kept.update("n"), lambda model: model.kept["n"]),
    "order": (
        lambda: OrderedDict(a=0, b=0, c=0),
        lambda model: model.kept.move_to_end(next(iter(model.kept))),
        lambda model: list(model.kept),
    ),
    "deque": (
        lambda: deque([0], 1),
        lambda model: model.kept.append(model.kept[0] + 1),
        lambda model: model.kept[0],
    ),
    "NumPy": (lambda: np.int64(0), lambda model: add_to(model, "kept"), lambda model: model.kept),
    "scalar tensor": (
        lambda: torch.zeros(()),
        lambda model: add_to(model, "kept"),
        lambda model: model.kept.item(),
    ),
    "annealed": (
        lambda: {"heat": 1.0},
        lambda model: model.kept.update(heat=model.kept["heat"] / 2),
        lambda model: model.kept["heat"],
    ),
    "iterator": (itertools.count, lambda model: next(model.kept), lambda model: repr(model.kept)),
    "closure": (
        count_in_closure,
        lambda model: model.kept(),
        lambda model: model.kept.__closure__[0].cell_contents,
    ),
    "partial": (
        lambda: functools.partial(lambda passes: passes.append(1), []),
        lambda model: model.kept(),
        lambda model: len(model.kept.args[0]),
    ),
    "class": (int, lambda model: add_to(Pace, "passes"), lambda model: Pace.passes),
    "global": (int, count_in_global, lambda model: PASSES),
    "global dictionary": (
        int,
        lambda model: TOTALS.update(passes=TOTALS["passes"] + 1),
        lambda _: TOTALS["passes"],
    ),
    "default": (
        int,
        count_in_default,
        lambda model: count_in_default.__kwdefaults__["passes"]["n"],
    ),
    "parameter": (
        int,
        lambda model: setattr(model.norm.weight, "seen", 1),
        lambda model: vars(model.norm.weight),
    ),
    "hook": (
        int,
        lambda model: model.norm.register_forward_hook(lambda *_: None),
        lambda model: len(model.norm._forward_hooks),
    ),
    "what trains": (
        int,
        lambda model: model.norm.weight.requires_grad_(False),
        lambda model: model.norm.weight.requires_grad,
    ),
    "replaced buffer": (
        int,
        lambda model: setattr(model.norm, "running_mean", model.norm.running_mean + 1),
        lambda model: model.norm.running_mean.tolist(),
    ),
}


def count_in_cache(model):
    model.kept("passes")[0] += 1


def begin_bounded_cache():
    """Return a cache that contains two results, which a pass reads in the opposite order."""
    read = functools.lru_cache(lambda key: [0])
    read("passes"), read("other")
    return read


def count_by_weak_key(model):
    WEAK[model] = WEAK.get(model, 0) + 1


class Guarded(dict):
    def __len__(self):
        raise RuntimeError

    __iter__ = keys = items = __len__


class GuardedNumber(int):
    def __repr__(self):
        raise RuntimeError


def begin_object_array():
    return np.array([0, [0]], dtype=object)


def count_in_object_array(model):
    model.kept[1][0] += 1


def count_in_own_import(model):
    import tests.models.counted_passes as counted

    counted.passes += 1


VARIABLE = contextvars.ContextVar("passes", default=0)
LOCAL = threading.local()
LOCAL.passes = 0
WEAK = weakref.WeakKeyDictionary()
PLACES |= {
    "empty cache": (
        lambda: functools.lru_cache(lambda key: [0]),
        count_in_cache,
        lambda model: model.kept("passes")[0],
    ),
    "endless cache": (
        lambda: functools.cache(lambda key: [0]),
        count_in_cache,
        lambda model: model.kept("passes")[0],
    ),
    "bounded cache": (begin_bounded_cache, count_in_cache, lambda model: model.kept("passes")[0]),
    "object array": (begin_object_array, count_in_object_array, lambda model: model.kept[1][0]),
    "module imported inside": (int, count_in_own_import, lambda model: counted_passes.passes),
    "context variable": (int, lambda _: VARIABLE.set(VARIABLE.get() + 1), lambda _: VARIABLE.get()),
    "thread": (int, lambda _: add_to(LOCAL, "passes"), lambda _: LOCAL.passes),
    "weak keys": (int, count_by_weak_key, lambda model: WEAK.get(model)),
    "C": (ctypes.c_int, lambda model: add_to(model.kept, "value"), lambda model: model.kept.value),
    "view": (
        lambda: memoryview(bytearray(1)),
        lambda model: model.kept.__setitem__(0, model.kept[0] + 1),
        lambda model: model.kept[0],
    ),
    "guarded": (
        lambda: Guarded(n=0),
        lambda model: model.kept.update(n=model.kept["n"] + 1),
        lambda model: model.kept["n"],
    ),
    "guarded number": (
        lambda: GuardedNumber(0),
        lambda model: setattr(model, "kept", GuardedNumber(model.kept + 1)),
        lambda model: int(model.kept),
    ),
}


def counting(place):
    begin, count, read = PLACES[place]

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.kept = nn.BatchNorm1d(3), begin()

        def forward(self, x):
            count(self)
            return self.norm(x)

    model = Counting()
    return model, lambda: copy.copy(read(model))


@pytest.mark.parametrize("place", PLACES)
def test_passes_that_a_model_counts_anywhere_are_put_back(place):
    model, read = counting(place)
    before = read()
    with restore_after([model], CPU):
        model(torch.randn(4, 3))
        assert read() != before
    assert read() == before


@pytest.mark.parametrize(
    "place", [place for place in PLACES if place not in ("parameter", "what trains")]
)
def test_values_that_each_pass_changes_are_named(place):
    model, read = counting(place)
    before = read()
    assert list_changing_state(
        observe(
            model,
            model.train,
            model,
            torch.randn(2, 4, 3).unbind(),
        )
    ) not in (
        [],
        None,
    )
    assert read() == before
    device = {"cpu"}
    actual = read_host_state([model], device)
    model(torch.randn(4, 3))
    assert find_change(actual, read_host_state([model], device)) is not None


def test_values_that_cannot_be_restored_are_refused_by_name():
    model = nn.Sequential(nn.Flatten())
    numbers = (number for number in range(9))
    model.register_forward_hook(lambda *_: next(numbers) and None)
    with pytest.raises(RecipeError, match=r"_forward_hooks.*gi_frame"), restore_after([model], CPU):
        model(torch.randn(4, 3))


def test_observers_of_a_probe_keep_their_records():
    """Functions of `trainer` itself are no state of a model."""
    seen = []

    def note(*_):
        seen.append(1)

    note.__module__ = "trainer.models.norms"
    model = nn.Flatten()
    model.register_forward_hook(note)
    with restore_after([model], CPU):
        model(torch.randn(4, 3))
    assert seen == [1]


def test_a_copy_that_is_tried_may_move_what_cannot_be_put_back():
    """Only the model that trains must be restored."""
    model = nn.Linear(1, 1)
    model.turns = itertools.cycle([1, 2])
    probe = copy.deepcopy(model)
    with restore_after([probe], checked=[model]):
        next(probe.turns)
    with pytest.raises(RecipeError), restore_after([model]):
        next(model.turns)


def test_an_iterator_that_nobody_moved_is_left_alone():
    model = nn.Linear(1, 1)
    model.names = map(lambda number: number + 1, [1, 2])
    with restore_after([model]):
        pass
    assert [*model.names] == [2, 3]


def test_code_of_installed_packages_is_not_walked():
    """Classes that Cython made have no string as their module; from scipy a walk would reach 50,000
    values.
    """
    from scipy import ndimage

    class Zooming(nn.Linear):
        def forward(self, images):
            return ndimage.zoom(images.numpy(), 2)

    assert len(Reachable([Zooming(1, 1)]).values) < 1000


def test_a_limited_cache_gives_each_argument_its_own_result_after_a_probe():
    squares = functools.lru_cache(maxsize=2)(lambda number: [number * number])
    assert [squares(2), squares(3)] == [[4], [9]]
    model = nn.Flatten()
    fresh = itertools.count(4)
    model.squares = squares
    model.register_forward_hook(lambda *_: model.squares(next(fresh)) and None)
    with restore_after([model], CPU):
        model(torch.randn(4, 3))
    assert [squares(number) for number in (2, 3, 4)] == [[4], [9], [16]]


def test_a_context_variable_that_was_never_set_keeps_its_default():
    variable = contextvars.ContextVar("passes", default=3)
    model = nn.Flatten()
    model.kept = variable
    model.register_forward_hook(lambda *_: variable.set(variable.get() + 1) and None)
    with restore_after([model], CPU):
        model(torch.randn(4, 3))
    assert variable.get() == 3


class Keeping(nn.Module):
    """A model that keeps something in an attribute that torch does not look into."""

    def __init__(self, kept):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.kept = kept


UNREGISTERED = {
    "list": lambda: [nn.BatchNorm1d(2)],
    "dictionary in a dictionary": lambda: {"a": {"b": nn.Linear(2, 2)}},
    "parameter": lambda: [nn.Parameter(torch.zeros(2))],
    "statistics alone": lambda: (nn.BatchNorm1d(2, affine=False),),
    "closure": lambda: functools.partial(lambda layer, x: layer(x), nn.Linear(2, 2)),
}
WITHOUT_DOUBT = {
    "nothing": lambda: None,
    "frozen teacher": lambda: [nn.BatchNorm1d(2).requires_grad_(False)],
    "activation": lambda: [nn.ReLU()],
    "registered": lambda: nn.ModuleList([nn.Linear(2, 2)]),
}


@pytest.mark.parametrize("kind", UNREGISTERED)
def test_a_layer_that_torch_does_not_see_is_named(kind):
    doubts = find_doubts(Keeping(UNREGISTERED[kind]()))
    assert len(doubts) == 1
    assert "kept" in doubts[0]


@pytest.mark.parametrize("kind", WITHOUT_DOUBT)
def test_a_layer_that_is_registered_or_never_trains_is_no_doubt(kind):
    assert find_doubts(Keeping(WITHOUT_DOUBT[kind]())) == []


def test_a_layer_in_a_list_that_is_registered_too_is_no_doubt():
    model = Keeping([])
    model.kept += [model, model.body, model.body.weight]
    assert find_doubts(model) == []


def test_a_walk_that_ends_early_is_reported(monkeypatch):
    monkeypatch.setattr("trainer.models.reachable.MAX_VALUES", 100)
    assert len(find_doubts(Keeping([[number] for number in range(200)]))) == 1
    assert find_doubts(Keeping([[number] for number in range(20)])) == []
