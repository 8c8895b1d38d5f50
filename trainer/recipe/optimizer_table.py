"""Table of the properties of each optimizer, which code reads instead of the optimizer's name.

To add an optimizer, add a row. `trainer.optim.optimizers` builds the class that the row names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.recipe.known_names import TIMM, Registry

ADAM_KEYS = ("betas", "eps")
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of an optimizer.

    Attributes:
        class_name: name of the class in `torch.optim`, in `timm.optim` if the optimizer's name
            starts with `timm:`, or in `trainer.optim.optimizers.CLASSES`.
        keys: keys of the recipe's section `optimizer` that not all optimizers read. The class has
            arguments with these names. `optimizer.args` sets its other arguments.
        options: arguments of the class that a recipe cannot set.
        fused: True if the class accepts `fused=True`. A fused step changes nothing if the gradient
            scaler has set the flag `found_inf`. `trainer.optim.optimizers.undo_failed_steps` has
            the same effect for all other classes.
        capturable: True if the class accepts `capturable=True`, and then keeps its scalars on the
            device. A class that is neither fused nor capturable keeps them on the host.
        state: names of the tensors that the first step creates for each parameter. Those in
            `scalars` are 0-dim, and the others have the shape of the parameter.
        scalars: names of the tensors that are 0-dim.
        momentum_state: names of further tensors, created if optimizer.momentum is above 0.
        matrix_state: names of the tensors for each weight matrix, which replace `state`; empty if
            the class treats matrices like other parameters. If not empty, the class has an argument
            `matrices`, and needs whole matrices.
        factored_state: names of the tensors that replace the last of `state` for parameters with
            two dimensions or more: the averages over the last dimension, and over the one before.
        ones: names of those tensors that start at 1. All others start at 0.
        group_state: names in `state` that are one tensor for all parameters of a group. The class
            keeps it in its groups.
        whole: True if the step of a weight depends on other weights of its parameter.
        gathers: True if the class gathers whole weights itself, with its attribute `exchange`, from
            ranks that have some of their rows.
        joint: True if the step of a parameter depends on other parameters.
        scales_lr: True if the learning rate should grow in proportion to the batch size.
    """

    class_name: str
    keys: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    fused: bool = False
    capturable: bool = False
    state: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("step", "mu_product")
    momentum_state: tuple[str, ...] = ()
    matrix_state: tuple[str, ...] = ()
    factored_state: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    group_state: tuple[str, ...] = ()
    whole: bool = False
    gathers: bool = False
    joint: bool = False
    scales_lr: bool = False

    def list_state(self, shape: Sequence[int], momentum: float) -> dict[str, Sequence[int]]:
        """Return the shape of each tensor of the state of a parameter, by name.

        Args:
            shape: shape of the parameter.
            momentum: the value of optimizer.momentum.
        """
        shapes: dict[str, Sequence[int]] = {}
        for name in self.state:
            shapes[name] = () if name in self.scalars else shape
        if self.factored_state and len(shape) > 1:
            del shapes[self.state[-1]]
            row_name, column_name = self.factored_state
            shapes[row_name] = (*shape[:-1], 1)
            shapes[column_name] = (*shape[:-2], 1, shape[-1])
        if momentum > 0:
            shapes |= dict.fromkeys(self.momentum_state, shape)
        return shapes


OPTIMIZERS = Registry[OptimizerTraits](
    "register_optimizer",
    {
        "sgd": OptimizerTraits(
            "SGD",
            keys=("momentum", "nesterov"),
            fused=True,
            momentum_state=("momentum_buffer",),
            scales_lr=True,
        ),
        "adam": OptimizerTraits("Adam", keys=ADAM_KEYS, fused=True, state=ADAM_STATE),
        "adamw": OptimizerTraits("AdamW", keys=ADAM_KEYS, fused=True, state=ADAM_STATE),
        "muon": OptimizerTraits(
            "MuonAdamW",
            keys=("momentum", "nesterov", "betas", "eps", "adamw_lr"),
            fused=True,
            state=ADAM_STATE,
            matrix_state=("momentum_buffer",),
            whole=True,
            gathers=True,
        ),
        "nadam": OptimizerTraits(
            "NAdam",
            keys=ADAM_KEYS,
            capturable=True,
            state=("step", "mu_product", "exp_avg", "exp_avg_sq"),
            ones=("mu_product",),
        ),
        "radam": OptimizerTraits("RAdam", keys=ADAM_KEYS, capturable=True, state=ADAM_STATE),
        "adamax": OptimizerTraits(
            "Adamax", keys=ADAM_KEYS, capturable=True, state=("step", "exp_avg", "exp_inf")
        ),
        "rmsprop": OptimizerTraits(
            "RMSprop",
            keys=("momentum", "eps"),
            capturable=True,
            state=("step", "square_avg"),
            momentum_state=("momentum_buffer",),
        ),
        "adagrad": OptimizerTraits("Adagrad", state=("step", "sum")),
        "adadelta": OptimizerTraits(
            "Adadelta", capturable=True, state=("step", "square_avg", "acc_delta")
        ),
        "adafactor": OptimizerTraits(
            "Adafactor",
            state=("step", "variance"),
            factored_state=("row_var", "col_var"),
            whole=True,
        ),
        "timm:lion": OptimizerTraits("Lion", state=("exp_avg",)),
        # LAMB would clip the gradients of each process by itself. `clip_grad_norm` clips those of
        # the whole model.
        "timm:lamb": OptimizerTraits(
            "Lamb",
            options={"max_grad_norm": None},
            state=ADAM_STATE,
            group_state=("step",),
            whole=True,
        ),
        "timm:lars": OptimizerTraits(
            "Lars",
            keys=("momentum", "nesterov"),
            momentum_state=("momentum_buffer",),
            whole=True,
            scales_lr=True,
        ),
        "timm:nadamw": OptimizerTraits("NAdamW", capturable=True, state=ADAM_STATE),
        "timm:rmsproptf": OptimizerTraits(
            "RMSpropTF",
            keys=("momentum",),
            state=("step", "square_avg"),
            momentum_state=("momentum_buffer",),
            ones=("square_avg",),
        ),
        "timm:sgdp": OptimizerTraits(
            "SGDP", keys=("momentum", "nesterov"), state=("momentum",), whole=True, scales_lr=True
        ),
    },
)
# Optimizers that train matrices by other rules than the other parameters.
MATRIX_OPTIMIZERS = tuple(name for name, row in OPTIMIZERS.items() if row.matrix_state)
# Names of optimizers of torch and timm that a run cannot use, and the reason.
REFUSED = {
    "lbfgs": "it computes the loss several times in a step, which no mode can do",
    "sparseadam": "it needs sparse gradients, and those of image models are dense",
    "rprop": "it needs the gradient of the whole training set in every step",
    "asgd": "only it knows the average of weights that it trains for; ema=0.999 averages otherwise",
    f"{TIMM}muon": "type optimizer.name=muon",
    f"{TIMM}adahessian": "it needs second derivatives, which no mode computes",
    f"{TIMM}adopt": "it takes a resumed run for a new one that has filled its state",
    **dict.fromkeys(
        [f"{TIMM}{name}" for name in ("adabelief", "adamp", "adan", "laprop", "madgrad", "mars")],
        "it counts in numbers of Python, which checkpoints would lack",
    ),
}
