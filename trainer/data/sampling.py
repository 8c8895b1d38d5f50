"""Sample order and random augmentation draws: pure functions of (seed, epoch, sample or step).

A counter-based hash replaces a random stream, so a draw needs no state. A sample gets the same
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
from trainer.recipe.shares import divide_in_proportion

Array = npt.NDArray[Any]
# First index, and the index after the last one.
Span = tuple[int, int]
# Top, left, height, width in pixels.
Box = tuple[int, int, int, int]

# Argument `draw` of `draw_bits` for each purpose. CROP and ERASE are far apart from other values,
# because each is the first of BOX_DRAWS consecutive values. Do not change any value: the results of
# all recipes would change.
(
    ORDER,
    FLIP,
    SHIFT_Y,
    SHIFT_X,
    AUTO,
    MIX,
    ERASE_OR_NOT,
    POOL,
    BALANCE,
    ITEM,
    VFLIP,
    TRANSFORMS,
) = range(12)
BOX_TRIES = 10
BOX_DRAWS = 4 * BOX_TRIES
CROP = 100
ERASE = 200
# Range of width / height of a random resized crop, as in torchvision.
RATIO = (3 / 4, 4 / 3)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _scramble(values: Array) -> Array:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Every input bit affects every output bit.
    """
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=64)
def _compute_key(seed: int, epoch: int) -> Array:
    key = _scramble(np.array([seed], np.uint64) + _GOLDEN)
    return _scramble(key + np.array([epoch], np.uint64) * _GOLDEN)


def draw_bits(
    seed: int,
    epoch: int,
    index: npt.ArrayLike,
    draw: npt.ArrayLike,
) -> Array:
    """Return 64 random bits for each (index, draw), as uint64.

    `index` and `draw` are broadcast together; the result has at least one dimension.
    """
    rows = np.atleast_1d(index).astype(np.uint64)
    draws = np.atleast_1d(draw).astype(np.uint64)
    keys = _scramble(rows + _compute_key(seed, epoch))
    return _scramble(keys + draws * _GOLDEN)


def draw_uniform(
    seed: int,
    epoch: int,
    index: npt.ArrayLike,
    draw: npt.ArrayLike,
) -> Array:
    """Return a float64 in [0, 1) for each (index, draw), broadcast as in `draw_bits`."""
    # Use 53 bits, the precision of float64.
    bits = draw_bits(seed, epoch, index, draw) >> np.uint64(11)
    return bits * 2.0**-53


def draw_permutation(
    seed: int,
    epoch: int,
    samples: int,
) -> Array:
    """Return the order of an epoch: every index below `samples` once, (samples,) int64."""
    keys = draw_bits(seed, epoch, np.arange(samples), ORDER)
    return np.argsort(keys, kind="stable")


def draw_balanced_permutation(
    seed: int,
    epoch: int,
    labels: Array,
    stride: int,
) -> Array:
    """Return an order in which class frequencies differ by at most one, (samples,) int64.

    The images of a class are used in turn, even across epochs: no image is repeated before all
    images of the class have been used. In the k-th pass over the class in this epoch, from 0, the
    index of an image is sample + k * `stride`, so that each repetition is augmented differently.

    Args:
        labels: (samples,) class indices.
        stride: offset of the indices between two passes, at least the number of samples. The reader
            computes the image as index % (number of images), so `stride` must be a multiple of the
            number of images.
    """
    _, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    per_class = -(-len(labels) // len(counts))
    turns = epoch * per_class + np.arange(per_class)
    by_class = np.argsort(class_of, kind="stable")
    class_ends = np.cumsum(counts)[:-1]
    drawn = []
    for members in np.split(by_class, class_ends):
        passes = turns // len(members)
        positions = turns % len(members)
        samples = np.empty(per_class, np.int64)
        for number in np.unique(passes):
            in_pass = passes == number
            keys = draw_bits(seed, number, members, BALANCE)
            shuffled = members[np.argsort(keys, kind="stable")]
            repeats = number - passes[0]
            samples[in_pass] = shuffled[positions[in_pass]] + repeats * stride
        drawn.append(samples)
    # If the epoch cannot be divided evenly among the classes, `surplus` classes have one image
    # fewer. The classes take turns, so that none has fewer images in every epoch.
    surplus = len(counts) * per_class - len(labels)
    short = np.roll(np.arange(len(counts)), epoch * surplus)[:surplus]
    for row in short:
        drawn[row] = drawn[row][:-1]
    return np.concatenate(drawn)[draw_permutation(seed, epoch, len(labels))]


def repeat_order(
    order: Array,
    batch_size: int,
    repeats: int,
    stride: int,
) -> Array:
    """Return an order of the same length in which each sample comes `repeats` times.

    This is repeated augmentation (Hoffer et al. 2020, arXiv:1901.09335). A global batch has the
    samples that `RASampler` of torchvision's references draws for it from the same permutation: an
    epoch has the first len(order) / `repeats` samples of `order`.

    Within a batch, all first copies come before all second copies, and so on, so that neighboring
    images, which mixup and cutmix mix, are different, as on the ranks of `RASampler`.

    Args:
        order: sample indices of an epoch.
        batch_size: rows of the global batch.
        repeats: number of copies.
        stride: offset of the indices between two copies, as in `draw_balanced_permutation`.
    """
    positions = np.arange(len(order))
    copies = positions % repeats
    samples = order[positions // repeats] + copies * stride
    # The last key is the most significant one.
    return samples[np.lexsort((positions, copies, positions // batch_size))]


def share_spans(
    batch_size: int,
    rows: Sequence[int],
    index: int,
) -> list[Span]:
    """Return the rows of a global batch that one share reads: (start, stop) of each micro-batch.

    The batch is first divided into micro-batches, and each micro-batch into shares. Therefore all
    shares together compute the same rows at the same time for any number of shares. BatchNorm over
    all ranks depends on this.

    Args:
        batch_size: rows of the global batch.
        rows: rows of each share in one micro-batch.
        index: the share.
    """
    starts = range(sum(rows[:index]), batch_size, sum(rows))
    return [(start, start + rows[index]) for start in starts]


def share_rows(
    order: Array,
    batch_size: int,
    spans: list[Span],
) -> list[list[Array]]:
    """Return the sample indices that one share reads in an epoch: [step][micro-batch] of (rows,).

    Global batch b is order[b * batch_size : (b + 1) * batch_size]. The share reads its
    `share_spans` of each batch. The last partial global batch is dropped.
    """
    steps = len(order) // batch_size
    batches = order[: steps * batch_size].reshape(steps, batch_size)
    return [[batch[start:stop] for start, stop in spans] for batch in batches]


def compute_span(
    samples: int,
    index: int,
    count: int,
    rows: Sequence[int] = (),
) -> Span:
    """Return the (start, stop) of one share's contiguous part of an epoch.

    The `count` parts are proportional to `rows`. Without `rows` they are equal, and the last part
    also has the remainder.
    """
    if rows:
        sizes = divide_in_proportion(samples, rows)
        return sum(sizes[:index]), sum(sizes[: index + 1])
    size = samples // count
    start = index * size
    if index == count - 1:
        return start, samples
    return start, start + size


def divide_rows(
    part: Array,
    steps: int,
    micro_batches: int,
) -> list[list[Array]]:
    """Divide one share's contiguous part of an epoch: [step][micro-batch] of (rows,) indices.

    All shares make the same number of steps. The part is divided into steps, and each step into
    `micro_batches`, as evenly as possible: sizes differ by at most one, and none exceeds the
    share's number of rows in a full micro-batch.
    """
    return [np.array_split(step, micro_batches) for step in np.array_split(part, steps)]


def list_evaluation_spans(
    samples: int,
    rows: Sequence[int],
    index: int,
) -> list[Span]:
    """Return the samples that one share evaluates: (start, stop) of each batch.

    All shares together evaluate each sample once, and all shares have the same number of batches.
    The last batch may have fewer than `rows[index]` samples, or none, and must be padded.
    """
    first = sum(rows[:index])
    size = sum(rows)
    spans = []
    for start in range(first, first + samples, size):
        stop = start + rows[index]
        spans.append((min(start, samples), min(stop, samples)))
    return spans


def draw_shifts(
    seed: int,
    epoch: int,
    index: Array,
    padding: int,
) -> Array:
    """Draw where the crop of a padded image starts: (n, 2) int64, y then x.

    `padding` is the number of pixels that were added on each of the four sides.
    """
    drawn = draw_uniform(seed, epoch, index[:, None], np.array([SHIFT_Y, SHIFT_X]))
    return (drawn * (2 * padding + 1)).astype(np.int64)


def draw_flips(
    seed: int,
    epoch: int,
    index: Array,
    probability: float,
    alternate: bool,
) -> Array:
    """Draw which images are mirrored: (n,) bool.

    With `alternate`, the flips of the first epoch are inverted in every second epoch, so that any
    two consecutive epochs contain both versions of each image: Jordan (arXiv:2404.00498), section
    3.6.
    """
    drawn_epoch = 0 if alternate else epoch
    flips = draw_uniform(seed, drawn_epoch, index, FLIP) < probability
    if alternate and epoch % 2:
        return ~flips
    return flips


def draw_boxes(
    seed: int,
    epoch: int,
    index: Array,
    purpose: int,
) -> Array:
    """Draw the random numbers from which `BOX_TRIES` boxes per image are computed.

    Args:
        seed: the recipe's seed.
        epoch: number of the epoch.
        index: (n,) sample indices.
        purpose: CROP or ERASE.

    Returns:
        (n, BOX_TRIES, 4) float64 in [0, 1): for each box, the numbers that determine its area, its
        aspect ratio, its top and its left.
    """
    draws = draw_uniform(seed, epoch, index[:, None], purpose + np.arange(BOX_DRAWS))
    return draws.reshape(len(index), BOX_TRIES, 4)


def crop_boxes(
    draws: Array,
    height: int,
    width: int,
    scale: Sequence[float],
) -> Array:
    """Return random resized crops as torchvision draws them.

    The area of a crop relative to the image is uniform in `scale`, and the logarithm of its aspect
    ratio is uniform between those of 3/4 and 4/3. If ten tries do not fit, the crop is the largest
    central box with a ratio in this range.

    Args:
        draws: (n, BOX_TRIES, 4), the result of `draw_boxes`.
        height: height of the images in pixels.
        width: width of the images in pixels.
        scale: smallest and largest area of a crop, as fractions of the image's area.

    Returns:
        (n, 4) int64: top, left, height, width.
    """
    boxes, fits = _choose_boxes(
        draws,
        height,
        width,
        scale,
        RATIO,
        margin=0,
    )
    boxes[~fits] = _compute_central_box(height, width)
    return boxes


class CropBoxes:
    """The boxes of `crop_boxes` for images of different sizes, one box at a time.

    The boxes are computed with Python numbers, because NumPy takes ten times as long for a single
    box.
    """

    def __init__(self, draws: Array, scale: Sequence[float]) -> None:
        """Compute the relative areas, aspect ratios and relative positions of all tries in advance.

        Args:
            draws: (n, BOX_TRIES, 4), the result of `draw_boxes`.
            scale: smallest and largest area of a crop, as fractions of the image's area.
        """
        self._areas = _compute_areas(draws, scale).tolist()
        self._aspects = _compute_aspects(draws, RATIO).tolist()
        self._places = draws[..., 2:].tolist()

    def box(
        self,
        row: int,
        height: int,
        width: int,
    ) -> Box:
        """Return (top, left, height, width) of a crop of image `row`.

        The image has `height` x `width` pixels.
        """
        tries = zip(
            self._areas[row],
            self._aspects[row],
            self._places[row],
            strict=True,
        )
        for scale, aspect, (y, x) in tries:
            area = height * width * scale
            h = round(math.sqrt(area / aspect))
            w = round(math.sqrt(area * aspect))
            if 0 < h <= height and 0 < w <= width:
                top = int(y * (height - h + 1))
                left = int(x * (width - w + 1))
                return top, left, h, w
        return _compute_central_box(height, width)


def draw_erase_boxes(
    seed: int,
    epoch: int,
    index: Array,
    probability: float,
    size: ImageSize,
) -> Array:
    """Draw boxes for random erasing (Zhong et al. 2017), as torchvision does.

    Returns:
        (n, 4) int64: top, left, height, width; all 0 for an image without erasing.
    """
    draws = draw_boxes(seed, epoch, index, ERASE)
    height, width = sides(size)
    boxes, fits = _choose_boxes(
        draws,
        height,
        width,
        scale=(0.02, 0.33),
        ratio=(0.3, 3.3),
        margin=1,
    )
    is_erased = draw_uniform(seed, epoch, index, ERASE_OR_NOT) < probability
    boxes[~(fits & is_erased)] = 0
    return boxes


def _choose_boxes(
    draws: Array,
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    margin: int,
) -> tuple[Array, Array]:
    """Return the first box of each row that fits, and whether any box of the row fits.

    A box fits if its sides are at most as long as those of the image minus `margin`.
    """
    area = height * width * _compute_areas(draws, scale)
    aspect = _compute_aspects(draws, ratio)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    fits_height = (h > 0) & (h <= height - margin)
    fits_width = (w > 0) & (w <= width - margin)
    fits = fits_height & fits_width
    rows = np.arange(len(draws))
    first = fits.argmax(1)
    h = h[rows, first]
    w = w[rows, first]
    top = draws[rows, first, 2] * (height - h + 1)
    left = draws[rows, first, 3] * (width - w + 1)
    boxes = np.stack([top, left, h, w], 1).astype(np.int64)
    return boxes, fits.any(1)


def _compute_areas(draws: Array, scale: Sequence[float]) -> Array:
    """Return the area of each try as a fraction of the image's area, (n, BOX_TRIES)."""
    low, high = scale
    return low + (high - low) * draws[..., 0]


def _compute_aspects(draws: Array, ratio: Sequence[float]) -> Array:
    """Return width / height of each try, (n, BOX_TRIES)."""
    low, high = np.log(ratio)
    return np.asarray(np.exp(low + (high - low) * draws[..., 1]))


def _compute_central_box(height: int, width: int) -> Box:
    """Return the largest central box with an aspect ratio in `RATIO`."""
    narrowest, widest = RATIO
    h = min(height, round(width / narrowest))
    w = min(width, round(height * widest))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class Mix:
    """Weights and boxes with which pairs of images in a global batch are mixed.

    Images 2k and 2k + 1 form pair k. P is the number of pairs.

    Attributes:
        blend: (P,) float32, the weight of an image's own pixels (mixup); 1 for a cutmix pair.
        label: (P,) float32, the weight of an image's own label.
        box: (P, 4) int64, top, left, height and width of the box that the two images exchange
            (cutmix); all 0 for a mixup pair.
    """

    blend: Array
    label: Array
    box: Array

    def rows(self, start: int, stop: int) -> Mix:
        """Return the entries for images `start` to `stop - 1` of the global batch."""
        pairs = slice(start // 2, stop // 2)
        return Mix(self.blend[pairs], self.label[pairs], self.box[pairs])


def draw_mix(
    seed: int,
    epoch: int,
    step: int,
    pairs: int,
    mixup: float,
    cutmix: float,
    size: ImageSize,
) -> Mix:
    """Draw mixup (Zhang et al. 2017) and cutmix (Yun et al. 2019) for one global batch.

    If both are enabled, each pair uses mixup or cutmix with probability one half each. Each pair
    draws a weight from Beta(alpha, alpha): in mixup, the weight of an image's own pixels and label;
    in cutmix, the fraction of an image outside the box. The box is clipped at the border, and the
    weights of the labels follow from the clipped area.

    Args:
        pairs: number of pairs of images in the global batch.
        mixup: alpha of Beta(alpha, alpha); 0 disables mixup.
        cutmix: alpha of Beta(alpha, alpha); 0 disables cutmix.
        size: size of the images in pixels.
    """
    key = int(draw_bits(seed, epoch, step, MIX)[0])
    stream = np.random.Generator(np.random.Philox(key=key))
    # All draws come from one stream, so their order must not change.
    is_cut = np.zeros(pairs, bool)
    blended = np.ones(pairs)
    kept = np.ones(pairs)
    if cutmix:
        is_cut = stream.random(pairs) < (0.5 if mixup else 1.0)
    if mixup:
        blended = stream.beta(mixup, mixup, pairs)
    if cutmix:
        kept = stream.beta(cutmix, cutmix, pairs)
    relative_side = np.sqrt(1 - kept)[:, None]
    side = (np.asarray(size) * relative_side).astype(np.int64)
    centre = stream.integers(0, size, (pairs, 2))
    corner = centre - side // 2
    start = np.clip(corner, 0, size)
    length = np.clip(corner + side, 0, size) - start
    cut_box = np.concatenate([start, length], 1)
    box = np.where(is_cut[:, None], cut_box, 0)
    exchanged = box[:, 2] * box[:, 3] / math.prod(sides(size))
    blend = np.where(is_cut, 1.0, blended)
    label = np.where(is_cut, 1 - exchanged, blended)
    return Mix(blend.astype(np.float32), label.astype(np.float32), box)
