"""Extra packages that are missing, broken, or an empty folder: commands that need them suggest the
installation.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from trainer.commands import export, sweep
from trainer.commands.export import exporting
from trainer.data.archives import parquet
from trainer.data.folders.scanning import LeftOut
from trainer.data.photos import decoding, stacks
from trainer.errors import RecipeError, SetupError
from trainer.models import zoo
from trainer.recipe import ModelRecipe, known_names, load
from trainer.telemetry.loggers import Loggers


def heic(folder: Path) -> None:
    left = LeftOut()
    left.other("a.heic")
    raise SetupError(left.in_words())


def tiff(folder: Path) -> None:
    stacks.read_stack(np.frombuffer(b"II*\0" + bytes(60), np.uint8), 5)


def export_onnx(folder: Path) -> None:
    export.export_run(folder, "onnx", folder / "model.onnx", [], True, "fp32")


def log(name: str) -> Callable[[Path], object]:
    return lambda folder: Loggers(load("digits", f"logging.{name}=true"), folder, lambda line: None)


NEEDED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "timm": (
        "timm",
        lambda folder: zoo.build(
            ModelRecipe(name="timm:resnet10t"),
            3,
            3,
            64,
        ),
    ),
    "pyarrow": ("pyarrow", lambda folder: parquet.pyarrow()),
    "pillow_heif": ("pillow-heif", heic),
    "tifffile": ("tifffile", tiff),
    "optuna": ("optuna", lambda folder: sweep.command(["recipe=digits", "optimizer.lr=0.001..1"])),
    "wandb": ("wandb", log("wandb")),
    "mlflow": ("mlflow", log("mlflow")),
    **dict.fromkeys(
        ("onnx", "onnxscript", "onnxruntime", "onnx_ir"),
        ("onnx onnxscript onnxruntime", export_onnx),
    ),
}
BROKEN = {
    "missing": None,
    "lacks a dependency": "raise ModuleNotFoundError('No module named fitting', name='fitting')",
    "does not fit": "raise ImportError('cannot import name something')",
    "lacks a library": "raise OSError('libfitting.so.2: cannot open shared object file')",
    "older than Python": "raise AttributeError('module has no attribute it')",
    "a folder": "",
}
# pip would count this as installed.
REINSTALLED = (
    "does not fit",
    "lacks a library",
    "older than Python",
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Remove stand-ins after each test."""
    before = {**sys.modules}
    decoding.register_heif.cache_clear()
    yield
    decoding.register_heif.cache_clear()
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in NEEDED:
            del sys.modules[name]


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("package", NEEDED)
def test_a_missing_package_is_answered_with_the_install_command(
    package: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = [name for name in ("onnx", "onnxscript", "onnxruntime", "onnx_ir") if name != package]
    for name in (package, *others):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    for name in others:
        (tmp_path / f"{name}.py").touch()
    if BROKEN[how] is None:
        monkeypatch.setitem(sys.modules, package, None)
    elif how == "a folder":
        folder = ModuleType(package)
        folder.__file__ = None
        monkeypatch.setitem(sys.modules, package, folder)
    else:
        (tmp_path / f"{package}.py").write_text(BROKEN[how])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(known_names, "timm_models", lambda: ("timm:resnet10t",))
    monkeypatch.chdir(tmp_path)
    pip, use = NEEDED[package]
    with pytest.raises((SetupError, RecipeError)) as caught:
        use(tmp_path)
    typed = str(caught.value).partition(": pip install ")[2]
    assert pip in typed and "\n" not in typed
    assert ("--force-reinstall" in typed) == (how in REINSTALLED)


def test_a_missing_feature_of_an_exporter_is_no_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(source: object) -> None:
        try:
            raise ModuleNotFoundError("No module named 'ml_dtypes'", name="ml_dtypes")
        except ImportError as error:
            raise RuntimeError("failed to export") from error

    monkeypatch.setitem(exporting.WRITERS, "onnx", lacks)
    with pytest.raises(SetupError, match="install ml-dtypes"):
        exporting._write_and_check(SimpleNamespace(facts={"precision": "fp32"}), "onnx")
