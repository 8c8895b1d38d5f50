"""Running statistics of micro-batches, committed once, are those of nn.BatchNorm on the whole mini-batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.models.blocks import freeze
from trainer.modes.deferred_batchnorm import DeferredBatchNorm, convert_deferred_batchnorm, recomputing

EVEN, UNEVEN = (4, 4, 4), (5, 4, 2, 1)


def norm(**options):
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(3, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def deferred(layer):
    """The layer as a pipeline has it; the given one stays as it is."""
    (found,) = convert_deferred_batchnorm(nn.Sequential(copy.deepcopy(layer)))
    return found


def batch(number=0, rows=12):
    """Images that differ from row to row, as a sorted data set's."""
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(rows, 3, 4, 4, generator=generator)
    return noise + torch.arange(rows).view(-1, 1, 1, 1) * 0.5 + 3


def statistics(layer):
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def agree(ours, theirs):
    torch.testing.assert_close(statistics(ours), statistics(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (12,)])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"affine": False}], ids=str)
def test_statistics_of_the_whole_mini_batch(sizes, options):
    theirs = norm(**options)
    ours = deferred(theirs)
    for number in range(3):
        theirs(batch(number))
        for piece in batch(number).split(sizes):
            ours(piece)
        ours.commit()
        agree(ours, theirs)
    assert ours.num_batches_tracked == 3
    torch.testing.assert_close(ours.eval()(batch(7)), theirs.eval()(batch(7)))


def test_statistics_under_autocast():
    theirs = norm()
    ours = deferred(theirs)
    with torch.autocast("cpu", torch.bfloat16):
        theirs(batch().bfloat16())
        for piece in batch().bfloat16().split(UNEVEN):
            assert ours(piece).dtype == torch.bfloat16
    ours.commit()
    assert ours.running_var.dtype == torch.float32
    agree(ours, theirs)


@pytest.mark.parametrize("shape", [(12, 3), (12, 3, 5), (12, 3, 2, 2, 2)])
def test_every_number_of_dimensions(shape):
    theirs = (nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm3d)(3)
    ours = deferred(theirs)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + 5
    theirs(images)
    for piece in images.split((8, 4)):
        ours(piece)
    ours.commit()
    agree(ours, theirs)


def test_without_deferring_the_variance_is_off():
    """What there would be without this room: momentum forgets early micro-batches, none sees how they differ."""
    whole, micro = norm(momentum=None), norm(momentum=None)
    whole(batch())
    for piece in batch().split(EVEN):
        micro(piece)
    assert (micro.running_var / whole.running_var).max() < 0.75
    assert micro.num_batches_tracked == 3


def test_nothing_changes_before_the_commit_and_a_commit_without_images_is_none():
    ours = deferred(norm())
    before = statistics(ours)
    ours.commit()
    ours(batch())
    assert all(torch.equal(before[name], buffer) for name, buffer in ours.named_buffers())
    ours.commit()
    once = statistics(ours)
    assert not torch.equal(once["running_mean"], before["running_mean"])
    ours.commit()
    assert all(torch.equal(once[name], buffer) for name, buffer in ours.named_buffers())


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_batch_norms_for_each_micro_batch(options, training):
    theirs = norm(**options).train(training)
    ours = deferred(theirs)
    assert ours.training == training
    found = []
    for layer in (ours, theirs):
        inputs = batch().requires_grad_()
        outputs = torch.cat([layer(piece) for piece in inputs.split(UNEVEN)])
        (outputs * batch(1)).sum().backward()
        found.append([outputs.detach(), inputs.grad, *(p.grad for p in layer.parameters())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    theirs = norm()
    theirs(batch(3))
    ours = deferred(theirs).eval()
    theirs.eval()
    before = statistics(ours)
    assert torch.equal(ours(batch()), theirs(batch()))
    ours.commit()
    assert all(torch.equal(before[name], buffer) for name, buffer in ours.named_buffers())


def test_a_layer_that_tracks_nothing():
    ours = deferred(norm(track_running_stats=False))
    ours(batch())
    ours.commit()
    assert list(ours.named_buffers()) == []


def test_activations_computed_twice_count_once():
    theirs = norm()
    ours, plain = deferred(theirs), deferred(theirs)
    theirs(batch())
    again = recomputing()  # one object for all micro-batches, as a checkpoint may keep it
    for layer, context in ((ours, again), (plain, nullcontext())):
        for piece in batch().split(UNEVEN):
            pair, stage = (nullcontext(), context), nn.Sequential(layer, nn.Tanh())
            out = checkpoint(stage, piece.requires_grad_(), use_reentrant=False, context_fn=lambda p=pair: p)
            out.sum().backward()
    assert plain._count == 2 * ours._count == 2 * 12 * 16  # so it does compute twice
    ours.commit()
    agree(ours, theirs)
    assert DeferredBatchNorm.gathering


def test_names_and_objects_stay():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(norm(), nn.ReLU()), norm(affine=False), nn.BatchNorm1d(2))
    model[2].eval()
    model[1][0].weight.requires_grad_(False)
    state, parameters = model.state_dict(keep_vars=True), list(model.parameters())
    layers = convert_deferred_batchnorm(model)
    assert [type(layer) for layer in layers] == [DeferredBatchNorm] * 3
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[name] is tensor for name, tensor in state.items())
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    assert [layer.training for layer in layers] == [True, False, True]
    assert convert_deferred_batchnorm(model) == layers  # converting again changes nothing


def test_a_picture_without_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"expected \(N, C, ...\), got \(3,\)"):
        deferred(nn.BatchNorm1d(3))(torch.randn(3))


@pytest.mark.gpu
def test_statistics_on_a_gpu():
    theirs = norm().cuda()
    ours = deferred(theirs)
    theirs(batch().cuda())
    for piece in batch().cuda().split(UNEVEN):
        ours(piece)
    ours.commit()
    torch.testing.assert_close(statistics(ours), statistics(theirs), rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gathers_nothing():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    freeze(model, ["0"], "model")
    assert convert_deferred_batchnorm(model) == [model[3]] and type(model[1]) is nn.BatchNorm2d
