"""Models by name: torchvision's classifiers, small models, timm's models and the user's own."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer import recipe as recipes
from trainer.errors import CheckpointError, RecipeError, read_line
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.blocks import find_head, freeze
from trainer.models.builder_arguments import check_builder_arguments
from trainer.models.shapes import copy_to_meta
from trainer.models.small import SMALL, Builder
from trainer.models.undisturbed import restore_after
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize, in_pixels, sides
from trainer.recipe.known_names import AUXILIARY, TIMM, Registry, torchvision_classifiers
from trainer.recipe.text import list_some
from trainer.saving.run_names import find_run
from trainer.saving.tensor_files import StoredTensor
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks.classification import class_name

Weight = TypeVar("Weight", Tensor, StoredTensor)

USUAL_SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 299, 384, 448, 512)
# Result of `_run_on_meta` for a model that cannot be copied or cannot run on the meta device.
UNKNOWN = object()
# Parts of the messages of errors that torch raises on the meta device for a model that reads the
# value of a tensor, that uses a tensor on another device, or that turns autocast off for the device
# type of its inputs. These are limits of the meta device, not faults of the model.
NOT_ON_META = ("meta tensors", "device meta", "unsupported scalarType")
builders = Registry[Builder]("register_model", SMALL, torchvision_classifiers)


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Register a function that builds a model under `name`, for use as `model.name`.

    The decorated function is called as `function(num_classes, channels, image_size)` and returns
    the model. `image_size` is an int, or (height, width) if `data.image_size` is not square. If the
    function has more arguments, the recipe sets them with `model.args`.

    Put the function in a module and name the module on the command line:
    `plugin=my_module model.name=my_net`.

    Raises:
        RecipeError: `name` is taken.
    """
    return builders.register(name)


def find_registered(name: str) -> Builder | None:
    """Return the function that the user has registered as `name`, or None."""
    builder = builders.get(name)
    return None if builder is SMALL.get(name) else builder


def build(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
    starting: bool = True,
    inputs: Tensor | None = None,
    any_output: bool = False,
    classes: Sequence[str] = (),
) -> nn.Module:
    """Build the recipe's model on the CPU, check it, load initial weights and freeze blocks.

    The check runs two samples through the model to find inputs that it cannot read and outputs of
    the wrong shape. It is skipped if the model cannot run on the meta device.

    Args:
        recipe: The `model` section of a recipe.
        num_classes: Number of classes of the data. The model has as many outputs, unless the recipe
            sets a larger number.
        channels: Number of channels of an image.
        image_size: Number of pixels per side, or (height, width).
        starting: Whether to load the initial weights (`weights` or `init_from`).
        inputs: Two samples (2, ...) for the check. If None, two images of zeros are used.
        any_output: Whether to accept any output (2, ...), not only (2, num_classes).
        classes: Class names to match the outputs of `init_from` with. Empty if unknown.

    Raises:
        RecipeError: The name, the weights or an argument in `args` are unknown, the data has more
            classes than the recipe allows, the model cannot read such images, its output has
            another shape, it keeps state that no checkpoint contains, or `freeze` does not fit it.
        SetupError: Published weights cannot be downloaded.
        CheckpointError: The weights of `init_from` do not fit.
    """
    if recipe.num_classes is not None and recipe.num_classes < num_classes:
        raise RecipeError(
            f"model.num_classes={recipe.num_classes}, but the data has {num_classes} classes: "
            "leave it out or raise it"
        )
    num_classes = recipe.num_classes or num_classes
    if starting:
        update = {"weights": resolve_weights(recipe), "args": resolve_arguments(recipe)}
        recipe = recipe.model_copy(update=update)
    if recipe.name in builders and recipe.weights is not None:
        raise RecipeError(
            f"model.weights={recipe.weights}: {recipe.name} has no published weights; type "
            "model.weights=null to start from random ones, or model.init_from=FILE to load those "
            "of a run or a file"
        )
    try:
        model = _build_unchecked(recipe, num_classes, channels, image_size, starting)
        # Only models on a GPU are moved: for a model on the meta device, `cpu()` raises an error.
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.is_cuda for tensor in tensors):
            model = model.cpu()
        _check_storable(model, recipe.name)
        out = _run_on_meta(model, channels, image_size, inputs)
    except AssertionError as error:
        reason = read_line(error)
        if inputs is not None:
            raise RecipeError(
                f"model.name={recipe.name} cannot read inputs of {tuple(inputs.shape[1:])} "
                f"({reason})"
            ) from None
        size = _find_working_size(recipe, num_classes, channels, image_size)
        hint = "see its documentation"
        if isinstance(size, tuple):
            hint = f"try data.image_size=[{size[0]},{size[1]}]"
        elif size:
            hint = f"try data.image_size={size}"
        raise RecipeError(
            f"model.name={recipe.name} cannot read {channels} x {in_pixels(image_size)} images "
            f"({reason}): {hint}"
        ) from None
    if out is not UNKNOWN and (fault := _describe_wrong_output(out, num_classes, any_output)):
        raise RecipeError(f"model.name={recipe.name} returns {fault}")
    if starting and recipe.init_from is not None:
        _load_initial_weights(recipe.init_from, model, recipe.name, classes, num_classes, channels)
    if recipe.freeze is not None:
        freeze(model, recipe.freeze, recipe.name)
    return model


def check_train_size(model: nn.Module, key: str, channels: int, size: ImageSize) -> None:
    """Check that a model for images of another size can read images of data.train_size.

    Raises:
        RecipeError: it cannot. The message begins with `key`, the argument that names the model.
    """
    try:
        _run_on_meta(model, channels, size)
    except AssertionError as error:
        raise RecipeError(
            f"{key} reads images of one size only, so it cannot train on {in_pixels(size)} pixels "
            f"({read_line(error)}): set data.train_size=null"
        ) from None


def _check_storable(model: nn.Module, name: str) -> None:
    """Raise RecipeError if a checkpoint would not contain all state of the model."""
    if (fault := _find_extra_state(model)) is not None:
        raise RecipeError(f"model.name={name}: {fault}")
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise RecipeError(
                f"model.name={name} has lazy layers: call it once on a batch of zeros in the "
                "function that builds it"
            )
        if tensor.is_complex() and tensor.requires_grad:
            raise RecipeError(
                f"model.name={name} trains complex numbers, {key}: make torch.view_as_real of it "
                "the parameter, and compute with torch.view_as_complex"
            )


def _find_extra_state(model: nn.Module) -> str | None:
    for part in model.modules():
        kind = type(part)
        if kind.get_extra_state is not nn.Module.get_extra_state:
            return (
                f"{kind.__name__} keeps state by get_extra_state(), which no checkpoint has: "
                "keep it as tensors, by register_buffer()"
            )
    return None


def _describe_wrong_output(out: Any, num_classes: int, any_output: bool) -> str:
    """Describe what is wrong with a model's output for two samples.

    Return an empty string if the output is right.
    """
    expected = "this task needs a tensor (2, ...)"
    if not any_output:
        expected = f"a classifier returns (2, {num_classes})"
    if not isinstance(out, Tensor):
        return f"{type(out).__name__} for 2 images; {expected}: let its forward return that alone"
    if out.shape == (2, num_classes) or (any_output and out.shape[:1] == (2,)):
        return ""
    fault = f"{tuple(out.shape)} for 2 images; {expected}"
    if not any_output and out.dim() == 2 and len(out) == 2 and out.shape[1] > num_classes:
        fault += f", or more with model.num_classes={out.shape[1]}"
    return fault


def _build_unchecked(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
    starting: bool,
) -> nn.Module:
    if recipe.name in builders:
        builder = builders[recipe.name]
        arguments = {}
        if recipe.args:
            arguments = check_builder_arguments(recipe, builder)
        try:
            return builder(num_classes, channels, image_size, **arguments)
        except TypeError as error:
            if isinstance(image_size, int):
                raise
            # A builder that computes `image_size**2`, for example, cannot use a pair.
            raise AssertionError(f"its image_size is {image_size}, {error}") from None
    if recipe.name.startswith(TIMM):
        return timm_zoo.create(recipe, num_classes, channels, image_size, starting)
    if recipe.name not in torchvision_classifiers():
        guess = recipes.find_nearest(recipe.name, [*builders, *torchvision_classifiers()])
        if guess:
            hint = f"did you mean {guess}?"
        else:
            hint = f"small models: {', '.join(builders)}; or any torchvision classifier"
        raise RecipeError(
            f"model.name={recipe.name} is not a model; {hint} (for your own: register_model, or "
            "plugin=my_module)"
        )
    return torchvision_zoo.create(recipe, num_classes, channels, image_size, starting)


def format_bare_call(
    recipe: ModelRecipe,
    num_classes: int,
    image_size: ImageSize,
    channels: int,
) -> str | None:
    """Format the call that builds the model with torchvision or timm alone, if one of them can.

    Return None for small models and the user's own models, and for a torchvision model with another
    number of channels than 3.
    """
    if recipe.name in builders:
        return None
    if recipe.name.startswith(TIMM):
        return timm_zoo.bare(recipe, num_classes, channels, image_size)
    if channels == 3:
        return torchvision_zoo.bare(recipe, num_classes, image_size)
    return None


def resolve_weights(recipe: ModelRecipe) -> str | None:
    """Return the `weights` that determine how a model is built.

    These are the recipe's own, except for GoogLeNet and Inception v3 with `init_from`. Their
    published weights need `transform_input`, which cannot be seen from the tensors in a file.
    Therefore `weights` is read from the recipe in the file's metadata. A file without a recipe
    counts as published if it has auxiliary heads for the classes of ImageNet.
    """
    if recipe.init_from is None or recipe.name not in AUXILIARY:
        return recipe.weights
    # A damaged file is ignored here, because loading the weights reports it.
    with suppress(CheckpointError, RecipeError):
        path = find_run(recipe.init_from)
        model_section = _read_stored_section(path)
        weights = model_section.get("weights", recipe.weights)
        if not model_section:
            tensors = read_weights(path)[0]
            for name in ("aux1.fc2.bias", "AuxLogits.fc.bias"):
                if len(tensors.get(name, ())) == 1000:
                    weights = "DEFAULT"
        published = recipe.model_copy(update={"weights": weights})
        if weights is None:
            return None
        return str(torchvision_zoo.find_published(published).name)
    return recipe.weights


def resolve_arguments(recipe: ModelRecipe) -> dict[str, Any]:
    """Return the arguments that determine how a model is built.

    These are the recipe's own, and those of the model in `init_from` that the recipe does not set,
    if it has the same name.
    """
    if recipe.init_from is None:
        return recipe.args
    stored: Mapping[str, Any] = {}
    # A damaged file is ignored here, because loading the weights reports it.
    with suppress(CheckpointError, RecipeError):
        stored = _read_stored_section(find_run(recipe.init_from))
    if stored.get("name") != recipe.name:
        return recipe.args
    return {**stored.get("args", {}), **recipe.args}


def describe_class_match(
    metadata: Mapping[str, str],
    recipe: ModelRecipe,
    classes: Sequence[str],
    model: nn.Module,
) -> str:
    """Return a note for the start-up summary on the classes that `init_from` and the data share.

    If outputs cannot be matched by name, the note is empty unless `init_from` or the data has class
    names, or if both list classes but different numbers of them.

    Args:
        metadata: Metadata of the weights in `init_from`.
        recipe: The section `model` of a recipe.
        classes: Class names of the data.
        model: The model that has loaded the weights.
    """
    stored_classes = _read_class_names(metadata)
    outputs = getattr(model.get_submodule(find_head(model)), "weight", ())
    matches = match_by_name(stored_classes, classes)
    if matches is not None and len(outputs) == (recipe.num_classes or len(classes)):
        known = len(matches) - matches.count(None)
        return f", which knows {known} of these {len(classes)} by name"
    if not are_names(stored_classes) and not are_names(classes):
        return ""
    if not stored_classes:
        return ", which names no classes: they are matched by their order if there are as many"
    if len(stored_classes) == len(classes):
        return ", its classes matched by their order"
    return ""


def _load_initial_weights(
    source: str,
    model: nn.Module,
    name: str,
    classes: Sequence[str],
    outputs: int,
    channels: int,
) -> None:
    """Load the weights of a run directory, a checkpoint or a file.

    If the file has class names, the last layer loads the outputs of the classes that it shares with
    the data. Without names, the whole last layer is loaded if it has the same number of classes as
    the data, and otherwise it is not loaded.
    """
    path = find_run(source)
    weights, metadata = read_weights(path)
    # The class names of a checkpoint are in the metadata of its run.
    if "classes" not in metadata:
        metadata = {**read_metadata(path), **metadata}
    state = model.state_dict()
    weights = torchvision_zoo.rename_weights(weights, state)
    # Files from before PyTorch 0.4.1 have no batch counters, so the model keeps its own, which are
    # 0.
    for key, tensor in state.items():
        if key.endswith(".num_batches_tracked"):
            weights.setdefault(key, tensor)
    weights = _merge_by_class(weights, metadata, model, classes, outputs)
    if filters := find_color_filters(weights, model, channels):
        weights = {**weights, filters: torchvision_zoo.adapt_filters(weights[filters], channels)}
    try:
        load_weights(model, weights, f"init_from={source}")
    except CheckpointError as error:
        trained_name = _read_model_section(metadata).get("name")
        stored_channels = _read_json(metadata, "channels")
        if not isinstance(trained_name, str) or trained_name == name:
            if not isinstance(stored_channels, int) or stored_channels == channels:
                raise
            raise CheckpointError(
                f"init_from={source} was trained with data.channels={stored_channels}, and the "
                f"images have {channels}: type data.channels={stored_channels}, or "
                "model.init_from=null"
            ) from None
        hint = ""
        if trained_name in (*builders, *torchvision_classifiers()) or trained_name.startswith(TIMM):
            hint = f": type model.name={trained_name}"
        raise CheckpointError(f"{error}, {trained_name}{hint}") from None


def find_color_filters(
    weights: Mapping[str, Tensor],
    model: nn.Module,
    channels: int,
) -> str:
    """Return the name of the first convolution's weight if it must be adapted, or else "".

    It must be adapted if the stored weight has 3 input channels but the model has another number.
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.Conv2d):
            key = f"{name}.weight"
            out_channels, _, *kernel = part.weight.shape
            stored_shape = weights.get(key, part.weight).shape
            if part.in_channels == channels != 3 and stored_shape == (out_channels, 3, *kernel):
                return key
            return ""
    return ""


def _merge_by_class(
    weights: dict[str, Tensor],
    metadata: Mapping[str, str],
    model: nn.Module,
    classes: Sequence[str],
    outputs: int,
) -> dict[str, Tensor]:
    """Return weights whose last layer has the rows of the data's classes, matched by name.

    Outputs of classes that the file does not have keep the model's new weights, because an output
    that was trained for another class would be confident and wrong. If the last layer does not have
    one output per class, as in some users' models, `weights` is returned unchanged.
    """
    stored_classes = _read_class_names(metadata)
    matches = match_by_name(stored_classes, classes)
    if matches is None or stored_classes == [*classes]:
        return weights
    stored_outputs = len(stored_classes)
    if metadata.get("num_classes", "").isdecimal():
        stored_outputs = int(metadata["num_classes"])
    state = model.state_dict()
    merged = dict(weights)
    for part in ("weight", "bias"):
        name = f"{find_head(model)}.{part}"
        if name not in state:
            continue
        new = state[name]
        stored = weights.get(name)
        if stored is None or new.shape[1:] != stored.shape[1:]:
            return weights
        if (len(new), len(stored)) != (outputs, stored_outputs):
            return weights
        merged[name] = new.clone()
        for row, match in enumerate(matches):
            if match is not None:
                merged[name][row] = stored[match]
    return merged


def match_by_name(
    known: Sequence[str],
    classes: Sequence[str],
) -> list[int | None] | None:
    """Find the position of each of `classes` in `known`, by name.

    Data sets without names call their classes 0, 1, 2, ... These numbers count as names if the
    other sequence has names and shares at least one of them, because directories named by numbers
    are sorted as 0, 1, 10, 11, 2.

    Returns:
        The position in `known` of each of `classes`, or None for a class that is not in `known`.
        None instead of the list if only the order of the classes counts: neither sequence has
        names, or one has none and shares no number with the other.
    """
    stored_names = _strip_zeros(known)
    names = _strip_zeros(classes)
    named = are_names(stored_names), are_names(names)
    if not any(named):
        return None
    if not all(named) and set(stored_names).isdisjoint(names):
        return None
    positions: dict[str, int] = {}
    for position, name in enumerate(stored_names):
        positions.setdefault(name, position)
    return list(map(positions.get, names))


def _strip_zeros(names: Sequence[str]) -> list[str]:
    """Strip leading zeros (directory 07 becomes 7) unless two names would become the same."""
    stripped = [str(int(name)) if name.isdecimal() else name for name in names]
    return stripped if len({*stripped}) == len({*names}) else [*names]


def are_names(classes: Sequence[str]) -> bool:
    """Return whether classes have names other than their numbers "0", "1", ..."""
    numbers = map(str, range(len(classes)))
    return bool(classes) and [*classes] != [*numbers]


def _read_class_names(metadata: Mapping[str, str]) -> list[str]:
    names = _read_json(metadata, "classes")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return list(map(class_name, names))
    return []


def _read_stored_section(path: Path) -> Mapping[str, Any]:
    """Return the section `model` of the recipe of stored weights; empty without a recipe.

    Args:
        path: Path of a weights file, or of a checkpoint in its run folder.
    """
    section = _read_model_section(read_metadata(path))
    # The metadata of a checkpoint come from a weights file of its run. Before the run has written
    # one, read the recipe from the run folder.
    if not section and path.is_dir():
        section = recipes.load(str(path.absolute().parents[1])).to_dict()["model"]
    return section


def _read_model_section(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the section `model` of the recipe in a file's metadata; empty without a recipe."""
    recipe = _read_json(metadata, "recipe")
    section = recipe.get("model") if isinstance(recipe, dict) else None
    return section if isinstance(section, dict) else {}


def _read_json(
    metadata: Mapping[str, str],
    key: str,
) -> Any:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return json.loads(metadata[key])
    return None


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    whole: bool = False,
) -> None:
    """Load weights, except those of a last layer with a different number of classes.

    Args:
        model: Changed in place.
        weights: Tensors by name.
        source: Name of the file, for messages.
        whole: Whether the last layer must fit, too.

    Raises:
        CheckpointError: A tensor is missing or does not fit, or the model keeps state that is not a
            tensor (`get_extra_state`). The message names the tensor or the class.
    """
    if (fault := _find_extra_state(model)) is not None:
        raise CheckpointError(f"{source}: {fault}")
    state = model.state_dict(keep_vars=True)
    fitting = type(state)(select_fitting_weights(model, weights, source, whole))
    # MNASNet reads the version of its state dict, which safetensors cannot store. Names and shapes
    # have been checked, so the weights get the version of the model's own state dict.
    fitting._metadata = state._metadata  # type: ignore[attr-defined]
    model.load_state_dict(fitting, strict=False)


def select_fitting_weights(
    model: nn.Module,
    weights: Mapping[str, Weight],
    source: str,
    whole: bool,
) -> dict[str, Weight]:
    """Return the weights that `load_weights` loads, under the model's names.

    Raises:
        CheckpointError: A tensor is missing or does not fit; the message names it.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: part for name, part in state.items() if isinstance(part, Tensor)}
    # A tensor with several names in the model is saved under one of them. All its names get the
    # saved tensor.
    saved = {id(tensor): weights[name] for name, tensor in tensors.items() if name in weights}
    absent = [name for name, tensor in tensors.items() if id(tensor) not in saved]
    if absent:
        raise CheckpointError(f"{source}: has no {list_some(absent, 1)}: weights of another model")
    stored = {name: saved[id(tensor)] for name, tensor in tensors.items()}
    mismatched = [name for name in tensors if tensors[name].shape != stored[name].shape]
    last_layer = find_head(model)
    foreign = [name for name in mismatched if whole or name.rpartition(".")[0] != last_layer]
    if foreign:
        name = min(foreign)
        stored_shape = tuple(stored[name].shape)
        shape = tuple(tensors[name].shape)
        reason = "weights of another model"
        if {name.rpartition(".")[0] for name in mismatched} == {last_layer}:
            reason = f"it has {stored_shape[0]} classes and the data has {shape[0]}"
        raise CheckpointError(
            f"{source}: {name} is {stored_shape} there and {shape} here: {reason}"
        )
    return {name: stored[name] for name in tensors if name not in mismatched}


def _run_on_meta(
    model: nn.Module,
    channels: int,
    image_size: ImageSize,
    inputs: Tensor | None = None,
) -> Any:
    """Return the model's output for two images or for `inputs`, computed on the meta device.

    A model with weights of another type than float32 runs on the CPU instead.

    Returns:
        The output. `UNKNOWN` if the model cannot be copied, or if the pass fails because of the
        meta device or the copy, not because of the inputs.

    Raises:
        AssertionError: The model cannot read the inputs.
        RecipeError: The pass changes state that cannot be restored, or the type of the weights is
            not that of the inputs.
    """
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    dtype = next((dtype for dtype in dtypes if dtype != torch.float32), None)
    try:
        try:
            # A linear layer does not compare the types of weights and inputs on the meta device, so
            # models with weights of another type than float32 run on the CPU.
            if dtype is None:
                device = "meta"
                probe = copy_to_meta(model).eval()
            else:
                device = "cpu"
                probe = copy.deepcopy(model).to(device).eval()
        except Exception:
            # Generators and modules from torch.jit.script cannot be copied.
            return UNKNOWN
        if inputs is None:
            inputs = torch.zeros(2, channels, *sides(image_size))
        # The copy shares closures and globals with the model, so the pass might change the model's
        # state. Check that it did not.
        with restore_after([probe], checked=[model]), torch.no_grad():
            return probe(inputs.to(device))
    except RecipeError:
        # `restore_after` raises it: the pass changed state that cannot be restored.
        raise
    except NotImplementedError:
        # An operator has no meta kernel, so the output is not checked here. A wrong output is found
        # in training instead.
        return UNKNOWN
    except (RuntimeError, ValueError, AssertionError) as error:
        if any(text in str(error) for text in NOT_ON_META):
            return UNKNOWN
        if dtype is not None:
            raise RecipeError(
                f"the model's weights are {str(dtype).removeprefix('torch.')}, and its inputs "
                "float32: return model.float(); precision=bf16 or fp16 computes in less"
            ) from None
        raise AssertionError(str(error)) from None
    except LookupError:
        # A hook may look up something that it has stored in the original but not in this copy.
        return UNKNOWN


def _find_working_size(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
) -> ImageSize | None:
    """Return the next larger size in `USUAL_SIZES` that the model can read, or None.

    For a size that is not square, the first candidate is the size rounded up to multiples of 32.
    All further candidates are squares, from the shorter side up.
    """
    height, width = sides(image_size)
    shorter = min(height, width)
    candidates: list[ImageSize] = []
    if isinstance(image_size, tuple):
        candidates.append((-(-height // 32) * 32, -(-width // 32) * 32))
        shorter -= 1
    candidates += [size for size in USUAL_SIZES if size > shorter]
    for size in candidates:
        # The user's model may raise any error.
        with suppress(Exception), torch.device("meta"):
            model = _build_unchecked(recipe, num_classes, channels, size, starting=False)
            _run_on_meta(model, channels, size)
            return size
    return None
