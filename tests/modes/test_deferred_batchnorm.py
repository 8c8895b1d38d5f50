"""Running statistics of micro-batches, updated once, equal those of nn.BatchNorm on the whole
mini-batch.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.models.unlucky_models import Renormalised
from tests.modes.odd_models import Squashed
from trainer.data import Example, TensorSpec
from trainer.errors import RecipeError
from trainer.models.blocks import freeze
from trainer.modes.deferred_batchnorm import DeferredStatistics, find_deferrable

EVEN = (4, 4, 4)
UNEVEN = (5, 4, 2, 1)


def norm(**options):
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(3, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


class Deferred:
    """A copy of a layer as a pipeline has it."""

    def __init__(self, layer, area=16):
        self.layer = copy.deepcopy(layer)
        values = {} if layer.running_mean is None else {self.layer: area}
        self.statistics = DeferredStatistics(nn.Sequential(self.layer), values)

    def __call__(self, inputs):
        if not self.layer.training:
            return self.layer(inputs)
        self.statistics.begin()
        out = self.layer(inputs)
        self.statistics.gather(len(inputs))
        return out

    def commit(self):
        self.statistics.commit()


def batch(number=0, rows=12):
    """Images that differ from row to row, as a sorted data set's."""
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(rows, 3, 4, 4, generator=generator)
    return noise + torch.arange(rows).view(-1, 1, 1, 1) * 0.5 + 3


def statistics(layer):
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def agree(ours, theirs, tolerance=1e-6):
    torch.testing.assert_close(statistics(ours), statistics(theirs), rtol=tolerance, atol=tolerance)


def assert_alike(ours, theirs, images, sizes, tolerance=1e-6):
    """A mini-batch in micro-batches leaves the statistics that it leaves as a whole."""
    theirs(images)
    for piece in images.split(sizes):
        ours(piece)
    ours.commit()
    agree(ours.layer, theirs, tolerance)


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (12,)])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"affine": False}], ids=str
)
def test_statistics_of_the_whole_mini_batch(sizes, options):
    norm_difference = norm(**options)
    ours = Deferred(norm_difference)
    for number in range(3):
        assert_alike(ours, norm_difference, batch(number), sizes)
    assert ours.layer.num_batches_tracked == 3 and ours.layer.momentum == norm_difference.momentum
    torch.testing.assert_close(ours.layer.eval()(batch(7)), norm_difference.eval()(batch(7)))


@pytest.mark.parametrize("shape", [(12, 3), (12, 3, 5), (12, 3, 2, 2, 2)])
def test_every_number_of_dimensions(shape):
    reference = (nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm3d)(3)
    ours = Deferred(reference, area=math.prod(shape[2:]))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + 5
    assert_alike(ours, reference, images, (8, 4))


def test_an_abandoned_mini_batch_leaves_no_trace():
    ours = Deferred(norm(momentum=0.3))
    before = statistics(ours.layer)
    ours.commit()
    ours(batch())
    assert not torch.equal(before["running_mean"], ours.layer.running_mean), (
        "which takes the micro-batch's meanwhile"
    )
    ours.statistics.forget()
    ours.commit()
    assert all(torch.equal(before[name], buffer) for name, buffer in ours.layer.named_buffers())
    assert ours.layer.momentum == 0.3
    ours(batch())
    ours.commit()
    once = statistics(ours.layer)
    ours.commit()
    assert all(torch.equal(once[name], buffer) for name, buffer in ours.layer.named_buffers())


def test_changes_between_mini_batches_are_respected():
    """A checkpoint that is loaded, rank 0's buffers, a momentum that follows a plan."""
    norm_difference = norm()
    ours = Deferred(norm_difference)
    for momentum in (0.1, 0.5):
        for layer in (ours.layer, norm_difference):
            layer.momentum = momentum
            layer.running_mean.fill_(momentum)
        assert_alike(ours, norm_difference, batch(), EVEN)


def test_activations_computed_twice_count_once():
    norm_difference = norm()
    ours = Deferred(norm_difference)
    norm_difference(batch())
    passes = []
    ours.layer.register_forward_pre_hook(lambda *_: passes.append(1))
    for piece in batch().split(UNEVEN):
        ours.statistics.begin()
        out = checkpoint(ours.layer, piece.requires_grad_(), use_reentrant=False)
        ours.statistics.gather(len(piece))
        out.square().sum().backward()
    assert len(passes) == 2 * len(UNEVEN)
    ours.commit()
    agree(ours.layer, norm_difference)


def test_layers_of_one_stage_with_their_own_momenta():
    """A layer without momentum, and a layer that never trains."""
    model = nn.Sequential(
        norm(),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, momentum=0.5),
        norm(),
    )
    model[3].train = lambda mode=True: model[3]
    model[3].training = False
    whole = copy.deepcopy(model)
    statistics_ = DeferredStatistics(model, dict.fromkeys(model, 16))
    for number in range(2):
        whole(batch(number))
        statistics_.begin()
        model(batch(number))
        statistics_.gather(12)
        statistics_.commit()
    for one, two in zip(model, whole, strict=True):
        agree(one, two)
    assert [layer.momentum for layer in model] == [0.1, None, 0.5, 0.1]


def layers_of(model):
    return find_deferrable(
        model,
        Example(4, TensorSpec((3, 8, 8), torch.float32)),
        "set it to false",
    )


def refused(model):
    with pytest.raises(RecipeError) as error:
        layers_of(model)
    return str(error.value)


class Activated(nn.BatchNorm2d):
    """A layer like timm's, with dropout and an activation inside and the formula written out."""

    def __init__(self, features):
        super().__init__(features)
        self.act, self.drop = nn.SiLU(inplace=True), nn.Dropout(0.5)

    def forward(self, inputs):
        if self.training:
            self.num_batches_tracked.add_(1)
        mean = self.running_mean
        variance = self.running_var
        x = batch_norm(
            inputs,
            mean,
            variance,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return self.act(self.drop(x))


class Hasty(nn.BatchNorm2d):
    def forward(self, inputs):
        return batch_norm(
            inputs, self.running_mean, self.running_var, None, None, self.training, 0.5, self.eps
        )


class Counting(nn.BatchNorm2d):
    def __init__(self, features):
        super().__init__(features)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += len(inputs)
        return super().forward(inputs)


def test_subclasses_that_only_add_are_left_as_they_are():
    odd = nn.BatchNorm2d(3)
    odd.forward = lambda inputs: nn.BatchNorm2d.forward(odd, inputs).tanh()
    parametrized = nn.BatchNorm2d(3)
    parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    layers = [
        Activated(3),
        Squashed(3),
        odd,
        parametrized,
        nn.BatchNorm2d(3),
        nn.SyncBatchNorm(3),
    ]
    model = nn.Sequential(nn.Conv2d(3, 3, 3, stride=2), *layers)
    kinds = [type(layer) for layer in model]
    assert layers_of(model) == dict.fromkeys(layers, 9)
    assert [type(layer) for layer in model] == kinds
    assert all(part.training for part in model.modules())
    assert all(layer.num_batches_tracked == 0 and layer.momentum == 0.1 for layer in layers)


@pytest.mark.parametrize("kind", [Renormalised, Hasty, Counting])
def test_a_subclass_with_other_statistics_is_refused_by_name(kind):
    message = refused(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(Squashed(3), kind(3))))
    assert message.startswith(f"layer 1.1 ({kind.__name__}) ")


def test_others_that_keep_statistics_are_refused():
    layer = nn.BatchNorm2d(3)
    assert "layer 0 (BatchNorm2d) " in refused(nn.Sequential(layer, layer))
    kept = nn.InstanceNorm2d(3, track_running_stats=True)
    none = nn.InstanceNorm2d(3)
    assert "layer 1 (InstanceNorm2d) " in refused(nn.Sequential(none, kept))
    assert "(Counting)" in refused(Counting(3))
    assert layers_of(nn.Sequential(none, Renormalised(3, track_running_stats=False))) == {}, (
        "nothing to be off"
    )


@pytest.mark.gpu
def test_statistics_on_a_gpu():
    reference = norm().cuda()
    ours = Deferred(reference)
    assert_alike(ours, reference, batch().cuda(), UNEVEN, 1e-5)


def test_frozen_layers_gather_no_statistics():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3, affine=False),
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
    )
    freeze(model, ["0"], "model")
    assert layers_of(model) == {model[3]: 64}
