"""Images of any number of channels, from the file to the trained model."""

import json
import re
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import trainer
from tests.command_line import WHOLE, latest, ok, result, suggested
from tests.command_line import trainer as command
from tests.data.archives import making
from tests.data.photo_folders import noise, read_image
from tests.modes.ways import EXACT, assert_same_training
from trainer.data import open_datasets
from trainer.data.folders.scanning import LeftOut, listed
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import as_pictures, prepare_for_evaluation
from trainer.data.registered import registered
from trainer.errors import CheckpointError, RecipeError, SetupError
from trainer.models import zoo
from trainer.models.torchvision_zoo import adapt_filters
from trainer.recipe import ModelRecipe
from trainer.recipe import load as recipe_of
from trainer.saving.weights import read_metadata, read_weights

CHANNELS = 5
TRAIN = [
    "data.name=imagefolder",
    "data.channels=5",
    "data.image_size=[24,32]",
    "model.name=cnn_gn",
    "batch_size=8",
    "optimizer.lr=0.01",
    "epochs=2",
    "data.workers=1",
    "augment.crop=resized",
    "logging.verdict=false",
]
TRAIN += [*WHOLE, "ema=0.9"]
OTHERS = [word for word in TRAIN if not word.startswith("data.channels=")]


def waves(kind, number):
    """(40, 60, 5) that differ by `kind` and `number`, from 0 to 1."""
    y, x = np.mgrid[:40, :60] / 60
    return np.stack(
        [
            0.5 + 0.4 * np.sin((3 + k + 4 * kind) * x + y * (k + 1) + number)
            for k in range(CHANNELS)
        ],
        -1,
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("stacks")
    for number in range(24):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        np.save(
            root / "ab"[number % 2] / f"{number:02}.npy",
            (65535 * waves(number % 2, number)).astype(np.uint16),
        )
    return root


def read(path, channels=CHANNELS, pixel_range=None):
    return read_image(path, channels, pixel_range).permute(1, 2, 0).numpy()


def as_bytes(image):
    """The pixels that an image of numbers of this type becomes, 0 for black and the highest, or
    1.0, for white.
    """
    if image.dtype.kind == "f":
        return np.rint(image.astype(float) * 255).astype(np.uint8)
    return (image >> 8 * (image.dtype.itemsize - 1)).astype(np.uint8)


@pytest.mark.parametrize("layout", ["contig", "separate", "pages"])
@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32"])
def test_arrays_and_tiffs_have_the_same_pixels(tmp_path, dtype, layout):
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    scale = {"uint8": 255, ">u2": 65535, "float32": 1}[dtype]
    image = (scale * waves(0, 1)).astype(dtype)
    np.save(tmp_path / "a.npy", image)
    planes = image if layout == "contig" else np.moveaxis(image, -1, 0)
    options = {} if layout == "pages" else {"planarconfig": layout}
    tifffile.imwrite(tmp_path / "a.tif", planes, photometric="minisblack", **options)
    for name in ("a.npy", "a.tif"):
        assert np.array_equal(read(tmp_path / name), as_bytes(image)), name
    if dtype == ">u2":
        narrow = np.clip(
            np.rint((image.astype(float) - 1000) * (255 / 49000)),
            0,
            255,
        )
        assert np.array_equal(read(tmp_path / "a.tif", pixel_range=(1000.0, 50000.0)), narrow)


def test_a_tiff_is_turned_and_one_of_several_sizes_is_refused(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    image = (255 * waves(0, 1)).astype(np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif",
        image,
        photometric="minisblack",
        planarconfig="contig",
        extratags=[(274, "H", 1, 6, True)],
    )
    assert np.array_equal(read(tmp_path / "a.tif"), np.rot90(image, -1))
    with tifffile.TiffWriter(tmp_path / "b.tif") as file:
        for part in (image, image[:20]):
            file.write(part, photometric="minisblack", planarconfig="contig")
    with pytest.raises(ValueError, match="sizes"):
        read(tmp_path / "b.tif")


@pytest.mark.parametrize("channels", [2, 3, 5])
@pytest.mark.parametrize("written", ["together", "singly"])
def test_gray_pages_are_channels(tmp_path, channels, written):
    """Also three of them, as many as a photo in colour has."""
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    pages = (255 * waves(0, 1)).astype(np.uint8)[..., :channels]
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        if written == "together":
            file.write(np.moveaxis(pages, -1, 0), photometric="minisblack")
        else:
            for page in np.moveaxis(pages, -1, 0):
                file.write(page)
    assert np.array_equal(read(tmp_path / "a.tif", channels), pages)
    for other in {1, 3} - {channels}:
        with pytest.raises(ValueError, match=f"data.channels={channels}"):
            read(tmp_path / "a.tif", other)


def test_a_photo_of_several_pages_is_refused_and_one_with_smaller_copies_is_read(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    colour = (255 * waves(0, 1)).astype(np.uint8)[..., :3]
    small = {"data": colour[::2, ::2], "photometric": "rgb"}
    whole = {"data": colour, "photometric": "rgb"}
    copy = {**small, "subfiletype": 1}
    for pages in ([whole, whole], [whole, small], [whole, whole, copy]):
        with tifffile.TiffWriter(tmp_path / "a.tif") as file:
            for page in pages:
                file.write(**page)
        for channels in (1, 3, 6):
            with pytest.raises(ValueError, match="2 pages" if channels < 6 else "pages|axes"):
                read(tmp_path / "a.tif", channels)
    for pages in ([whole, copy], [copy, whole], [{**whole, "subifds": 1}, copy]):
        with tifffile.TiffWriter(tmp_path / "a.tif") as file:
            for page in pages:
                file.write(**page)
        assert np.array_equal(read(tmp_path / "a.tif", 3), colour)


@pytest.mark.parametrize("place", [10**6, 3])
def test_a_photo_is_read_whatever_lies_behind_its_last_page(tmp_path, place):
    noise(0).save(tmp_path / "a.tif")
    expected = read(tmp_path / "a.tif", 3)
    content = bytearray((tmp_path / "a.tif").read_bytes())
    directory = int.from_bytes(content[4:8], "little")
    behind = directory + 2 + 12 * int.from_bytes(content[directory : directory + 2], "little")
    content[behind : behind + 4] = place.to_bytes(4, "little")
    (tmp_path / "a.tif").write_bytes(content)
    assert np.array_equal(read(tmp_path / "a.tif", 3), expected)


def test_a_set_of_pages_says_what_to_type_and_training_reads_what_predict_reads(tmp_path):
    """Training, evaluation and prediction read files by one function; all refuse the same ones."""
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            pages = (255 * waves(number, ord(label) - 97)).astype(np.uint8)
            with tifffile.TiffWriter(tmp_path / label / f"{number}.tif") as file:
                for channel in range(3):
                    file.write(pages[..., channel])
    datasets = open_datasets(
        recipe_of(None, "data.name=imagefolder", f"data.root={tmp_path}", "augment.crop=resized")
    )
    assert datasets.channels == 3
    assert len(np.unique(datasets.train.read(0, 3)[0].numpy(), axis=0)) == 3
    with pytest.raises(SetupError, match=r"data\.channels=3"):
        open_datasets(
            recipe_of(None, "data.name=imagefolder", f"data.root={tmp_path}", "data.channels=1")
        )


def test_tifffile_reads_images_that_pillow_reads_wrong_or_refuses(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
    options = {"planarconfig": "separate", "photometric": "rgb"}
    for dtype, scale in (("uint8", 255), ("uint16", 65535), ("float32", 1)):
        image = (scale * waves(0, 1)[..., :3]).astype(dtype)
        tifffile.imwrite(tmp_path / "a.tif", np.moveaxis(image, -1, 0), **options)
        assert np.array_equal(read(tmp_path / "a.tif", 3), as_bytes(image)), dtype
    planes = np.moveaxis(
        (255 * waves(0, 1)).astype(np.uint8),
        -1,
        0,
    )
    tifffile.imwrite(tmp_path / "b.tif", planes, photometric="minisblack", planarconfig="separate")
    (tmp_path / "c.tif").write_bytes(b"II*\0" + b"\x7f" * 60)
    for name, says in (("b.tif", "data.channels=5"), ("c.tif", "identify")):
        with pytest.raises(ValueError, match=says):
            read(tmp_path / name, 3)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((9, 8, 4), np.uint8), "data.channels=4"),
        (np.zeros((9, 8), np.uint8), "data.channels=1"),
        (np.zeros((5, 9, 5), np.uint8), "moveaxis"),
        (np.zeros((2, 9, 8, 5), np.uint8), "shape"),
        (np.zeros((0, 8, 5), np.uint8), "shape"),
        (np.zeros((9, 8, 5), np.int16), "uint16"),
        (np.full((9, 8, 5), 7.0), "data.pixel_range"),
        (np.array([None]), "pickle"),
    ],
)
def test_images_with_other_channels_are_refused(tmp_path, array, says):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / "a.npy")
    torchvision.io.write_png(
        torch.zeros(3, 9, 9, dtype=torch.uint8),
        str(tmp_path / "a.png"),
    )
    with pytest.raises(ValueError, match=r"npy"):
        read(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.channels=4"], r"\.npy.*data\.channels=5"),
        ([], r"data\.channels=5"),
        (["data.channels=5", "augment.auto=trivial"], "augment.auto=none"),
        (["data.channels=5", "data.mean=[0.1,0.2,0.3]"], "data.mean"),
        (["data.channels=65"], "data.channels"),
        (["data.channels=0"], "data.channels"),
    ],
)
def test_data_that_cannot_be_are_refused(photos, words, says):
    # Without arguments the photo is decoded as it is.
    with pytest.raises((RecipeError, SetupError, ValueError), match=says):
        data = open_datasets(recipe_of(None, *OTHERS, *words, f"data.root={photos}"))
        data.train.read(0, data.channels)


def test_jpeg_copies_and_mixed_inputs_are_refused(photos, tmp_path):
    cached = command(
        *TRAIN,
        f"data.root={photos}",
        "data.cache=disk",
        "data.cache_format=jpeg",
        f"output={tmp_path}/x",
    )
    assert cached.returncode == 2 and "data.cache_format" in cached.stderr
    with torch.device("meta"), pytest.raises(RecipeError, match="3 channels"):
        zoo.build(ModelRecipe(name="inception_v3"), 3, 5, 299)
    (tmp_path / "a").mkdir()
    for name in ("1.npy", "2.png"):
        (tmp_path / "a" / name).touch()
    left = LeftOut()
    assert listed(tmp_path / "a", left)[1] == ["2.png"], "arrays beside photos are no photos"
    assert left.in_words() == "1 other file (.npy)"


@pytest.mark.slow
def test_first_layers_are_adapted_as_timm_does():
    weight = torch.randn(8, 3, 7, 7)
    for channels in (1, 2, 4, 5, 7, 64):
        created = adapt_filters(weight, channels)
        assert created.shape == (8, channels, 7, 7)
        expected = (
            [weight.sum(1)]
            if channels == 1
            else [weight[:, k % 3] * 3 / channels for k in range(channels)]
        )
        assert torch.allclose(created, torch.stack(expected, 1))
        with suppress(ImportError):
            from timm.models import adapt_input_conv

            assert torch.equal(adapt_input_conv(channels, weight), created)
    torch.manual_seed(0)
    for name in ("resnet18", "swin_t", "squeezenet1_1"):
        fresh = zoo.build(ModelRecipe(name=name), 3, 5, 64)
        first = next(part for part in fresh.modules() if isinstance(part, nn.Conv2d))
        assert fresh.eval()(torch.zeros(2, 5, 64, 64)).shape == (2, 3)
        assert not torch.equal(first.weight[:, 0], first.weight[:, 3]), "drawn anew, no copies"
    with torch.device("meta"):
        for name in ("vit_b_32", "densenet121", "maxvit_t", "mobilenet_v3_small", "timm:resnet18"):
            with suppress(RecipeError) if name.startswith("timm") else nullcontext():
                assert zoo.build(ModelRecipe(name=name), 3, 5, 224)(
                    torch.zeros(2, 5, 224, 224)
                ).shape == (2, 3)


def test_published_weights_are_adapted(tmp_path, monkeypatch):
    """A file in torchvision's download folder has the weights."""
    weights = torchvision.models.SqueezeNet1_1_Weights.DEFAULT
    whole = torchvision.models.squeezenet1_1()
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    torch.save(
        whole.state_dict(),
        tmp_path / "checkpoints" / weights.url.rpartition("/")[2],
    )
    model = zoo.build(ModelRecipe(name="squeezenet1_1", weights="DEFAULT"), 3, 5, 64)
    assert torch.equal(model.features[0].weight, adapt_filters(whole.features[0].weight, 5))
    assert torch.equal(model.features[3].squeeze.weight, whole.features[3].squeeze.weight)


@pytest.fixture(scope="module")
def single(photos, tmp_path_factory):
    run = tmp_path_factory.mktemp("single") / "run"
    completed = ok(*TRAIN, f"data.root={photos}", "mode=single", f"output={run}")
    assert "over 20 of 20 training images" in completed.stdout and "first" in completed.stdout, (
        "of the channels in pictures"
    )
    return run


@pytest.mark.slow(cases=["1f1b", "ddp"])
@pytest.mark.parametrize("way", ["ddp", "1f1b"])
def test_modes_train_as_single_does(photos, single, way, tmp_path):
    run = tmp_path / "run"
    ok(*TRAIN, f"data.root={photos}", *EXACT[way], f"output={run}")
    assert_same_training(run, single)


@pytest.mark.slow
def test_measured_ranges_stay_with_the_run(photos, single, tmp_path):
    """Every entry point reads the measured range: metadata, the recipe, predict, load, evaluate,
    export.
    """
    images = [
        prepare_for_evaluation(open_image(str(path), 5), (24, 32))
        for path in sorted(photos.glob("?/*.npy"))
    ]
    reported = {
        key: json.loads(read_metadata(single)[key]) for key in ("mean", "std", "channels", "inputs")
    }
    recipe = recipe_of(str(single)).data
    assert (reported["mean"], reported["std"], reported["channels"]) == (recipe.mean, recipe.std, 5)
    pixels = torch.stack(images).double() / 255
    assert len(reported["mean"]) == 5
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(reported["mean"], abs=0.02)
    model = trainer.load(single)
    mean, std = (torch.tensor(reported[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model.model(((images[3] / 255 - mean) / std)[None].float()).softmax(1).max()
    path = str(sorted(photos.glob("?/*.npy"))[3])
    for devices in (None, ["cpu", "cpu"]):
        assert model.predict(path, devices).probability == pytest.approx(float(expected), abs=1e-5)
    array = read(path)
    assert model.predict(array).probability == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(RecipeError, match="5 x H x W"):
        model.predict(array[..., :4])
    assert trainer.evaluate(f"{single} last")["val_loss"] == pytest.approx(
        result(single)["val_loss"], rel=1e-5
    )
    words = [single, "format=exported_program", f"output={tmp_path}/x.pt2", "preprocess=false"]
    assert "batch, 5, 24, 32" in ok("export", *words).stdout


def shards(kind, photos, root):
    """Write the photos to an archive, with a table that is no image next to the arrays."""
    files = sorted(photos.glob("?/*.npy"))
    if kind == "parquet":
        labels = [file.parent.name for file in files]
        return making.parquet(root / "all.parquet", [file.read_bytes() for file in files], labels)
    members = [(f"{file.parent.name}/{file.name}", file.read_bytes()) for file in files]
    if kind == "cls":
        members = [(file.name, file.read_bytes()) for file in files]
        members += [(f"{file.stem}.cls", file.parent.name.encode()) for file in files]
        members.sort()
    return making.tarred(root / "all.tar", [*members, ("README.md", b"stacks")])


@pytest.mark.parametrize("kind", ["tar", "cls", "parquet"])
def test_arrays_in_archives_are_those_of_the_folder(photos, tmp_path, kind):
    archive = shards(kind, photos, tmp_path)
    data = open_datasets(
        recipe_of(None, *latest(*TRAIN, "data.name=shards", f"data.root={archive}"))
    )
    assert data.channels == 5
    assert len(data.train) + len(data.val) == 24
    assert len(data.mean) == 5
    known_names = {read(path).tobytes(): path.parent.name for path in photos.glob("?/*.npy")}
    for part in (data.train, data.val):
        for n in range(len(part)):
            image, label = part.read(n, 5)
            assert (
                known_names.pop(image.permute(1, 2, 0).numpy().tobytes())
                == data.classes[int(label)]
            )
    assert not known_names


@pytest.mark.parametrize(
    ("kind", "words"), [("npy", []), ("tif", []), ("npy", ["data.channels=4"])]
)
def test_a_property_of_all_images_is_reported_once_with_a_suggestion(photos, tmp_path, kind, words):
    root = photos
    if kind == "tif":
        tifffile = pytest.importorskip("tifffile", reason="pip install tifffile")
        root = tmp_path / "tifs"
        for path in photos.glob("?/*.npy"):
            (root / path.parent.name).mkdir(parents=True, exist_ok=True)
            image = np.load(path)
            file = root / path.parent.name / f"{path.stem}.tif"
            tifffile.imwrite(file, image, photometric="minisblack", planarconfig="contig")
    for more in ([], ["data.on_error=skip"]):
        completed = command(
            *OTHERS, *words, *more, f"data.root={root}", "mode=single", f"output={tmp_path / 'run'}"
        )
        assert completed.returncode == 3 and suggested(completed.stderr) == ["data.channels=5"], (
            completed.stderr
        )
        assert "20 of 20 " in completed.stderr and completed.stderr.count("data.channels=5") == 1


def test_values_that_are_no_numbers_are_reported(tmp_path):
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image = waves(number % 2, number).astype(np.float32)
        image[3, 3, 1] = (np.nan, np.inf, 0.5, 0.5)[number // 2]
        np.save(tmp_path / "ab"[number % 2] / f"{number}.npy", image)
    data = open_datasets(recipe_of(None, *TRAIN, f"data.root={tmp_path}", "data.pixel_range=[0,1]"))
    assert re.search(r"\b4 .*\bNaN\b", data.notes["pixels"])
    assert read(tmp_path / "a" / "0.npy")[3, 3, 1] == 0


@pytest.mark.slow
def test_arrays_start_from_a_run_for_colour(photos, single, tmp_path):
    """The first layer is adapted like that of published weights.

    Every other way is refused, and the message says what to type.
    """
    for number in range(12):
        (tmp_path / "colour" / "ab"[number % 2]).mkdir(exist_ok=True, parents=True)
        pixels = torch.from_numpy(
            (255 * waves(number % 2, number)[..., :3]).astype(np.uint8)
        ).permute(2, 0, 1)
        torchvision.io.write_png(
            pixels, str(tmp_path / "colour" / "ab"[number % 2] / f"{number}.png")
        )
    colour = tmp_path / "run3"
    run = tmp_path / "run5"
    ok(*OTHERS, f"data.root={tmp_path / 'colour'}", "mode=single", f"output={colour}")
    still = [
        "optimizer.lr=1e-30",
        "epochs=1",
        "ema=null",
        f"model.init_from={colour}",
        f"data.root={photos}",
    ]
    words = latest(*TRAIN, *still, "mode=ddp", "nproc=2", f"output={run}")
    words.remove("data.image_size=[24,32]")
    ok(*words)
    facts = result(run)["facts"]
    assert "repeated" in facts["filters"].split()
    assert " 20 of 20 " in facts["measured"]
    assert recipe_of(str(run)).data.image_size == [24, 32]
    assert len(recipe_of(str(run)).data.mean) == 5
    before, after = (read_weights(folder)[0] for folder in (colour, run))
    [(name, three)] = [
        (name, part) for name, part in before.items() if part.shape != after[name].shape
    ]
    assert torch.equal(after[name], adapt_filters(three, 5))
    assert three.shape[1] == 3
    assert all(
        torch.allclose(after[other], part, atol=1e-20)
        for other, part in before.items()
        if other != name
    )
    refused = {("cnn_gn", single, 3): ["data.channels=5", "model.init_from=null"]}
    for (name, source, channels), words in (
        refused | {("mlp", colour, 5): ["model.name=cnn_gn"]}
    ).items():
        with pytest.raises(CheckpointError) as caught:
            zoo.build(
                ModelRecipe(name=name, init_from=str(source)),
                2,
                channels,
                (24, 32),
            )
        assert suggested(str(caught.value)) == words


def test_arrays_of_a_users_own(photos):
    images = torch.randint(
        0,
        256,
        (8, 5, 9, 12),
        dtype=torch.uint8,
    )
    with registered.lent("five", lambda data: ((images, torch.arange(8) % 2),) * 2 + ("ab",)):
        data = open_datasets(
            recipe_of(None, "data.name=five", "data.channels=5", "data.image_size=[9,12]")
        )
        assert torch.equal(data.train.images, images) and len(data.mean) == 5
        assert as_pictures(data, torch.zeros(2, 5, 4, 4)).shape == (2, 4, 4, 3)
        for words in ([], ["data.channels=3"], ["data.channels=4"]):
            with pytest.raises(RecipeError, match=r"data\.channels"):
                open_datasets(recipe_of(None, "data.name=five", "data.image_size=[9,12]", *words))
