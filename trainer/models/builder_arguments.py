"""Check of `model.args` against the function that builds the model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.errors import RecipeError, describe
from trainer.models.given import OFFERED, ModelBuilder
from trainer.recipe import ModelRecipe
from trainer.recipe.call_arguments import check_arguments, list_parameters
from trainer.recipe.text import format_value

# Arguments of builders that the program sets, and the keys that set them.
OWNED = {
    "num_classes": "type model.num_classes=",
    "channels": "type data.channels=",
    "in_chans": "type data.channels=",
    **dict.fromkeys(("image_size", "img_size", "input_size"), "type data.image_size="),
    **dict.fromkeys(
        ("weights", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"),
        "type model.weights=",
    ),
    "checkpoint_path": "type model.init_from=",
    "device": "type devices=",
    "dtype": "type precision=",
    **dict.fromkeys(("progress", "init_weights"), "leave it out"),
    **dict.fromkeys(("aux_logits", "transform_input"), "it follows from model.weights"),
}


def check_builder_arguments(recipe: ModelRecipe, builder: Callable[..., Any]) -> dict[str, Any]:
    """Check the arguments of a function that the user or this program has registered.

    Returns:
        The arguments, with the types of the function's parameters.

    Raises:
        RecipeError: An argument is unknown, has the wrong type, or is set by the program.
    """
    owned = dict(OWNED)
    if isinstance(builder, ModelBuilder):
        builder = builder.source
        if isinstance(builder, nn.Module):
            raise RecipeError(
                f"model.args={format_value(recipe.args)} is for a function, and {recipe.name} is a "
                "module: pass the function that builds it"
            )
        parameters = list_parameters(builder)
    else:
        parameters = list_parameters(builder)
        # A registered function gets these by position, whatever their names are.
        for name, usual_name in zip(parameters, OFFERED, strict=False):
            owned[name] = OWNED[usual_name]
    return check_arguments(
        "model.args",
        recipe.args,
        parameters,
        owned,
        f"model.name={recipe.name}",
        accepts_any=True,
    )


def check_class_arguments(
    recipe: ModelRecipe,
    build: Callable[..., nn.Module],
    fixed: Mapping[str, Any],
    is_pretrained: bool,
) -> dict[str, Any]:
    """Check the arguments of a function of torchvision or timm, which passes them to a class.

    Args:
        recipe: The section `model` of a recipe.
        build: Builds the model with the arguments.
        fixed: Arguments that the program passes, such as the image size.
        is_pretrained: Whether the model gets published weights.

    Returns:
        The arguments, with the types of the parameters of the class.

    Raises:
        RecipeError: An argument is unknown, has the wrong type, or is set by the program or by the
            function; or the model cannot be built with it.
    """
    device = "meta"
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device(device):
                usual = build()
        # Some constructors, such as RegNet's, compute with values, which meta tensors lack.
        except RuntimeError:
            device = "cpu"
            usual = build()
        parameters = list_parameters(type(usual))
        owned = dict.fromkeys(fixed, "leave it out") | OWNED
        arguments = check_arguments(
            "model.args", recipe.args, parameters, owned, f"model.name={recipe.name}"
        )
        try:
            with torch.device(device):
                model = build(**arguments)
        # The class may raise any error about a value.
        except Exception as error:
            reason = describe(error)
            if "multiple values" in reason:
                reason = f"{recipe.name} sets {reason.rpartition(' ')[2]} itself"
            raise RecipeError(
                f"model.name={recipe.name} cannot be built with "
                f"model.args={format_value(recipe.args)}: {reason}"
            ) from None
    # timm loads what fits, and leaves the rest random.
    if is_pretrained and _list_shapes(model) != _list_shapes(usual):
        raise RecipeError(
            f"model.args={format_value(recipe.args)} changes the layers of {recipe.name}, and "
            f"model.weights={recipe.weights} fits the usual ones: type model.weights=null, or "
            "leave those arguments out"
        )
    return arguments


def _list_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
