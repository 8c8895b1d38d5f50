"""A linear probe: the last layer of a model trains on features that the other layers compute once.

The result is that of a run that freezes all other layers and keeps them in evaluation mode, so that
BatchNorm uses its running statistics and dropout does nothing. Images are prepared as for
evaluation.

Alain and Bengio, "Understanding intermediate layers using linear classifier probes"
(arXiv:1610.01644).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import normalize

from trainer.data import Batch, Datasets, ImageSet, Loader, TensorSet, TensorSpec
from trainer.data.cache import homes
from trainer.data.encoded import EncodedPhotos, compute_identity, hash_location
from trainer.data.sets import CLASS
from trainer.errors import RecipeError
from trainer.models.blocks import freeze
from trainer.models.equivalence import relative_error
from trainer.models.features import Head, find_classifier, record_features
from trainer.models.zoo import load_weights
from trainer.modes import Context
from trainer.modes.proofs import SHARDED_TOLERANCE
from trainer.saving import locks
from trainer.saving.files import replace_file, write_atomically
from trainer.saving.tensor_files import map_tensors, serialize, write_synced
from trainer.training.parts import hash_user_code
from trainer.training.state import Resolved

# Number of neighbors, which was best for DINO, and the temperature of their votes.
NEIGHBORS = 20
TEMPERATURE = 0.07
# Maximum number of similarities in one matrix, which bounds the memory of `measure_neighbors`.
MAX_SIMILARITIES = 2**26
FILE = "features.safetensors"


def build_probe(
    model: nn.Module, resolved: Resolved
) -> tuple[nn.Module, Datasets, str, float | None]:
    """Compute the features of all images, or read them from the cache. Collective.

    Args:
        model: The whole model. It is moved to the device of this rank, and all layers except the
            last are frozen.
        resolved: The configuration of the run.

    Returns:
        `(model, datasets, note, knn_top1)`: What the run trains instead of the model and its
        images: the whole model, whose forward pass runs only the last layer, and the data set with
        the features of all images instead of the images. `note` is the banner's line about the
        features. `knn_top1` is the accuracy of the nearest neighbors, as in `ModelFacts`.

    Raises:
        RecipeError: The model does not end in a linear layer, or an image cannot be read.
    """
    data = resolved.datasets
    world = resolved.world
    if resolved.checkpoint:
        # A resumed run needs the features of its own weights, not of the initial ones.
        saved = resolved.checkpoint.part("model")
        weights = {name: stored.read() for name, stored in saved.items()}
        load_weights(model, weights, "the checkpoint", whole=True)
    extractor = Extractor(model, resolved)
    home, stored = world.on_main(extractor.open_cache) or (None, {})
    source: str | None = f"read from {home}"
    is_stored = world.broadcast_object(bool(stored))
    if not is_stored:
        count = len(data.train) + len(data.val)
        resolved.tracker.say(f"  features: computing those of {count:,} images")
    features = extractor.extract("train", is_stored, stored)
    features |= extractor.extract("val", is_stored, stored)
    if not is_stored:
        root = resolved.recipe.data.root
        source = world.on_main(lambda: keep_features(home, features, root))
    note = f"{extractor.size} of each image, {source}"
    train = TensorSet(features["train"], features["train_targets"])
    val = TensorSet(features["val"], features["val_targets"])
    knn_top1 = None
    if world.is_main and resolved.task.reads == "class" and data.targets == CLASS:
        knn_top1 = measure_neighbors(train, val, world.device)
        note += f"; {NEIGHBORS} nearest neighbors classify {knn_top1:.2%}"
    spec = TensorSpec.of(train.inputs)
    datasets = replace(data, train=train, val=val, plain=spec)
    head = Head(model, extractor.classifier)
    prefix = f"{extractor.classifier}."
    frozen = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    freeze(head, frozen, resolved.recipe.model.name)
    return head, datasets, note, knn_top1


class Extractor:
    """Computes features of images on all ranks.

    Attributes:
        classifier: Name of the linear layer whose inputs are the features.
        size: Number of features of an image.
    """

    def __init__(self, model: nn.Module, resolved: Resolved) -> None:
        """Find the classifier of `model`, with the first validation images. Collective.

        Raises:
            RecipeError: The model does not end in a linear layer.
        """
        self._resolved = resolved
        recipe = resolved.recipe
        data = resolved.datasets
        self._context = Context(recipe, resolved.world, resolved.task, data.example(1))
        self._model = self._context.place(model, resolved.world.device).eval()
        self._outputs = recipe.model.num_classes or max(1, len(data.classes))
        self._first = next(self._read("val"))
        run = self._context.in_precision
        self.classifier = find_classifier(model, self._first.inputs, self._outputs, run)
        error = None
        if not self.classifier:
            error = RecipeError(
                "model.probe=true trains the linear layer that computes a model's "
                f"{self._outputs} outputs from one vector per image, and "
                f"model.name={recipe.model.name} has none: type model.probe=false "
                "model.freeze=-1, which trains its last block"
            )
        resolved.world.raise_any(error)
        self._first_features = self._run(self._first)
        self.size = self._first_features.shape[1]

    def _read(self, split: str) -> Iterator[Batch]:
        """Yield this rank's batches of a split, prepared as for evaluation."""
        resolved = self._resolved
        part = getattr(resolved.datasets, split)
        data = replace(resolved.datasets, train=part, val=part)
        share = replace(resolved.share, every_sample=False, numbers=())
        world = resolved.world
        readers = world.place.local_size
        loader = Loader(data, resolved.recipe, resolved.task, share, world.device, readers)
        try:
            yield from loader.evaluation()
        finally:
            loader.close()

    @torch.no_grad()
    def _run(self, batch: Batch) -> Tensor:
        with record_features(self._model, self._outputs) as recorded:
            self._context.in_precision(self._model, batch.inputs)
        return recorded[0][: batch.count].float().cpu()

    def extract(
        self, split: str, is_stored: bool, stored: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute the features of a split, or send those of the cache to all ranks. Collective.

        Args:
            split: The split, "train" or "val".
            is_stored: Whether rank 0 has all features in `stored`, so that none are computed.
            stored: The tensors of the cache on rank 0; empty on other ranks.

        Returns:
            On every rank, the features (samples, `size`) under the name of the split, and the
            targets under "train_targets" or "val_targets".

        Raises:
            RecipeError: An image cannot be read.
        """
        world = self._resolved.world
        data = self._resolved.datasets
        count = len(getattr(data, split))
        features = torch.zeros(count, self.size)
        targets = torch.zeros(count, *data.targets.shape, dtype=data.targets.dtype)
        read = torch.zeros(count)
        if is_stored:
            features = stored.get(split, features)
            targets = stored.get(f"{split}_targets", targets)
            read += 1
        else:
            for batch in self._read(split):
                samples = [*(batch.samples or ())]
                features[samples] = self._run(batch)[: len(samples)]
                targets[samples] = batch.targets[: len(samples)].cpu()
                read[samples] = 1
        # A row is zero on all ranks except the one that has read the sample, so a sum gathers rows.
        missing = int((world.sum_(read) == 0).sum())
        if missing:
            raise RecipeError(
                f"model.probe=true needs all images, and {missing} of the {split} split cannot be "
                "read: remove these files, or type model.probe=false"
            )
        return {split: world.sum_(features), f"{split}_targets": world.sum_(targets)}

    def open_cache(self) -> tuple[Path | None, dict[str, Tensor]]:
        """Open the cache of these features on rank 0.

        Returns:
            (home, tensors): the folder of the cache, or None if the features cannot be cached (see
            `hash_run`), and its tensors. `tensors` is empty if the cache is missing or damaged, or
            if this model computes other features.
        """
        recipe = self._resolved.recipe
        digest = hash_run(self._model, self.classifier, self._resolved)
        if not digest:
            return None, {}
        home = homes.parent(recipe.data.cache_dir) / f"features-{digest}"
        try:
            stored, metadata = map_tensors(home / FILE)
        except (OSError, ValueError):
            return home, {}
        if metadata.get("check") != hash_tensors(stored):
            return home, {}
        # Another version of a library may compute other features from the same weights, so compare
        # those of the first validation images.
        rows = stored["val"][[*(self._first.samples or ())]]
        if relative_error(self._first_features, rows) > SHARDED_TOLERANCE[recipe.precision]:
            return home, {}
        return home, stored


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, shapes, dtypes and values of tensors."""
    digest = xxhash.xxh3_128()
    for block in serialize(tensors):
        digest.update(block)
    return digest.hexdigest()


def hash_run(model: nn.Module, classifier: str, resolved: Resolved) -> str:
    """Return a hash of all that features depend on: weights, images, their preparation, user code.

    The result is "" for a user's map-style data set, whose items cannot be recognized in a later
    run without reading them all.
    """
    recipe = resolved.recipe
    data = resolved.datasets
    options = recipe.data
    settings = [
        data.image_size,
        data.resize,
        data.interpolation,
        data.inputs,
        data.mean,
        data.std,
        options.pixel_range,
        options.cache_format,
        options.cache_size,
        recipe.model.name,
        recipe.model.args,
        recipe.precision,
        hash_user_code(),
    ]
    digest = xxhash.xxh3_128(repr(settings).encode())
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{classifier}."):
            tensors[name] = tensor
    for name in ("train", "val"):
        part = getattr(data, name)
        digest.update(b"%d" % len(part))
        if isinstance(part, EncodedPhotos):
            for index in range(len(part)):
                address = part.address(index)
                digest.update(compute_identity(address) + b"\0%d" % hash_location(address))
        elif isinstance(part, ImageSet):
            tensors[f"{name} inputs"] = part.images
        elif isinstance(part, TensorSet):
            tensors[f"{name} inputs"] = part.inputs
        else:
            return ""
        tensors[f"{name} targets"] = torch.as_tensor(part.labels)
    digest.update(hash_tensors(tensors).encode())
    return digest.hexdigest()


def keep_features(home: Path | None, features: Mapping[str, Tensor], root: str | None) -> str:
    """Write features to the cache `home`, if any, and return a phrase that says so.

    An error is part of the phrase and is not raised, because the run does not need the cache.

    Args:
        home: Folder of the cache.
        features: Tensors of both splits, as `Extractor.extract` returns them.
        root: Value of data.root, which the command `cache` shows.
    """
    if home is None:
        return "computed"
    count = len(features["train"]) + len(features["val"])
    size = features["val"].shape[1]
    # The command `cache` shows these values. "photos" is the number of images.
    about = {"root": str(root), "format": "features", "size": size, "photos": count}
    draft = home / f"{FILE}.part"
    try:
        with locks.wait_for_lock(home, homes.USED):
            content = serialize(features, {"check": hash_tensors(features)})
            try:
                write_synced(draft, content, "features")
                write_atomically(home / homes.ABOUT, json.dumps(about) + "\n")
                replace_file(draft, home / FILE)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        return f"computed, and not kept ({homes.unwritable(home.parent, error)})"
    return f"computed, and kept in {home}"


def measure_neighbors(train: TensorSet, val: TensorSet, device: torch.device) -> float:
    """Return the accuracy of a k-nearest-neighbor classifier on the validation images.

    Each of the NEIGHBORS training images with the largest cosine similarity s votes for its class
    with the weight exp(s / TEMPERATURE).

    Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination"
    (arXiv:1805.01978), section 3.4, with the number of neighbors of Caron et al., "Emerging
    Properties in Self-Supervised Vision Transformers" (arXiv:2104.14294).
    """
    bank = normalize(train.inputs.to(device))
    labels = train.labels.to(device)
    classes = int(labels.max()) + 1
    rows = max(1, MAX_SIMILARITIES // len(bank))
    correct = 0
    batches = torch.split(val.inputs, rows), torch.split(val.labels, rows)
    for features, targets in zip(*batches, strict=True):
        similarities = normalize(features.to(device)) @ bank.T
        nearest = similarities.topk(min(NEIGHBORS, len(bank)))
        votes = torch.zeros(len(features), classes, device=device)
        votes.scatter_add_(1, labels[nearest.indices], (nearest.values / TEMPERATURE).exp())
        correct += int((votes.argmax(1).cpu() == targets).sum())
    return correct / len(val)
