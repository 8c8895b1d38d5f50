"""Speed from photos to training batches, in images per second: ours, with and without the cache,
and other methods.

    python tests/benchmarks/photos.py --photos FOLDER                # 500 x 400 photos, say; linked
    to 2,000 files python tests/benchmarks/photos.py --photos FOLDER --megapixels 12 --count 200

Two worker processes of one thread each, random resized crop to 224, horizontal flip, normalised
float32 batches of 64 (8 of large photos) on the CPU. The ways, which take turns, an epoch each:

    reference    torchvision's references/classification presets: ImageFolder, PIL, a DataLoader
    ffcv         FFCV's published method, reimplemented: raw uint8 of a shorter side of 256 in one
    memory-mapped file,
                 cropped in workers, normalised in batches
    photos       ours jpeg, raw    ours, from the second epoch on with data.cache=disk and
    data.cache_format=jpeg or raw

Of ours the batches that may have been read ahead are not counted. Printed are medians, and each
way's ratio to the reference, round by round: median, lowest and highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io, transforms
from torchvision.transforms.v2 import functional as vision

from trainer.data import DataShare, Loader, open_datasets
from trainer.data.cache import cached
from trainer.distributed.world_setup import create_world
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import load
from trainer.training.setup import create_task

SIZE = 224
WORKERS = 2
AHEAD = 6
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def boxed(height: int, width: int) -> tuple[int, int, int, int]:
    """Return the box of a random resized crop: top, left, height, width."""
    shape = torch.empty(1, 1, 1).expand(1, height, width)
    return transforms.RandomResizedCrop.get_params(
        shape,
        [0.08, 1.0],
        [3 / 4, 4 / 3],
    )


def finished(image: Tensor) -> Tensor:
    """Resize a uint8 (3, h, w) crop to the model's input size and flip half of the crops; the
    result is uint8.
    """
    small = vision.resize(image, [SIZE, SIZE], antialias=True)
    return small.flip(-1) if torch.rand(()) < 0.5 else small


class Packed(Dataset):
    """Raw photos of a shorter side of 256 in one memory-mapped file."""

    def __init__(self, folder: datasets.ImageFolder, path: Path) -> None:
        self.path = path
        self.labels = folder.targets
        self.places = []
        place = 0
        with path.open("wb") as file:
            for name, _ in folder.samples:
                image = io.decode_image(io.read_file(name), mode=io.ImageReadMode.RGB)
                image = (
                    vision.resize(image, [256], antialias=True)
                    if min(image.shape[1:]) > 256
                    else image
                )
                pixels = image.permute(1, 2, 0).contiguous().numpy()
                file.write(pixels.data)
                self.places.append((place, *pixels.shape))
                place += pixels.nbytes
        self._mapped: np.memmap | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._mapped is None:
            self._mapped = np.memmap(self.path, np.uint8, "r")
        place, height, width, channels = self.places[index]
        top, left, h, w = boxed(height, width)
        pixels = self._mapped[place : place + height * width * channels].reshape(
            height, width, channels
        )
        image = torch.from_numpy(pixels[top : top + h, left : left + w].copy()).permute(2, 0, 1)
        return finished(image), self.labels[index]


def normalised(images: Tensor) -> Tensor:
    return (
        images
        if images.is_floating_point()
        else vision.normalize(images.float().div_(255), MEAN, STD)
    )


def theirs(dataset: Dataset, size: int) -> Callable[[int], float]:
    """Images a second of an epoch of a DataLoader, in batches of `size`."""
    loader = DataLoader(
        dataset, size, shuffle=True, num_workers=WORKERS, drop_last=True, persistent_workers=True
    )

    def epoch(_: int) -> float:
        begun = time.perf_counter()
        count = sum(len(normalised(images)) for images, _ in loader)
        return count / (time.perf_counter() - begun)

    return epoch


def ours(
    root: Path,
    size: int,
    closing: ExitStack,
    *words: str,
) -> Callable[[int], float]:
    """Images a second of an epoch of our loader."""
    plain = [
        "mode=single",
        "data.name=imagefolder",
        f"data.root={root}",
        "data.val_fraction=0.001",
        f"batch_size={size}",
        f"data.image_size={SIZE}",
        "augment.crop=resized",
        "augment.hflip=0.5",
    ]
    recipe = load(None, *plain, f"data.workers={WORKERS}", *words)
    data, recipe = cached(open_datasets(recipe), recipe, create_world(recipe), print, closing)
    loader = Loader(
        data,
        recipe,
        create_task(recipe, data),
        DataShare(),
        torch.device("cpu"),
    )
    closing.callback(loader.close)

    def epoch(number: int) -> float:
        count = 0
        begun = 0.0
        for place, batch in enumerate(loader.training(number)):
            if place >= AHEAD:
                count += batch.count
            elif place == AHEAD - 1:
                begun = time.perf_counter()
        return count / (time.perf_counter() - begun)

    return epoch


def prepared(source: Path, root: Path, count: int, megapixels: float | None) -> None:
    """`count` files below `root` in two classes: links to the photos, or to larger ones made of
    some of them.
    """
    photos = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if megapixels:
        wide = round((megapixels * 1e6 * 4 / 3) ** 0.5)
        large = []
        for path in photos[:40]:
            with Image.open(path) as image:
                whole = image.convert("RGB").resize((wide, wide * 3 // 4), Image.Resampling.BICUBIC)
            whole.save(root / path.name, "JPEG", quality=90)
            large.append(root / path.name)
        photos = large
    for number in range(count):
        folder = root / "photos" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        source_file = photos[number % len(photos)]
        (folder / f"{number:05}.jpg").write_bytes(source_file.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--megapixels", type=float)
    parser.add_argument(
        "--batch", type=int, help="images of a batch; default 64, and 8 of large photos"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = options.batch or (8 if options.megapixels else 64)
    if options.count < 2 * AHEAD * size:
        parser.error(
            f"--count={options.count}: {AHEAD} batches are not counted; at least {2 * AHEAD * size}"
        )
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        root = Path(folder)
        prepared(options.photos, root, options.count, options.megapixels)
        files = datasets.ImageFolder(root / "photos")
        preset = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.PILToTensor(),
                transforms.ConvertImageDtype(torch.float),
                transforms.Normalize(MEAN, STD),
            ]
        )
        ways = {"reference": theirs(datasets.ImageFolder(root / "photos", preset), size)}
        ways["ffcv"] = theirs(Packed(files, root / "packed"), size)
        for epoch in ways.values():
            epoch(0)  # starts the workers, as torch does
        # The setting is that of a run. It belongs to this process, so it applies to all methods.
        keep_freed_memory()
        where = f"data.cache_dir={root / 'cache'}"
        ways["photos"] = ours(root / "photos", size, closing)
        for layout in ("jpeg", "raw"):
            ways[layout] = ours(
                root / "photos",
                size,
                closing,
                "data.cache=disk",
                f"data.cache_format={layout}",
                where,
            )
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for name in ("photos", "jpeg", "raw"):
            ways[name](0)
        for number in range(1, options.rounds + 1):
            for name, epoch in ways.items():
                speeds[name].append(epoch(number))
                print(f"  {name:<12}{speeds[name][-1]:8.0f} images/s", flush=True)
        print(f"\n{'way':<12}images/s   to the reference")
        for name, candidate in speeds.items():
            ratios = [
                own / other for own, other in zip(candidate, speeds["reference"], strict=True)
            ]
            message = f"{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name:<12}{statistics.median(candidate):8.0f}   {message}")


if __name__ == "__main__":
    main()
