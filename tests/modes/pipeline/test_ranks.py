"""A pipeline of processes, seen from the ranks."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import QUIET, ok

# A compiler that only writes down what it is given, and whether the ranks had met in the pipeline
# by then.
COMPILER = """
from torch import nn
from tests.training import compile_counter
from trainer import register_model
from trainer.modes.pipeline.ranks import ProcessPipeline

met, note = False, compile_counter.note
compile_counter.note = lambda **what: note(met=met, **what)

def meeting(call):
    def called(*arguments, **options):
        global met
        met = True
        return call(*arguments, **options)
    return called

for name in ("forward_backward", "forward"):
    setattr(ProcessPipeline, name, meeting(getattr(ProcessPipeline, name)))

@register_model("dropping")
def dropping(classes, channels, size):
    layers = [nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(8 * 16, classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [
            "model.name=dropping",
            "pipeline.deferred_batch_norm=false",
            "pipeline.cuts=[4]",
            "augment.mixup=0.2",
        ],
        pytest.param(
            [
                "model.name=cnn_gn",
                "pipeline.schedule=interleaved1f1b",
                "precision=bf16",
                "recompute=true",
            ],
            marks=pytest.mark.full("one of several alike"),
        ),
        pytest.param(
            [
                "model.name=vit_tiny",
                "pipeline.schedule=interleaved1f1b",
                "precision=bf16",
                "recompute=true",
            ],
            marks=pytest.mark.full("one of several alike"),
        ),
        pytest.param(
            [
                "model.name=cnn_gn",
                "channels_last=false",
                "model.freeze=2",
                "data.name=synthetic",
                "data.channels=3",
            ],
            marks=pytest.mark.full("one of several alike"),
        ),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_stages_are_compiled_before_a_rank_waits_for_another_and_leave_no_trace(words, tmp_path):
    """A stage has one training graph and one evaluation graph.

    Weights and statistics equal those of a run without graphs.
    """
    (tmp_path / "compiler.py").write_text(COMPILER)
    run = [
        *words,
        "recipe=digits",
        "plugin=compiler",
        "mode=pipeline",
        "nproc=2",
        "epochs=2",
        "data.samples=64",
        "data.val_samples=32",
        "batch_size=32",
        "max_steps=4",
        "pipeline.microbatches=4",
        *QUIET,
    ]
    at = {"cwd": tmp_path, "env": {"TRAINER_TEST_COMPILED": str(tmp_path / "graphs")}}
    ok(*run, "compile=true", f"output={tmp_path / 'compiled'}", **at)
    ok(*run, f"output={tmp_path / 'plain'}", **at)
    graphs = [json.loads(line) for line in (tmp_path / "graphs").read_text().splitlines()]
    stages = 2 if "pipeline.schedule=interleaved1f1b" in words else 1
    compiled = Counter((graph["rank"], graph["training"]) for graph in graphs)
    assert compiled == {(rank, training): stages for rank in "01" for training in (True, False)}
    assert not any(graph["met"] for graph in graphs)
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("compiled", "plain"))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
