"""Table of the properties of each optimizer, which code reads instead of the optimizer's name.

To add an optimizer, add a row. `trainer.optim.optimizers` builds the class that the row names.
"""

from dataclasses import dataclass

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of an optimizer.

    Attributes:
        class_name: name of the class in `torch.optim`, or in `trainer.optim.optimizers.CLASSES`.
        keys: keys of the recipe's section `optimizer` that not all optimizers read. The class has
            arguments with these names.
        fused: True if the class accepts `fused=True`. A fused step changes nothing if the gradient
            scaler has set the flag `found_inf`. `trainer.optim.optimizers.undo_failed_steps` has
            the same effect for all other classes.
        state: names of the tensors that the first step creates for each parameter, filled with
            zeros. `step` is 0-dim, and the others have the shape of the parameter.
        momentum_state: names of further tensors, created if optimizer.momentum is above 0.
        matrix_state: names of the tensors for each weight matrix, which replace `state`; empty if
            the class treats matrices like other parameters. If not empty, the class has an argument
            `matrices`, and needs whole matrices.
        scales_lr: True if the learning rate should grow in proportion to the batch size.
    """

    class_name: str
    keys: tuple[str, ...]
    fused: bool = False
    state: tuple[str, ...] = ()
    momentum_state: tuple[str, ...] = ()
    matrix_state: tuple[str, ...] = ()
    scales_lr: bool = False


OPTIMIZERS = {
    "sgd": OptimizerTraits(
        "SGD",
        keys=("momentum", "nesterov"),
        fused=True,
        momentum_state=("momentum_buffer",),
        scales_lr=True,
    ),
    "adam": OptimizerTraits("Adam", keys=("betas", "eps"), fused=True, state=ADAM_STATE),
    "adamw": OptimizerTraits("AdamW", keys=("betas", "eps"), fused=True, state=ADAM_STATE),
    "muon": OptimizerTraits(
        "MuonAdamW",
        keys=("momentum", "nesterov", "betas", "eps"),
        fused=True,
        state=ADAM_STATE,
        matrix_state=("momentum_buffer",),
    ),
}
# Optimizers that need whole matrices. mode=fsdp refuses them, because it shards each matrix.
MATRIX_OPTIMIZERS = tuple(name for name, row in OPTIMIZERS.items() if row.matrix_state)
