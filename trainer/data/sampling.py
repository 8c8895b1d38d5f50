"""The order of samples and every random draw about them: pure functions of (seed, epoch, sample).

A counter-based hash takes the place of a random stream, so that a draw needs no state. The same sample gets the same
draws with any number of ranks and loader workers, and in a run that was stopped and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.recipe.image_sizes import ImageSize, sides
from trainer.recipe.shares import portions

Array = npt.NDArray[Any]

# What a draw is for. CROP and ERASE take BOX_DRAWS numbers each.
ORDER, FLIP, SHIFT_Y, SHIFT_X, AUTO, MIX, ERASE_OR_NOT, POOL, BALANCE, ITEM = range(10)
BOX_TRIES = 10
BOX_DRAWS = 4 * BOX_TRIES
CROP, ERASE = 100, 200
RATIO = (3 / 4, 4 / 3)  # of a random resized crop's sides

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _scramble(values: Array) -> Array:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the input moves every bit of the output."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> Array:
    key = _scramble(np.array([seed], np.uint64) + _GOLDEN)
    return _scramble(key + np.array([epoch], np.uint64) * _GOLDEN)


def hashed(seed: int, epoch: int, index: npt.ArrayLike, draw: npt.ArrayLike) -> Array:
    """64 random bits for each (index, draw), broadcast together; at least one-dimensional uint64."""
    rows = np.atleast_1d(np.asarray(index)).astype(np.uint64)
    draws = np.atleast_1d(np.asarray(draw)).astype(np.uint64)
    return _scramble(_scramble(rows + _key(seed, epoch)) + draws * _GOLDEN)


def uniform(seed: int, epoch: int, index: npt.ArrayLike, draw: npt.ArrayLike) -> Array:
    """As `hashed`, as float64 in [0, 1)."""
    return np.asarray((hashed(seed, epoch, index, draw) >> np.uint64(11)) * 2.0**-53)


def permutation(seed: int, epoch: int, samples: int) -> Array:
    """The order of an epoch: every index below `samples` once, (samples,) int64."""
    return np.argsort(hashed(seed, epoch, np.arange(samples), ORDER), kind="stable")


def balanced(seed: int, epoch: int, labels: Array, stride: int) -> Array:
    """The order of an epoch in which every class comes equally often, but for one: (samples,) int64.

    `labels` (samples,) are class indices. A class's images come in turn, over the epochs too: none comes again before
    all have. The k-th time that an epoch has a sample it is called sample + k * `stride`, and its augmentation is drawn
    for that number.
    """
    _, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    each = -(-len(labels) // len(counts))
    turns = epoch * each + np.arange(each)
    drawn = []
    for members in np.split(np.argsort(of, kind="stable"), np.cumsum(counts)[:-1]):
        passes, places = turns // len(members), turns % len(members)
        samples = np.empty(each, np.int64)
        for number in np.unique(passes):
            shuffled = members[np.argsort(hashed(seed, number, members, BALANCE), kind="stable")]
            samples[passes == number] = shuffled[places[passes == number]] + (number - passes[0]) * stride
        drawn.append(samples)
    surplus = len(counts) * each - len(labels)  # so many classes, others in every epoch, have one image less
    short = np.roll(np.arange(len(counts)), epoch * surplus)[:surplus]
    kept = np.concatenate([samples[: each - (row in short)] for row, samples in enumerate(drawn)])
    return kept[permutation(seed, epoch, len(labels))]


def share_spans(batch_size: int, rows: Sequence[int], index: int) -> list[tuple[int, int]]:
    """Which rows of a global batch are each micro-batch of one share, (start, stop), of shares of so many `rows`.

    The batch is divided into micro-batches first, and each of these into shares: what all shares compute at a time are
    the same rows for any number of them, as BatchNorm over all ranks sees.
    """
    starts = range(sum(rows[:index]), batch_size, sum(rows))
    return [(start, start + rows[index]) for start in starts]


def share_rows(order: Array, batch_size: int, spans: list[tuple[int, int]]) -> list[list[Array]]:
    """What one share reads of an epoch: sample indices, [step][piece] of (rows,).

    Global batch b is order[b * batch_size : (b + 1) * batch_size], of which the share reads its `share_spans`. The last
    partial global batch is dropped.
    """
    steps = len(order) // batch_size
    batches = order[: steps * batch_size].reshape(steps, batch_size)
    return [[batch[start:stop] for start, stop in spans] for batch in batches]


def contiguous_span(samples: int, index: int, count: int, rows: Sequence[int] = ()) -> tuple[int, int]:
    """The contiguous part of an epoch's order for one share, as (start, stop): in proportion to `rows`, where these are
    given, else equal, and the last has the remainder too."""
    if rows:
        parts = portions(samples, rows)
        return sum(parts[:index]), sum(parts[: index + 1])
    size = samples // count
    return index * size, samples if index == count - 1 else (index + 1) * size


def contiguous_steps(samples: int, rows: int, count: int) -> int:
    """Steps of an epoch in which each of `count` shares reads its contiguous part, at most `rows` samples a step."""
    start, stop = contiguous_span(samples, count - 1, count)
    return -(-(stop - start) // rows)


def contiguous_rows(part: Array, steps: int, pieces: int) -> list[list[Array]]:
    """What a share reads of an epoch where each has a contiguous part: sample indices, [step][piece] of (rows,).

    All shares take as many steps. A part is divided over them, and a step into `pieces` micro-batches, as evenly as
    possible: sizes differ by one, and none is above the share's nominal one.
    """
    return [np.array_split(step, pieces) for step in np.array_split(part, steps)]


def evaluation_spans(samples: int, rows: Sequence[int], index: int) -> list[tuple[int, int]]:
    """Which samples one share evaluates, as (start, stop), a batch each: all shares together take each sample once.

    Every share has as many batches, of its own `rows`; a stop short of these, or equal to start, is to be padded.
    """
    first, size = sum(rows[:index]), sum(rows)
    starts = range(first, first + samples + (-samples) % size, size)
    return [(min(start, samples), min(start + rows[index], samples)) for start in starts]


def shifts(seed: int, epoch: int, index: Array, padding: int) -> Array:
    """Where a crop of an image padded by `padding` on all sides starts: (n, 2) int64, y then x."""
    drawn = uniform(seed, epoch, index[:, None], np.array([SHIFT_Y, SHIFT_X]))
    return np.asarray(drawn * (2 * padding + 1)).astype(np.int64)


def flips(seed: int, epoch: int, index: Array, probability: float, alternate: bool = False) -> Array:
    """Which images are mirrored: (n,) bool. `alternate`: drawn for the first epoch, and the other way in every second.

    So two epochs show each image from both sides: Jordan (arXiv:2404.00498), section 3.6.
    """
    drawn = np.asarray(uniform(seed, 0 if alternate else epoch, index, FLIP) < probability)
    return ~drawn if alternate and epoch % 2 else drawn


def box_draws(seed: int, epoch: int, index: Array, purpose: int) -> Array:
    """The numbers behind one box (CROP or ERASE) an image: (n, BOX_TRIES, 4)."""
    draws = uniform(seed, epoch, index[:, None], purpose + np.arange(BOX_DRAWS))
    return draws.reshape(len(index), BOX_TRIES, 4)


def crop_boxes(draws: Array, height: int, width: int, scale: tuple[float, float]) -> Array:
    """Random resized crops as torchvision draws them: (n, 4) int64 of top, left, height, width.

    The area relative to the image's is uniform in `scale`, the logarithm of the aspect ratio uniform between 3/4 and
    4/3; after ten tries that do not fit, the largest central box with such a ratio.
    """
    boxes, fits = _boxes(draws, height, width, scale, RATIO, margin=0)
    boxes[~fits] = _central(height, width)
    return boxes


class CropBoxes:
    """`crop_boxes` of images that each have a size of their own, one at a time, in plain numbers: for one box NumPy
    takes ten times as long."""

    def __init__(self, draws: Array, scale: tuple[float, float]) -> None:
        """`draws` (n, BOX_TRIES, 4) as of `box_draws`."""
        self._areas = _areas(draws, scale).tolist()
        self._aspects = _aspects(draws, RATIO).tolist()
        self._places = draws[..., 2:].tolist()

    def box(self, row: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of a crop of image `row`, which is `height` x `width` pixels."""
        for scale, aspect, (y, x) in zip(self._areas[row], self._aspects[row], self._places[row], strict=True):
            area = height * width * scale
            h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < h <= height and 0 < w <= width:
                return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
        return _central(height, width)


def erase_boxes(seed: int, epoch: int, index: Array, probability: float, size: ImageSize) -> Array:
    """Random erasing (Zhong et al. 2017) as torchvision draws it.

    Returns (n, 4) int64 of top, left, height, width; 0 high where nothing is erased.
    """
    draws = box_draws(seed, epoch, index, ERASE)
    boxes, fits = _boxes(draws, *sides(size), (0.02, 0.33), (0.3, 3.3), margin=1)
    boxes[~(fits & (uniform(seed, epoch, index, ERASE_OR_NOT) < probability))] = 0
    return boxes


def _boxes(
    draws: Array, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], margin: int
) -> tuple[Array, Array]:
    """The first of each row's tries that is at most the image less `margin`, and whether there was one."""
    area, aspect = height * width * _areas(draws, scale), _aspects(draws, ratio)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    fits = (h > 0) & (w > 0) & (h <= height - margin) & (w <= width - margin)
    rows, first = np.arange(len(draws)), fits.argmax(1)
    h, w = h[rows, first], w[rows, first]
    top = (draws[rows, first, 2] * (height - h + 1)).astype(np.int64)
    left = (draws[rows, first, 3] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], 1), fits.any(1)


def _areas(draws: Array, scale: tuple[float, float]) -> Array:
    """Each try's area relative to the image's: (n, BOX_TRIES)."""
    return np.asarray(scale[0] + (scale[1] - scale[0]) * draws[..., 0])


def _aspects(draws: Array, ratio: tuple[float, float]) -> Array:
    """Each try's width by its height: (n, BOX_TRIES)."""
    low, high = np.log(ratio)
    return np.asarray(np.exp(low + (high - low) * draws[..., 1]))


def _central(height: int, width: int) -> tuple[int, int, int, int]:
    """The largest box in an image's centre whose sides are in `RATIO`."""
    h = min(height, round(width / RATIO[0]))
    w = min(width, round(height * RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class Mix:
    """How neighbours (2k, 2k + 1) of a global batch are mixed with each other; P pairs."""

    blend: Array  # (P,) float32: the weight of an image's own pixels (mixup); 1 where the pair is cut
    label: Array  # (P,) float32: the weight of an image's own label
    box: Array  # (P, 4) int64 of top, left, height, width: what the pair exchanges (cutmix); 0 high where it is blended

    def rows(self, start: int, stop: int) -> Mix:
        """The pairs of images start to stop of the global batch."""
        pairs = slice(start // 2, stop // 2)
        return Mix(self.blend[pairs], self.label[pairs], self.box[pairs])


def mixing(seed: int, epoch: int, step: int, pairs: int, mixup: float, cutmix: float, size: ImageSize) -> Mix:
    """Draw mixup (Zhang et al. 2017) and cutmix (Yun et al. 2019) for the pairs of one global batch.

    `mixup` and `cutmix` are the alphas of Beta(alpha, alpha), 0 is off; with both on, a pair takes either with
    probability one half. A cut box has 1 - lambda of the area and is clipped at the border; labels follow the clipped
    area.
    """
    stream = np.random.Generator(np.random.Philox(key=int(hashed(seed, epoch, step, MIX)[0])))
    cut = stream.random(pairs) < (0.5 if mixup else 1.0) if cutmix else np.zeros(pairs, bool)
    blended = stream.beta(mixup, mixup, pairs) if mixup else np.ones(pairs)
    kept = stream.beta(cutmix, cutmix, pairs) if cutmix else np.ones(pairs)
    side = (np.asarray(size) * np.sqrt(1 - kept)[:, None]).astype(np.int64)
    centre = stream.integers(0, size, (pairs, 2))
    start = np.clip(centre - side // 2, 0, size)
    length = np.clip(centre - side // 2 + side, 0, size) - start
    box = np.where(cut[:, None], np.concatenate([start, length], 1), 0)
    exchanged = box[:, 2] * box[:, 3] / math.prod(sides(size))
    blend = np.where(cut, 1.0, blended).astype(np.float32)
    return Mix(blend, np.where(cut, 1 - exchanged, blended).astype(np.float32), box)
