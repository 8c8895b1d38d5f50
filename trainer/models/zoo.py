"""Name -> model: torchvision's classifiers, the small ones, timm's, and the user's own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer import recipe as recipes
from trainer.errors import CheckpointError, RecipeError
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.blocks import freeze, head
from trainer.models.shapes import without_values
from trainer.models.small import SMALL, Builder
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize, in_pixels, sides
from trainer.recipe.known_names import AUXILIARY, TIMM, Registry
from trainer.saving.run_names import run_named
from trainer.saving.tensor_files import StoredTensor
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks.classification import class_name

Weight = TypeVar("Weight", Tensor, StoredTensor)

USUAL_SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 299, 384, 448, 512)
UNKNOWN = object()  # an output that shapes alone do not give
# It reads values, or holds some of its own; it turns autocast off where its inputs are.
NOT_ON_META = ("meta tensors", "device meta", "unsupported scalarType")
builders = Registry[Builder]("register_model", SMALL, lambda: torchvision_zoo.names())


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Make a model known to recipes: the decorated function takes (num_classes, channels, image_size) and returns it.
    The size is a number, or (height, width) where data.image_size is no square.

    Put it in a module and name that on the command line: `plugin=my_module model.name=my_net`.

    Raises:
        RecipeError: the name is taken.
    """
    return builders.register(name)


def registered_model(name: str) -> Builder | None:
    """The user's own function of that name."""
    return builders.get(name) if name not in SMALL or builders[name] is not SMALL[name] else None


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
    """The recipe's model on the CPU, with `num_classes` outputs, after a trial on the meta device.

    Args:
        starting: load the weights it starts from.
        inputs: two samples (2, ...) for the trial, where they are not images.
        any_output: whether other outputs than (N, num_classes) are right.
        classes: their names, by which `init_from`'s outputs are assigned; empty where they are not known.

    Raises:
        RecipeError: an unknown name, a model that cannot read such images, or a `freeze` that does not fit it.
        SetupError: published weights that cannot be fetched.
        CheckpointError: `init_from` does not fit.
    """
    if recipe.num_classes is not None and recipe.num_classes < num_classes:
        raise RecipeError(
            f"model.num_classes={recipe.num_classes}, but the data has {num_classes} classes: leave it out or raise it"
        )
    num_classes = recipe.num_classes or num_classes
    recipe = recipe.model_copy(update={"weights": form(recipe)}) if starting else recipe
    if recipe.name in builders and recipe.weights is not None:
        raise RecipeError(
            f"model.weights={recipe.weights}: {recipe.name} has no published weights; model.weights=null starts "
            "without any, model.init_from=FILE with those of a run or a file"
        )
    try:
        model = _made(recipe, num_classes, channels, image_size, starting)
        model = model.cpu() if any(part.is_cuda for part in (*model.parameters(), *model.buffers())) else model
        _check_kinds(model, recipe.name)
        out = _tried(model, channels, image_size, inputs)
    except AssertionError as error:
        reason = " ".join(str(error).split())[:160]
        if inputs is not None:
            raise RecipeError(
                f"model.name={recipe.name} cannot read inputs of {tuple(inputs.shape[1:])} ({reason})"
            ) from None
        works = _working_size(recipe, num_classes, channels, image_size)
        words = works if isinstance(works, int | None) else f"[{works[0]},{works[1]}]"
        hint = f"try data.image_size={words}" if works else "see its documentation"
        raise RecipeError(
            f"model.name={recipe.name} cannot read {channels} x {in_pixels(image_size)} images ({reason}): {hint}"
        ) from None
    if out is not UNKNOWN and (wrong := _wrong_output(out, num_classes, any_output)):
        raise RecipeError(f"model.name={recipe.name} gives {wrong}")
    if starting and recipe.init_from is not None:
        _start_from(recipe.init_from, model, recipe.name, classes, num_classes, channels)
    if recipe.freeze is not None:
        freeze(model, recipe.freeze, recipe.name)
    return model


def _check_kinds(model: nn.Module, name: str) -> None:
    """Refuse what a model may keep and no checkpoint would have, with what to write instead."""
    if (kept := _kept_beside_tensors(model)) is not None:
        raise RecipeError(f"model.name={name}: {kept}")
    for key, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            raise RecipeError(f"model.name={name} has lazy layers: where it is made, call it once on a batch of zeros")
        if parameter.is_complex() and parameter.requires_grad:
            instead = "make torch.view_as_real of it the parameter, and compute with torch.view_as_complex"
            raise RecipeError(f"model.name={name} trains complex numbers, {key}: {instead}")


def _kept_beside_tensors(model: nn.Module) -> str | None:
    own = (type(part) for part in model.modules() if type(part).get_extra_state is not nn.Module.get_extra_state)
    instead = "keeps state by get_extra_state(), which no checkpoint has: keep it as tensors, by register_buffer()"
    return next((f"{kind.__name__} {instead}" for kind in own), None)


def _wrong_output(out: Any, num_classes: int, any_output: bool) -> str:
    """What is wrong with a model's outputs for two samples; empty where nothing is."""
    if isinstance(out, Tensor) and (out.shape == (2, num_classes) or (any_output and out.shape[:1] == (2,))):
        return ""
    wanted = "this task wants a tensor (2, ...)" if any_output else f"a classifier gives (2, {num_classes})"
    if not isinstance(out, Tensor):
        return f"{type(out).__name__} for 2 images; {wanted}: let its forward return that alone"
    more = not any_output and out.dim() == 2 and len(out) == 2 and out.shape[1] > num_classes
    advice = f", or more with model.num_classes={out.shape[1]}" if more else ""
    return f"{tuple(out.shape)} for 2 images; {wanted}{advice}"


def _made(recipe: ModelRecipe, num_classes: int, channels: int, image_size: ImageSize, starting: bool) -> nn.Module:
    if recipe.name in builders:
        try:
            return builders[recipe.name](num_classes, channels, image_size)
        except TypeError as error:
            if isinstance(image_size, int):
                raise
            raise AssertionError(f"its image_size is {image_size}, {error}") from None  # as of image_size**2
    if recipe.name.startswith(TIMM):
        return timm_zoo.create(recipe, num_classes, channels, image_size, starting)
    known = torchvision_zoo.names()
    if recipe.name not in known:
        names = [*builders, *known]
        guess = recipes.nearest(recipe.name, names)
        hint = f"did you mean {guess}?" if guess else f"small ones: {', '.join(builders)}; any torchvision classifier"
        raise RecipeError(
            f"model.name={recipe.name} is not a model; {hint} (your own: register_model, or plugin=my_module)"
        )
    return torchvision_zoo.create(recipe, num_classes, channels, image_size, starting)


def bare(recipe: ModelRecipe, num_classes: int, image_size: ImageSize, channels: int = 3) -> str | None:
    """The call that makes the same model in torchvision or timm alone; None for others."""
    if recipe.name in builders:
        return None
    if recipe.name.startswith(TIMM):
        return timm_zoo.bare(recipe.name, num_classes, channels, image_size)
    return torchvision_zoo.bare(recipe, num_classes, image_size) if channels == 3 else None


def form(recipe: ModelRecipe) -> str | None:
    """A recipe's `weights`; of GoogLeNet and Inception v3 from a file those whose form it has. They set
    transform_input, which tensors do not tell: a run does, and ImageNet's auxiliary heads, as of a published file."""
    if recipe.init_from is None or recipe.name not in AUXILIARY:
        return recipe.weights
    with suppress(CheckpointError, RecipeError):  # of a damaged file: reported when it is loaded
        path = run_named(recipe.init_from)
        stored = _stored_model(read_metadata(path))
        if not stored and path.is_dir():  # a checkpoint of before its run's first weights
            stored = recipes.load(str(path.absolute().parents[1])).to_dict()["model"]
        weights = stored.get("weights", recipe.weights)
        if not stored:
            heads = (read_weights(path)[0].get(name, ()) for name in ("aux1.fc2.bias", "AuxLogits.fc.bias"))
            weights = "DEFAULT" if 1000 in map(len, heads) else weights
        published = recipe.model_copy(update={"weights": weights})
        return None if weights is None else str(torchvision_zoo.published(published).name)
    return recipe.weights


def known_classes(recipe: ModelRecipe, classes: Sequence[str], model: nn.Module) -> int | None:
    """How many class names `init_from`'s weights have in common; None where outputs cannot be matched by names."""
    known = _stored_classes(read_metadata(run_named(recipe.init_from))) if recipe.init_from else []
    outputs = getattr(model.get_submodule(head(model)), "weight", ())
    telling = are_names(known) and are_names(classes) and len(outputs) == (recipe.num_classes or len(classes))
    return len({*known} & {*classes}) if telling else None


def _start_from(source: str, model: nn.Module, name: str, classes: Sequence[str], outputs: int, channels: int) -> None:
    """Load weights of a run folder, a checkpoint or a file.

    In the last layer the outputs of the same classes are loaded, where the file has class names. Without names it is
    loaded as a whole, unless the number of classes differs.
    """
    path = run_named(source)
    weights, metadata = read_weights(path)
    metadata = metadata if "classes" in metadata else {**read_metadata(path), **metadata}  # a checkpoint's run's
    state = model.state_dict()
    counters = {name: tensor for name, tensor in state.items() if name.endswith(".num_batches_tracked")}
    # Files of before there were counters begin at 0, as in torch.
    weights = counters | torchvision_zoo.renamed(weights, state)
    weights = _by_class(weights, metadata, model, classes, outputs)
    if first := colour_filters(weights, model, channels):
        weights = {**weights, first: torchvision_zoo.adapted(weights[first], channels)}
    try:
        initialise(model, weights, f"init_from={source}")
    except CheckpointError as error:
        trained, have = _stored_model(metadata).get("name"), _stored(metadata, "channels")
        if not isinstance(trained, str) or trained == name:
            if not isinstance(have, int) or have == channels:
                raise
            what = f"init_from={source} reads {have} channel{'s' * (have > 1)}, and images have {channels}"
            raise CheckpointError(f"{what}: type data.channels={have}, or model.init_from=null") from None
        known = trained in builders or trained in torchvision_zoo.names() or trained.startswith(TIMM)
        raise CheckpointError(f"{error}, {trained}{f': type model.name={trained}' if known else ''}") from None


def colour_filters(weights: Mapping[str, Tensor], model: nn.Module, channels: int) -> str:
    """The name of the first layer's weights, where they are for 3 channels and the model reads others; else empty."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Conv2d):
            (out, _, *kernel), stored = part.weight.shape, weights.get(f"{name}.weight", part.weight)
            reads_others = part.in_channels == channels != 3 and stored.shape == (out, 3, *kernel)
            return f"{name}.weight" if reads_others else ""
    return ""


def _by_class(
    weights: dict[str, Tensor], metadata: Mapping[str, str], model: nn.Module, classes: Sequence[str], outputs: int
) -> dict[str, Tensor]:
    """Weights whose last layer is the model's own, but for the outputs of the classes that both have.

    An output that was trained for another class would be worse than a new one: confident, and wrong. Nothing is changed
    where the last layer does not have one output for each class, as in some models of users.
    """
    known = _stored_classes(metadata)
    if not are_names(known) or not are_names(classes) or known == [*classes]:
        return weights
    rows = int(metadata["num_classes"]) if metadata.get("num_classes", "").isdecimal() else len(known)
    state, merged = model.state_dict(), dict(weights)
    for name in (name for part in ("weight", "bias") if (name := f"{head(model)}.{part}") in state):
        here, there = state[name], weights.get(name)
        if there is None or here.shape[1:] != there.shape[1:] or (len(here), len(there)) != (outputs, rows):
            return weights
        merged[name] = here.clone()
        for row, label in enumerate(classes):
            if label in known:
                merged[name][row] = there[known.index(label)]
    return merged


def are_names(classes: Sequence[str]) -> bool:
    """Whether they are names: "0", "1", ... are not."""
    return bool(classes) and [*classes] != [str(place) for place in range(len(classes))]


def _stored_classes(metadata: Mapping[str, str]) -> list[str]:
    names = _stored(metadata, "classes")
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return [class_name(name) for name in names] if named else []


def _stored_model(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """`model` in the recipe of the weights' metadata; empty where there is none."""
    recipe = _stored(metadata, "recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else None
    return model if isinstance(model, dict) else {}


def _stored(metadata: Mapping[str, str], key: str) -> Any:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return json.loads(metadata[key])
    return None


def initialise(model: nn.Module, weights: Mapping[str, Tensor], source: str, whole: bool = False) -> None:
    """Load weights; unless `whole`, the last layer is not loaded where it has another number of classes.

    Raises:
        CheckpointError: naming what does not fit.
    """
    if (kept := _kept_beside_tensors(model)) is not None:
        raise CheckpointError(f"{source}: {kept}")
    state = model.state_dict(keep_vars=True)
    fitting = type(state)(fitted(model, weights, source, whole))
    # All names and shapes are this version's, which safetensors cannot say and MNASNet asks for.
    fitting._metadata = state._metadata  # type: ignore[attr-defined]
    model.load_state_dict(fitting, strict=False)


def fitted(model: nn.Module, weights: Mapping[str, Weight], source: str, whole: bool = False) -> dict[str, Weight]:
    """The weights that `initialise` loads, under the model's names. Raises CheckpointError naming what does not fit."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: part for name, part in state.items() if isinstance(part, Tensor)}
    # A tensor that a model has under several names is saved under one.
    saved = {id(tensor): weights[name] for name, tensor in tensors.items() if name in weights}
    weights = {name: saved[id(tensor)] for name, tensor in tensors.items() if id(tensor) in saved}
    absent = [name for name in tensors if name not in weights]
    if absent:
        raise CheckpointError(f"{source}: holds no {absent[0]} (and {len(absent) - 1} more): weights of another model")
    unlike = [name for name in tensors if tensors[name].shape != weights[name].shape]
    last = head(model)
    heads = [name for name in unlike if name.rpartition(".")[0] == last]
    foreign = sorted(name for name in unlike if whole or name not in heads)
    if foreign:
        name = foreign[0]
        there, here = tuple(weights[name].shape), tuple(tensors[name].shape)
        why = (
            f"it knows {there[0]} classes and the data has {here[0]}" if unlike == heads else "weights of another model"
        )
        raise CheckpointError(f"{source}: {name} is {there} there and {here} here: {why}")
    return {name: weights[name] for name in tensors if name not in unlike}


def _tried(model: nn.Module, channels: int, image_size: ImageSize, inputs: Tensor | None = None) -> Any:
    """A model's output for two images, or other `inputs`, on the meta device; `UNKNOWN` where it does not run there."""
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    place = "meta" if kind is None else "cpu"  # on meta a linear layer does not check types
    try:
        probe = (without_values(model) if kind is None else copy.deepcopy(model).to(place)).eval()
        with torch.no_grad():
            if inputs is None:
                inputs = torch.zeros(2, channels, *sides(image_size))
            return probe(inputs.to(place))
    except NotImplementedError:
        return UNKNOWN  # an operator without meta kernel; training will show
    except (RuntimeError, ValueError, AssertionError) as error:
        if any(sign in str(error) for sign in NOT_ON_META):
            return UNKNOWN
        if kind is not None:
            raise RecipeError(
                f"the model's weights are {str(kind).removeprefix('torch.')}, and its inputs float32: give "
                "model.float(); precision=bf16 or fp16 computes in less"
            ) from None
        raise AssertionError(str(error)) from None
    except LookupError:  # as of a hook that keeps what it sees in the model, of which this is a copy
        return UNKNOWN


def _working_size(recipe: ModelRecipe, num_classes: int, channels: int, image_size: ImageSize) -> ImageSize | None:
    """The next larger of the usual image sizes that the model can read, of an oblong one the next like it, or a square
    of about its shorter side."""
    (height, width), oblong = sides(image_size), isinstance(image_size, tuple)
    near: list[ImageSize] = [(-(-height // 32) * 32, -(-width // 32) * 32)] if oblong else []
    for size in (*near, *(size for size in USUAL_SIZES if size > min(height, width) - oblong)):
        with suppress(Exception), torch.device("meta"):  # a model of the user's may raise anything
            _tried(_made(recipe, num_classes, channels, size, starting=False), channels, size)
            return size
    return None
