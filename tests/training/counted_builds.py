"""A plugin that appends a line to a file when a configuration is resolved or a model is built."""

import os
from pathlib import Path

from trainer import register_model
from trainer.models import small
from trainer.training.state import Resolved

initialize = Resolved.__init__


def note(event):
    with Path(os.environ["TRAINER_TEST_BUILDS"]).open("a") as builds:
        builds.write(f"{event}\n")


def initialize_and_note(*arguments, **named):
    note("resolved")
    initialize(*arguments, **named)


Resolved.__init__ = initialize_and_note


@register_model("counted")
def build_counted(classes, channels, size):
    note("built")
    return small.SMALL["cnn"](classes, channels, size)
