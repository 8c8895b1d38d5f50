"""Exported files compute the same as the model for any number of samples, and contain the metadata
to use them.
"""

import json
import re
import shutil
import signal
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import warm
from tests.command_line import QUIET, environment, ok, result, trainer
from trainer.cli.grammar import read
from trainer.commands import export as exporting
from trainer.commands.export import exporting as export
from trainer.commands.predict.labelling import LabelModel
from trainer.errors import CheckpointError, RecipeError, SetupError
from trainer.models import zoo
from trainer.versions import VERSION

ONNX = f"needs {', '.join(exporting.ONNX)}: pip install {' '.join(exporting.ONNX)}"
needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, exporting.ONNX)),
    reason=ONNX,
)
IMAGES = ("classes", "mean", "std", "image_size", "shorter_side", "channels", "inputs")
PLUGIN = """
import torch
from torch import nn
from trainer import register_dataset, register_model


@register_dataset("words")
def words(data):
    made = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 5, (40, 6), generator=made)
    return (inputs[:32], inputs[:32, 0] % 2), (inputs[32:], inputs[32:, 0] % 2), ("even", "odd")


@register_model("bag")
def bag(num_classes, channels, image_size):
    return nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(48, num_classes))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs of a few steps, in a working folder with a plugin."""
    home = tmp_path_factory.mktemp("export")
    (home / "mine_to_export.py").write_text(PLUGIN)
    short = ["mode=single", "max_steps=2", *QUIET]
    ok("recipe=digits", "model.name=cnn_gn", "ema=0.9", *short, "output=runs/images", cwd=home)
    own = ["plugin=mine_to_export", "data.name=words", "model.name=bag", "batch_size=8"]
    ok(*own, *short, "output=runs/words", cwd=home)
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    yield home
    for path in (*home.glob("model*"), *home.glob("runs/*/model*")):
        path.unlink()


PT2 = "format=exported_program"
TO_X = (PT2, "output=x.pt2")
FORMATS = [
    pytest.param("onnx", marks=needs_onnx),
    *[*exporting.SUFFIXES][1:],
]


def export_as_typed(words):
    """Run the command as `python -m trainer export` does."""
    return exporting.command(read(["export", *words])[1])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_through_the_command_line(here, kind):
    completed = ok("export", "images", f"format={kind}", cwd=here)
    assert completed.stderr == "" and max(map(len, completed.stdout.splitlines())) <= 120
    target = here / "runs" / "images" / f"model{exporting.SUFFIXES[kind]}"
    assert f"  file    runs/images/{target.name}, 0." in completed.stdout and target.is_file()
    assert "  input   uint8 (batch, height, width, 1): " in completed.stdout
    number = r"\D+(\d\S*?)"
    match = re.search(rf" 1, 2, 5:{number}{number},{number}\n", completed.stdout)
    assert float(match[2]) <= float(match[3]) <= 0.005 * float(match[1]) + 1e-4
    match = re.search(rf"  predict on 16 images{number},{number}, 16 of 16 ", completed.stdout)
    assert float(match[1]) <= float(match[2]) == 0.005
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".model")] == []


def facts_of(path, kind):
    if kind == "exported_program":
        extra = {export.METADATA: ""}
        program = torch.export.load(path, extra_files=extra).module()
        return program, json.loads(extra[export.METADATA])
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    facts = json.loads(session.get_modelmeta().custom_metadata_map[export.METADATA])
    return lambda inputs: torch.from_numpy(
        session.run(["output"], {"input": inputs.numpy()})[0]
    ), facts


@needs_onnx
@pytest.mark.parametrize("preprocess", [True, False])
def test_dimensions_of_an_onnx_file_have_names(here, preprocess):
    import onnxruntime

    target = here / f"named-{preprocess}.onnx"
    words = [f"preprocess={str(preprocess).lower()}", f"output={target}"]
    export_as_typed(["runs/images", "format=onnx", *words])
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    image = ["height", "width", 1] if preprocess else [1, 8, 8]
    assert session.get_inputs()[0].shape == ["batch", *image]
    assert session.get_outputs()[0].shape == ["batch", 10]


@pytest.mark.parametrize("kind", FORMATS)
def test_an_exported_file_has_metadata_and_the_models_outputs(here, kind):
    export_as_typed(["runs/images", f"format={kind}", "preprocess=false"])
    run, facts = facts_of(here / "runs" / "images" / f"model{exporting.SUFFIXES[kind]}", kind)
    with safe_open(here / "runs" / "images" / "last.safetensors", "pt") as file:
        weights_metadata = file.metadata()
    assert all(facts[key] == json.loads(weights_metadata[key]) for key in IMAGES)
    assert facts["classes"] == [*"0123456789"]
    assert facts["mean"] == [0.3053]
    assert facts["std"] == [0.376]
    assert (facts["channels"], facts["image_size"], facts["shorter_side"]) == (1, 8, 8)
    assert facts["inputs"] == ["float32", [1, 8, 8]]
    assert re.search(r"\b8 pixels, bilinear .*\b8 x 8\b", facts["resize"])
    assert (facts["model"], facts["task"]) == ("cnn_gn", "classification")
    assert facts["version"] == VERSION
    assert facts["metric"] == {
        "name": "top1",
        "value": result(here / "runs" / "images")["val_top1"],
    }
    source = export.load(here / "runs" / "images", [], preprocess=False, precision="fp32")
    inputs = source.sample(7)
    with torch.no_grad():
        torch.testing.assert_close(
            run(inputs),
            source.model(inputs),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.slow(cases=["checkpoints/step-00000002", "best.safetensors"])
@pytest.mark.parametrize("source", ["best.safetensors", "checkpoints/step-00000002"])
def test_from_all_that_holds_weights(here, source):
    target = (
        f"runs/images/model-{source.removeprefix('checkpoints/').removesuffix('.safetensors')}.pt2"
    )
    text = export_as_typed([f"runs/images/{source}", "format=exported_program"])
    assert f"  file    {target}, " in text and (here / target).is_file()


@pytest.mark.parametrize("kind", FORMATS)
def test_inputs_that_are_no_images_and_models_of_a_plugin(here, kind):
    text = export_as_typed(["words", f"format={kind}", "plugin=mine_to_export"])
    assert re.search(r"^  input   int64 \(batch, 6\): .*\bdata set\b", text, re.M)
    run, facts = facts_of(here / "runs" / "words" / f"model{exporting.SUFFIXES[kind]}", kind)
    assert facts["classes"] == ["even", "odd"] and "resize" not in facts
    probabilities = run(torch.zeros(3, 6, dtype=torch.int64))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(3))


@pytest.mark.slow
def test_weights_that_do_not_say_what_inputs_are(here):
    """Weights of older versions are known to expect images and nothing else."""
    for run in ("words", "images"):
        shutil.copytree(here / "runs" / run, here / "runs" / f"{run}-old")
        weights = here / "runs" / f"{run}-old" / "last.safetensors"
        weights.with_name("best.safetensors").unlink()
        with safe_open(weights, "pt") as file:
            reported = {key: value for key, value in file.metadata().items() if key != "inputs"}
        save_file(load_file(weights), weights, reported)
    assert "float32 (batch, 1, 8, 8)" in export_as_typed(
        ["images-old", "format=exported_program", "preprocess=false"]
    )
    with pytest.raises(CheckpointError, match=r"words-old\b.*\binputs\b"):
        export_as_typed(["words-old", "format=exported_program", "plugin=mine_to_export"])


@pytest.mark.slow
def test_a_file_with_wrong_outputs_is_not_kept(here, monkeypatch):
    writer = export.WRITERS["exported_program"]

    def wrong(source):
        content, run = writer(source)
        return content, lambda inputs: run(inputs) * 1.01

    monkeypatch.setitem(export.WRITERS, "exported_program", wrong)
    with pytest.raises(
        RecipeError, match=r"format=exported_program .*\b1 samples? .*\bdiffer by \d.*\bformat=onnx"
    ) as error:
        export_as_typed(["images", "format=exported_program"])
    assert "\n" not in str(error.value)
    assert [
        path.name for path in (here / "runs" / "images").iterdir() if "model" in path.name
    ] == []


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow(cases=["exported_program"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_disk_that_is_full_is_one_line(here, kind):
    """The kernel cuts a write short, then refuses the next."""
    run = here / "runs" / "images"
    before = sorted(run.rglob("*"))
    export_as_typed(["images", f"format={kind}", "output=model-whole" + exporting.SUFFIXES[kind]])
    size = (here / f"model-whole{exporting.SUFFIXES[kind]}").stat().st_size
    command = [
        sys.executable,
        "-c",
        LIMITED,
        str(size * 9 // 10),
        "export",
        "images",
        f"format={kind}",
    ]
    completed = warm.run(
        command, env=environment(), cwd=here, capture_output=True, text=True, timeout=180
    )
    assert completed.returncode == 28, completed.stderr[-2000:]
    assert re.fullmatch(
        r"trainer: error: runs/images: .*\bdisk\b.* \(.*\).*\n", completed.stderr
    ), completed.stderr
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
def test_an_export_removes_files_of_a_killed_one(here):
    run = here / "runs" / "images"
    before = sorted(run.rglob("*"))
    words = ["export", "images", "format=exported_program"]
    killed = trainer(*words, env={"TRAINER_FAULT": "kill@export:fsync"}, cwd=here)
    assert killed.returncode == -signal.SIGKILL
    assert len([*run.rglob("*")]) == len(before) + 1
    ok(*words, cwd=here)
    assert sorted(run.rglob("*")) == sorted([*before, run / "model.pt2"])


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        ([], RecipeError, r"^export .*\bexport RUN format=onnx$"),
        (["format=onnx"], RecipeError, r"^export .*\bexport runs/x format=onnx; "),
        (["images", "words", "format=onnx"], RecipeError, r"^images and words .*\bone of them$"),
        (
            ["images"],
            RecipeError,
            r"^format=: .*\bonnx, exported_program, .*\bexport runs/x format=onnx$",
        ),
        (
            ["images", "format=onx"],
            RecipeError,
            r"^format=onx: .*\bonnx, exported_program, .*\bexport runs/x format=onnx$",
        ),
        (
            ["images", PT2, "output=x.onnx"],
            RecipeError,
            r"^output=x\.onnx: .*\bformat=exported_program .*\.pt2$",
        ),
        (
            ["images", PT2, "output=no/x.pt2"],
            SetupError,
            r"^output=no/x\.pt2: .*\bfolder no; .*\boutput=$",
        ),
        (
            ["images", PT2, "output=runs/images/model-there.pt2"],
            RecipeError,
            r"^runs/images/model-there\.pt2 .*\balready: .*\boutput=$",
        ),
        (
            ["nowhere", *TO_X],
            CheckpointError,
            r"^'nowhere' .*\bruns/nowhere: .*\btrainer runs\b",
        ),
        (
            ["runs/images/steps.csv", *TO_X],
            CheckpointError,
            r"^runs/images/steps\.csv .*\.safetensors, \.pt or \.pth\b",
        ),
        (["images", *TO_X, "preprocess=no"], RecipeError, r"^preprocess=no .*\btrue or false$"),
        (["images", *TO_X, "precision=bf16"], RecipeError, r"^precision=bf16: .*\bfp32, fp16$"),
        (["images", *TO_X, "epohcs=3"], RecipeError, r": epohcs .* epochs\?$"),
        (["words", *TO_X], RecipeError, r"^model\.name=bag .*\bplugin=my_module\b"),
        (
            ["images", *TO_X, "plugin=absent_one"],
            RecipeError,
            r"^plugin=absent_one: no module\b",
        ),
    ],
)
def test_meaningless_arguments_are_answered_with_a_valid_command(
    here, monkeypatch, words, error, expected
):
    (here / "runs" / "images" / "model-there.pt2").write_text("mine")
    # Another test has loaded the plugin.
    monkeypatch.delitem(zoo.builders, "bag", raising=False)
    with pytest.raises(error) as caught:
        export_as_typed(words)
    assert re.search(expected, str(caught.value))
    assert "\n" not in str(caught.value)


def test_another_size_is_what_the_loaded_model_has(here):
    """`load` and `predict` accept the same argument."""
    source = export.load(
        here / "runs" / "images", ["data.image_size=12"], preprocess=False, precision="fp32"
    )
    assert (source.facts["image_size"], source.inputs.shape) == (12, (1, 12, 12))
    how = LabelModel.read(here / "runs" / "images", ["data.image_size=12"], split=False).preparation
    assert (how.image_size, how.shorter_side) == (12, source.facts["shorter_side"])


@pytest.mark.parametrize("package", ["onnxscript", "onnx_ir"])
def test_a_missing_onnx_is_answered_with_the_install_command(here, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SetupError, match=r"format=onnx .*pip install onnx onnxscript onnxruntime"):
        export_as_typed(["images", "format=onnx"])


def test_a_package_that_an_exporter_misses_is_named(here, monkeypatch):
    """Exporters wrap the exception of an import in others."""

    def convert(source):
        try:
            try:
                raise ModuleNotFoundError("No module named 'onnx_ir'", name="onnx_ir.passes")
            except ModuleNotFoundError as error:
                raise ValueError("a step failed") from error
        except ValueError as error:
            raise RuntimeError("the export failed") from error

    monkeypatch.setitem(export.WRITERS, "exported_program", convert)
    with pytest.raises(SetupError, match=r"pip install onnx-ir$"):
        export_as_typed(["images", "format=exported_program"])
