"""Pictures of samples: one file each, and grids with a caption a row.

Media are float tensors in [0, 1]: (C, H, W) an image, (F, C, H, W) a video, C of 1 or 3. The hazard is a grid
of tiny pictures that nobody can judge: what is smaller than 64 pixels is enlarged by a whole factor,
unsmoothed. A video is a GIF on its own and a strip of its frames in a grid. Files appear whole or not at all.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.record.atomic import write_atomic

__all__ = ["grid", "save_grid", "save_media"]

_LEAST_SIDE = 64
_GAP = 4
_STRIP_FRAMES = 6


def save_media(media: Tensor, path: Path) -> Path:
    """Save one sample: an image as PNG, a video as GIF. Returns the path, with the suffix set accordingly."""
    if media.ndim == 4:
        frames = [_picture(frame) for frame in media]
        options = {"save_all": True, "append_images": frames[1:], "duration": 125, "loop": 0}
        return _write(frames[0], path.with_suffix(".gif"), **options)
    return _write(_picture(media), path.with_suffix(".png"))


def save_grid(media: Tensor, path: Path, *, columns: int, captions: Sequence[str] = ()) -> Path:
    """Save `grid` of the same arguments as PNG and return the path."""
    return _write(grid(media, columns=columns, captions=captions), path.with_suffix(".png"))


def grid(media: Tensor, *, columns: int, captions: Sequence[str] = ()) -> Any:
    """A PIL image of N samples, `columns` a row, in reading order.

    media: (N, C, H, W), or videos (N, F, C, H, W) of which each shows up to six frames in a strip. captions:
    one a row, written above it (the prompt, say); none leaves no space.
    """
    pixels = torch.stack([_pixels(_strip(sample)) for sample in media])
    num_rows = -(-len(pixels) // columns)
    if captions and len(captions) != num_rows:
        raise ValueError(f"{len(captions)} captions for {num_rows} rows of {columns} columns; give one a row")
    image, image_draw = _pil()
    height, width = pixels.shape[1:3]
    text_height = 14 if captions else 0
    canvas = image.new(
        "RGB",
        (columns * (width + _GAP) + _GAP, num_rows * (height + text_height + _GAP) + _GAP),
        (24, 24, 24),
    )
    draw = image_draw.Draw(canvas)
    for row, caption in enumerate(captions):
        top = _GAP + row * (height + text_height + _GAP)
        draw.text((_GAP, top), _fitting(draw, caption, canvas.width - 2 * _GAP), fill=(230, 230, 230))
    for index, sample in enumerate(pixels):
        row, column = divmod(index, columns)
        place = (_GAP + column * (width + _GAP), _GAP + row * (height + text_height + _GAP) + text_height)
        canvas.paste(image.fromarray(sample.numpy()), place)
    return canvas


def _picture(media: Tensor) -> Any:
    image, _ = _pil()
    return image.fromarray(_pixels(media).numpy())


def _pil() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ValueError('pictures need an extra: pip install "stretto[train]"') from None
    return Image, ImageDraw


def _pixels(media: Tensor) -> Tensor:
    """(C, H, W) in [0, 1] to (H', W', 3) uint8 on the CPU, enlarged where it is small; not finite is black."""
    media = media.detach().float().cpu().nan_to_num(0, 0, 0).clamp(0, 1)
    factor = max(1, -(-_LEAST_SIDE // min(media.shape[1:])))
    media = media.expand(3, -1, -1).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    return (media * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _strip(sample: Tensor) -> Tensor:
    """A video's frames, evenly chosen, side by side; an image as it is."""
    if sample.ndim == 3:
        return sample
    count = min(len(sample), _STRIP_FRAMES)
    chosen = torch.linspace(0, len(sample) - 1, count).round().long()
    return torch.cat(list(sample[chosen]), dim=-1)


def _fitting(draw: Any, text: str, width: int) -> str:
    """The text, cut with dots where it is too wide; characters that the built-in font lacks as question
    marks."""
    text = " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")
    shown = text
    while shown and draw.textlength(shown) > width:
        shown = shown[:-4] + "..." if len(shown) > 4 else ""
    return shown


def _write(picture: Any, path: Path, **options: Any) -> Path:
    file = io.BytesIO()
    picture.save(file, format=path.suffix.removeprefix("."), **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, file.getvalue())
    return path
