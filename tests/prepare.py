"""Preparation of a photo by Pillow and NumPy alone, which tests compare with that of `trainer`."""

import numpy as np
from PIL import Image, ImageOps


def prepare(path, metadata):
    """Return a photo as the model's input, (1, channels, rows, columns)."""
    (rows, columns), (high, wide) = (
        np.broadcast_to(metadata[key], 2).tolist() for key in ("image_size", "shorter_side")
    )
    mode = "L" if metadata["channels"] == 1 else "RGB"
    image = Image.open(path)
    most = min(image.height // max(high, 128), image.width // max(wide, 128))
    smaller = next((times for times in (8, 4, 2) if times <= most), 1)
    image.draft(mode, (image.width // smaller, image.height // smaller))  # affects JPEGs only
    image = opaque(ImageOps.exif_transpose(image), metadata.get("pixel_range")).convert(mode)
    width, height = image.size
    if high * width >= wide * height:
        width, height = high * width // height, high
    else:
        width, height = wide, wide * height // width
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - columns) / 2), round((height - rows) / 2)
    pixels = np.asarray(image.crop((left, top, left + columns, top + rows)), np.float32).reshape(
        rows, columns, -1
    )
    pixels = (pixels / 255 - metadata["mean"]) / metadata["std"]
    return np.float32(pixels.transpose(2, 0, 1))[None]


def opaque(image, pixel_range):
    """Return the image with 8 bits a channel, on white."""
    if image.mode[0] in "IF":  # 16 bits or more, or floating-point
        values = np.nan_to_num(np.asarray(image, np.float64))
        black, white = pixel_range or (0, 1 if image.mode == "F" else 65535)
        pixels = np.clip((values - black) * 255 / (white - black), 0, 255)
        pixels[values == image.info.get("transparency", np.nan)] = 255
        return Image.fromarray(np.uint8(pixels.round()))
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image
