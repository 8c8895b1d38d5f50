"""A bug in the user's own code: a sentence on the screen, the stack in the run folder."""

import pytest

from tests.command_line import result, trainer

OWN = """
from torch import nn
from trainer import register_model

class Net(nn.Linear):
    def forward(self, inputs):
        # ddp begins with passes on nothing
        if self.training and (steps := getattr(self, "steps", 0)) == 8:
            raise KeyError("headless")
        self.steps = getattr(self, "steps", 0) + self.training
        return super().forward(inputs.flatten(1))

@register_model("own_net")
def own_net(num_classes, channels, image_size):
    return Net(channels * image_size**2, num_classes)
"""


@pytest.mark.parametrize(
    "words", [["mode=single"], ["nproc=2", "devices=[cpu]"]], ids=["single", "ddp"]
)
def test_a_sentence_on_the_screen_and_the_stack_in_the_run_folder(words, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = [
        "recipe=digits",
        "plugin=own",
        "model.name=own_net",
        "epochs=1",
        "logging.progress=false",
    ]
    completed = trainer(*own, *words, f"output={tmp_path / 'run'}", cwd=tmp_path)
    assert completed.returncode == 1 and completed.stderr.count("\n") == 1, completed.stderr
    message = f"KeyError: 'headless' ({tmp_path / 'own.py'}:9, in forward)"
    assert completed.stderr.startswith(f"trainer: error: {message}")
    assert f"{tmp_path / 'run'}/stacks-rank" in completed.stderr
    file = tmp_path / "run" / completed.stderr.strip().rpartition("/")[2]
    assert file.read_text().count("Traceback") == 1
    assert file.read_text().rstrip().endswith("KeyError: 'headless'")
    assert result(tmp_path / "run")["error"].startswith("KeyError: 'headless' (")
