"""augment.transforms, augment.vflip and augment.repeats, compared with torchvision's own classes
and with the sampler of its reference scripts.
"""

import math
import shutil
from itertools import chain

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from tests.command_line import losses, ok, result, trainer
from tests.data.loading import epoch
from tests.data.photo_folders import write_two_classes
from tests.modes.ways import EXACT, SHALLOW, SMALL, assert_same_training
from trainer.data import DataShare, as_pictures, open_datasets, sampling
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import prepare_for_evaluation
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.recipe.transform_names import REFUSED, list_transforms

TYPED = (
    "augment.transforms=[{GaussianNoise: {sigma: 0.05}}, {ColorJitter: {brightness: 0.4}}, "
    "{RandomRotation: 15}, {RandomPerspective: {p: 0.5, interpolation: bilinear}}]"
)


def compose():
    """Return the transforms of `TYPED` as a user of torchvision writes them."""
    return v2.Compose(
        [
            v2.GaussianNoise(sigma=0.05),
            v2.ColorJitter(brightness=0.4),
            v2.RandomRotation(15),
            v2.RandomPerspective(p=0.5, interpolation=v2.InterpolationMode.BILINEAR),
        ]
    )


def expected_image(image, seed, number, index, flipped):
    """Return an image after flips and transforms, by torchvision and a seeded generator."""
    if flipped:
        image = image.flip(-1).flip(-2)
    bits = sampling.draw_bits(seed, number, index, sampling.TRANSFORMS)[0]
    torch.manual_seed(int(bits >> np.uint64(1)))
    return compose()(image.contiguous())


def pictures_of(datasets, batches):
    return torch.cat([as_pictures(datasets, inputs) for inputs, _ in batches])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """24 photos of two classes, of 40 x 56 pixels."""
    return write_two_classes(
        tmp_path_factory.mktemp("photos"),
        coarse=(5, 7),
        size=(40, 56),
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_images_in_memory_are_transformed_as_by_torchvision(loading, channels):
    words = [
        "data.name=synthetic",
        "data.samples=24",
        f"data.channels={channels}",
        "batch_size=8",
        "augment.hflip=1.0",
        "augment.vflip=1.0",
        TYPED,
    ]
    datasets = open_datasets(load(None, *words))
    order = sampling.draw_permutation(0, 3, 24)
    state = torch.random.get_rng_state()
    actual = pictures_of(datasets, epoch(loading(datasets, *words), 3))
    assert torch.equal(state, torch.random.get_rng_state())
    for picture, index in zip(actual, order, strict=True):
        image = datasets.train.images[index]
        expected = expected_image(image, 0, 3, index, flipped=True)
        assert torch.equal(picture.permute(2, 0, 1), expected)


def test_the_strength_of_rand_augment_is_torchvisions(loading):
    words = ["data.name=synthetic", "data.samples=24", "batch_size=8", "augment.auto=rand"]
    words += ["augment.operations=3", "augment.magnitude=21"]
    datasets = open_datasets(load(None, *words))
    order = sampling.draw_permutation(0, 0, 24)
    policy = v2.RandAugment(3, 21, interpolation=v2.InterpolationMode.BILINEAR)
    actual = pictures_of(datasets, epoch(loading(datasets, *words), 0))
    for picture, index in zip(actual, order, strict=True):
        seed = sampling.draw_bits(0, 0, index, sampling.AUTO)[0] >> np.uint64(1)
        torch.manual_seed(int(seed))
        expected = policy(datasets.train.images[index])
        assert torch.equal(picture.permute(2, 0, 1), expected)


@pytest.mark.slow(cases=["0"])
@pytest.mark.parametrize("workers", [0, 2])
def test_photos_are_transformed_as_by_torchvision(loading, photos, workers):
    words = [
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=[70,80]",
        "batch_size=8",
        f"data.workers={workers}",
        "augment.hflip=1.0",
        "augment.vflip=1.0",
        TYPED,
    ]
    datasets = open_datasets(load(None, *words))
    order = sampling.draw_permutation(0, 1, 24)
    for start in (0, 2):
        batches = epoch(loading(datasets, *words), 1, start=start)
        actual = pictures_of(datasets, batches)
        for picture, index in zip(actual, order[8 * start :], strict=True):
            path = datasets.train.where(index)
            image = prepare_for_evaluation(open_image(path, 3), (70, 80))
            expected = expected_image(image, 0, 1, index, flipped=True)
            assert torch.equal(picture.permute(2, 0, 1), expected)


def test_half_of_the_images_are_turned_upside_down_others_in_each_epoch(loading):
    words = ["data.name=synthetic", "data.samples=256", "batch_size=256"]
    datasets = open_datasets(load(None, *words))
    seen = []
    for number in (0, 1):
        pictures = pictures_of(
            datasets, epoch(loading(datasets, *words, "augment.vflip=0.5"), number)
        )
        order = sampling.draw_permutation(0, number, 256)
        plain = datasets.train.images[order].permute(0, 2, 3, 1)
        is_turned = (pictures == plain.flip(1)).flatten(1).all(1)
        is_same = (pictures == plain).flatten(1).all(1)
        assert torch.equal(is_turned, ~is_same)
        seen.append(is_turned[np.argsort(order)])
        assert 96 < is_turned.sum() < 160
    assert not torch.equal(*seen)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("name", list_transforms())
def test_every_transform_of_torchvision_works_or_is_refused_by_name(name, channels):
    words = ["data.name=synthetic", "data.samples=16", "data.image_size=24", "batch_size=8"]
    words.append(f"data.channels={channels}")
    arguments = {
        "RandomRotation": "15",
        "RandomAffine": "15",
        "ColorJitter": "0.4",
        "RandomCrop": "{size: 24, padding: 2}",
        "RandomResizedCrop": "24",
        "GaussianBlur": "3",
        "RandomAdjustSharpness": "2",
        "RandomPosterize": "3",
        "RandomSolarize": "100",
        "JPEG": "30",
        "Grayscale": "3",
        "ElasticTransform": "{sigma: 2.0}",
    }
    typed = f"{{{name}: {arguments[name]}}}" if name in arguments else name
    try:
        open_datasets(load(None, *words, f"augment.transforms=[{typed}]"))
    except RecipeError as error:
        assert f" {name} " in str(error) or f"{name}:" in str(error)
        is_refused = True
    else:
        is_refused = False
    for_colors = {"RandomPhotometricDistort", "Grayscale", "RandomGrayscale", "JPEG"}
    for_colors |= {"ColorJitter", "RandAugment", "AutoAugment", "TrivialAugmentWide", "AugMix"}
    for_colors |= {"RandomEqualize", "RandomAutocontrast", "RandomAdjustSharpness"}
    if channels == 3 or name not in for_colors | {"RandomChannelPermutation"}:
        assert is_refused == (name in REFUSED or name == "Identity")
    elif name == "ColorJitter":
        assert is_refused == (channels == 5)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("[RandomVerticalFlop]", "RandomVerticalFlip?"),
        ("[{ColorJitter: {brightnes: 0.4}}]", "brightness: null"),
        ("[{RandomRotation: {degrees: 9, interpolation: cubic}}]", "bicubic"),
        ("[{RandomRotation: 0}]", "as they are"),
        ("[{RandomCrop: 5}]", "3 x 5 x 5"),
        ("[MixUp]", "augment.mixup=0.2"),
        ("[Normalize]", "data.mean"),
    ],
)
def test_a_wrong_transform_is_one_line_that_says_what_to_type(typed, says):
    completed = trainer(
        "recipe=digits", "mode=single", "data.channels=3", f"augment.transforms={typed}"
    )
    assert completed.returncode == 2
    assert completed.stderr.count("\n") == 1
    assert says in completed.stderr


def test_a_transform_that_draws_from_another_generator_is_refused(monkeypatch):
    class RandomShade(v2.Transform):
        def transform(self, inpt, params):
            return inpt // int(np.random.default_rng().integers(2, 200))

    monkeypatch.setattr(v2, "RandomInvert", RandomShade)
    with pytest.raises(RecipeError, match=r"RandomInvert .*generators"):
        open_datasets(load("digits", "augment.transforms=[RandomInvert]"))


@pytest.mark.parametrize("value", ["RandomInvert", "[3]", "[{A: 1, B: 2}]", "[{A: {b: {c: 1}}}]"])
def test_other_forms_than_names_and_arguments_are_refused(value):
    with pytest.raises(RecipeError, match=r"augment\.transforms="):
        load(None, f"augment.transforms={value}")


def test_a_list_of_transforms_is_stored_and_read_back(tmp_path):
    recipe = load(None, "augment.transforms=[{RandomInvert: {}}, {RandomRotation: [-5, 15]}]")
    assert recipe.augment.transforms == ["RandomInvert", {"RandomRotation": [-5, 15]}]
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load(tmp_path).to_dict() == recipe.to_dict()
    assert load(None, augment={"transforms": recipe.augment.transforms}) == recipe


# --- repeated augmentation
# ---------------------------------------------------------------------------------------------


def draw_as_torchvision(permutation, batch_size, ranks, repetitions):
    """Return the samples of each global batch by the lines of torchvision's RASampler.

    See references/classification/sampler.py. Its permutation is replaced by ours.
    """
    num_samples = math.ceil(len(permutation) * repetitions / ranks)
    total_size = num_samples * ranks
    indices = [ele for ele in permutation for i in range(repetitions)]
    indices += indices[: (total_size - len(indices))]
    selected = len(permutation) // ranks
    by_rank = [indices[rank:total_size:ranks][:selected] for rank in range(ranks)]
    local = batch_size // ranks
    batches = []
    for start in range(0, selected - local + 1, local):
        batches.append(sorted(chain(*(part[start : start + local] for part in by_rank))))
    return batches


@pytest.mark.parametrize("repeats", [2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_repeated_samples_are_those_of_torchvisions_sampler(repeats, ranks):
    order = sampling.draw_permutation(5, 2, 96)
    repeated = sampling.repeat_order(order, 16, repeats, 96)
    expected = draw_as_torchvision(order.tolist(), 16, ranks, repeats)
    assert np.sort(repeated.reshape(-1, 16) % 96, 1).tolist() == expected
    # Each copy is another sample for the random draws, and no pair of neighbors is one image.
    assert len(np.unique(repeated)) == 96
    pairs = repeated.reshape(-1, 2) % 96
    assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize("kind", ["synthetic", "photos"])
def test_copies_are_augmented_differently_and_the_same_for_any_number_of_ranks(
    loading, photos, kind
):
    words = ["batch_size=8", "augment.repeats=4", "augment.transforms=[{RandomRotation: 40}]"]
    if kind == "photos":
        words += ["data.name=imagefolder", f"data.root={photos}", "data.image_size=70"]
    else:
        words += ["data.name=synthetic", "data.samples=24"]
    datasets = open_datasets(load(None, *words))
    whole = epoch(loading(datasets, *words), 1)
    assert [len(inputs) for inputs, _ in whole] == [8, 8, 8]
    first_inputs, first_targets = whole[0]
    assert torch.equal(first_targets[:2], first_targets[2:4])
    assert len(torch.unique(first_inputs.flatten(1), dim=0)) == 8
    parts = [
        epoch(loading(datasets, *words, shard=DataShare(rank, 2)), 1, start=1) for rank in range(2)
    ]
    for step in range(2):
        joined = torch.cat([part[step][0] for part in parts])
        assert torch.equal(joined, whole[step + 1][0])


def test_repeats_without_effect_or_with_balance_are_refused():
    with pytest.raises(RecipeError, match=r"augment\.repeats=1\b.*augment\.hflip"):
        open_datasets(load(None, "augment.repeats=2"))
    with pytest.raises(RecipeError, match=r"data\.balance=true.*augment\.repeats=1"):
        load(None, "augment.repeats=2", "data.balance=true", "augment.hflip=0.5")


# --- modes and resuming
# ---------------------------------------------------------------------------------------------

VARIED = [
    *SMALL,
    *SHALLOW,
    "data.samples=320",
    "epochs=2",
    "augment.vflip=0.5",
    "augment.repeats=2",
    "augment.transforms=[{RandomRotation: 15}, {GaussianNoise: {sigma: 0.05}}]",
]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run = tmp_path_factory.mktemp("varied") / "single"
    ok(*VARIED, "mode=single", f"output={run}")
    return run


@pytest.mark.full(but=["ddp", "split", "streams"])
@pytest.mark.slow
@pytest.mark.parametrize("way", EXACT)
def test_modes_train_on_the_same_varied_images(single, way, tmp_path):
    run = tmp_path / "run"
    ok(*VARIED, *EXACT[way], f"output={run}")
    assert_same_training(run, single)


@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit_or_with_other_augmentation(single, tmp_path):
    expected = losses(single)
    middle = single / "checkpoints" / "step-00000005"
    assert middle.is_dir()
    for name in ("same", "other"):
        run = tmp_path / name
        shutil.copytree(single, run)
        shutil.rmtree(run / "checkpoints" / "step-00000010")
    ok(*VARIED, "mode=single", f"output={tmp_path / 'same'}", "resume=auto")
    assert losses(tmp_path / "same") == expected

    other = tmp_path / "other"
    words = [word for word in VARIED if not word.startswith("augment.vflip")]
    arguments = [*words, "mode=single", f"output={other}", "resume=auto"]
    lines = ok(*arguments).stdout.splitlines()
    reports = [line for line in lines if "augment.vflip=0.0 instead of 0.5" in line]
    assert len(reports) == 1
    assert "augment.repeats" not in reports[0]
    assert losses(other)[:5] == expected[:5]
    assert losses(other)[5:] != expected[5:]
    assert load(other).augment.vflip == 0
    assert result(other)["status"] == "completed"
