"""Stratified subsets of the training images: `data.val_fraction`, `data.fold`, `data.fraction`.

Images are drawn by a hash of their name and the seed, so the result depends neither on the order of
files nor on the number of ranks and loader workers.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trainer import tasks
from trainer.data.sampling import Array
from trainer.errors import RecipeError
from trainer.recipe import Recipe


def draw_keys(names: Sequence[str], seed: int) -> Array:
    """Hash `seed` and each name to a random number, (names,) uint64."""
    prefix = f"{seed}/".encode()
    hashes = (hashlib.blake2b(prefix + os.fsencode(name), digest_size=8) for name in names)
    return np.frombuffer(b"".join(name_hash.digest() for name_hash in hashes), ">u8")


def draw(
    names: Sequence[str], labels: Array, fraction: float, seed: int, left_out: int = 1
) -> Array:
    """Draw a fraction of each class.

    Which images of a class are drawn depends only on their names, `fraction` and `seed`, not on
    their order or on other classes. A larger fraction draws the same images and more. At least one
    image of each class is drawn, unless `left_out` forbids it.

    Args:
        names: names of the images.
        labels: (images,) classes.
        fraction: fraction of each class to draw, between 0 and 1.
        seed: seed of the draw.
        left_out: minimum number of images of each class that are not drawn.

    Returns:
        (images,) bool, whether each image is drawn.
    """
    keys = draw_keys(names, seed)
    chosen = np.zeros(len(names), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = max(1, round(fraction * len(members)))
        count = min(len(members) - left_out, wanted)
        order = np.argsort(keys[members], kind="stable")
        chosen[members[order[:count]]] = True
    return chosen


def draw_fold(
    recipe: Recipe,
    names: Sequence[str],
    labels: Array,
) -> Array:
    """Draw the validation images of a fold of cross-validation.

    The folds are a partition of the images. As in scikit-learn's `StratifiedKFold`, the sizes of
    the folds differ by at most one, and so do their numbers of images of each class.

    Args:
        recipe: the recipe. Its data.fold is "number/count", with numbers from 1.
        names: names of the training images.
        labels: (images,) classes.

    Returns:
        (images,) bool, whether each image is in the fold.

    Raises:
        RecipeError: a class has fewer images than there are folds.
    """
    number, count = map(int, str(recipe.data.fold).split("/"))
    _, members, sizes = np.unique(labels, return_index=True, return_counts=True)
    rarest = sizes.argmin()
    smallest = sizes[rarest]
    if smallest < count:
        member = names[members[rarest]]
        remedy = "give each class two or more"
        if smallest > 1:
            remedy = f"at most data.fold=1/{smallest}"
        raise RecipeError(
            f"data.fold={recipe.data.fold}: each fold needs an image of each class, and the class "
            f"of {member} has {smallest}: {remedy}"
        )
    # Deal the images out to the folds in turn, class by class, in random order within a class.
    keys = draw_keys(names, recipe.seed)
    order = np.lexsort((keys, labels))
    chosen = np.zeros(len(names), bool)
    chosen[order[number - 1 :: count]] = True
    return chosen


def describe_fold(recipe: Recipe, where: str) -> str:
    """Describe the fold that a run validates on. `where` describes the training images."""
    return f"fold {recipe.data.fold} of each class of {where}, drawn by seed={recipe.seed}"


def add_unused(holdout: str, own_holdout: str, count: int) -> str:
    """Add to the description of a fold that the data set's own validation split is unused.

    Args:
        holdout: description of the fold.
        own_holdout: description of the data set's own validation split.
        count: number of images of that split.
    """
    return f"{holdout}; data.fold leaves {count:,} images unused: {own_holdout}"


def list_strata(recipe: Recipe, targets: Tensor | Array) -> Array:
    """Return the stratum of each sample: its class.

    If a sample may have several classes or no class, all samples are one stratum, number 0.
    """
    if tasks.find_task_class(recipe).reads == "class" and targets.ndim == 1:
        return np.asarray(targets)
    return np.zeros(len(targets), np.int64)


def number_samples(targets: Tensor | Array) -> list[str]:
    """Return a name with the index of each sample, for a data set without file names."""
    return [f"image {row}" for row in range(len(targets))]


def keep_fraction(
    recipe: Recipe, targets: Tensor | Array, names: Sequence[str] | None = None
) -> Array:
    """Return the indices of the training images that data.fraction keeps, in ascending order.

    Args:
        recipe: the recipe.
        targets: target of each image, (images, ...).
        names: names of the images; None for a data set without file names.
    """
    strata = list_strata(recipe, targets)
    names = names or number_samples(targets)
    chosen = draw(names, strata, recipe.data.fraction, recipe.seed, left_out=0)
    return np.flatnonzero(chosen)


def divide_tensors(
    recipe: Recipe, train: Sequence[Tensor], val: Sequence[Tensor], holdout: str
) -> tuple[Sequence[Tensor], Sequence[Tensor], str]:
    """Apply data.fold and data.fraction to a data set in memory.

    Args:
        recipe: the recipe.
        train: inputs and targets of the training set.
        val: inputs and targets of the data set's own validation split.
        holdout: description of `val`.

    Returns:
        (train, val, holdout): the two sets to use, and the description of `val`.

    Raises:
        RecipeError: see `draw_fold`.
    """
    targets = train[1]
    if recipe.data.fold:
        names = number_samples(targets)
        strata = list_strata(recipe, targets)
        in_fold = draw_fold(recipe, names, strata)
        described = describe_fold(recipe, "the training set")
        holdout = add_unused(described, holdout, len(val[1]))
        val = [tensor[in_fold] for tensor in train]
        train = [tensor[~in_fold] for tensor in train]
    if recipe.data.fraction < 1:
        rows = keep_fraction(recipe, train[1])
        train = [tensor[rows] for tensor in train]
    return train, val, holdout
