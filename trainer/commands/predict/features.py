"""Files of image features, for similarity search or for training another classifier."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.errors import RecipeError
from trainer.models.features import record_features
from trainer.saving.files import format_csv, remove, replace_file
from trainer.saving.tensor_files import sync

Array = npt.NDArray[np.float32]


def count_features(model: nn.Module, outputs: int, image: Tensor) -> int:
    """Return the number of features of an image (C, H, W).

    Raises:
        RecipeError: The model has no classifier whose input is one vector per image.
    """
    with torch.inference_mode(), record_features(model, outputs) as inputs:
        model(torch.stack([image, image]))
    shapes = [tuple(rows.shape) for rows in inputs]
    if not shapes or len(shapes[0]) != 2 or shapes[0][0] != 2:
        found = f"the input of its last one is {shapes[0]}" if shapes else "it has none"
        raise RecipeError(
            f"predict.features needs a last linear layer of {outputs} outputs with one vector per "
            f"image, and {found}: leave it out"
        )
    return shapes[0][1]


class FeatureFiles:
    """Writer of features.npy, and of features.csv with the path of each row.

    An image without features is in neither file. Both get their names when they are complete.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Open the files in `folder` for vectors of `size` features."""
        self.final = folder / "features.npy"
        self.shape = (0, size)
        self._array_draft = folder / "features.npy.part"
        self._paths_draft = folder / "features.csv.part"
        self._array = self._array_draft.open("wb")
        self._paths = self._paths_draft.open(
            "w", encoding="utf-8", errors="surrogateescape", newline=""
        )
        self._write_header()
        self._paths.write("path\n")

    def _write_header(self) -> None:
        # NumPy pads the header so that the number of rows can grow.
        header = {"descr": "<f4", "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self._array, header)

    def write(self, path: str, features: Array) -> None:
        """Append the features of the image at `path`."""
        self._array.write(features.astype("<f4").tobytes())
        self._paths.write(format_csv([[path]]))
        self.shape = (self.shape[0] + 1, self.shape[1])

    def finish(self) -> None:
        """Complete both files."""
        self._array.seek(0)
        self._write_header()
        self._array.close()
        self._paths.close()
        for draft in (self._paths_draft, self._array_draft):
            sync(draft)
            replace_file(draft, draft.with_suffix(""))

    def close(self) -> None:
        """Close the files, and remove them unless `finish` has renamed them."""
        self._array.close()
        self._paths.close()
        remove(self._array_draft)
        remove(self._paths_draft)
