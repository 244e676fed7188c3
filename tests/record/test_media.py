"""Pictures: the right pixels in the right place."""

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.record.media import grid, save_grid, save_media


def test_a_picture_comes_back_as_it_was(tmp_path):
    levels = torch.randint(0, 256, (3, 64, 80), generator=torch.Generator().manual_seed(0))
    path = save_media(levels / 255, tmp_path / "a")
    assert path.name == "a.png"
    assert np.array_equal(np.asarray(Image.open(path)), levels.permute(1, 2, 0).numpy())


def test_a_small_grey_picture_is_enlarged_by_a_whole_factor(tmp_path):
    picture = np.asarray(Image.open(save_media(torch.eye(8).unsqueeze(0), tmp_path / "a")))
    assert picture.shape == (64, 64, 3)
    assert np.array_equal(picture[..., 0], np.kron(np.eye(8), np.ones((8, 8))) * 255)


def test_values_out_of_range_or_not_finite_are_drawn_within_range(tmp_path):
    media = torch.tensor([-1.0, 2.0, float("nan"), 0.5]).reshape(1, 2, 2)
    picture = np.asarray(Image.open(save_media(media, tmp_path / "a")))
    assert picture[0, 0, 0] == 0
    assert picture[0, -1, 0] == 255
    assert picture[-1, 0, 0] == 0
    assert picture[-1, -1, 0] == 128


def test_a_video_is_a_gif_of_all_its_frames(tmp_path):
    path = save_media(torch.linspace(0, 1, 9).reshape(9, 1, 1, 1).expand(9, 3, 64, 64), tmp_path / "a")
    assert path.name == "a.gif"
    with Image.open(path) as gif:
        assert gif.n_frames == 9


def test_a_grid_is_in_reading_order():
    media = torch.arange(6).reshape(6, 1, 1, 1).expand(6, 1, 64, 64) / 5
    for captions, text_height in (([], 0), (["top", "bottom"], 14)):
        pixels = np.asarray(grid(media, columns=3, captions=captions))
        middles = [
            pixels[4 + row * (68 + text_height) + text_height + 32, 4 + column * 68 + 32, 0]
            for row in range(2)
            for column in range(3)
        ]
        assert middles == [0, 51, 102, 153, 204, 255]
        assert pixels.shape == (2 * (68 + text_height) + 4, 3 * 68 + 4, 3)


def test_a_grid_of_videos_shows_strips_from_first_to_last_frame():
    media = torch.linspace(0, 1, 9).reshape(1, 9, 1, 1, 1).expand(2, 9, 3, 64, 64)
    pixels = np.asarray(grid(media, columns=1))
    assert pixels.shape == (2 * 68 + 4, 6 * 64 + 8, 3)
    assert (pixels[10, 10, 0], pixels[10, -10, 0]) == (0, 255)


def test_any_caption_fits(tmp_path):
    media = torch.zeros(1, 3, 64, 64)
    with Image.open(
        save_grid(media, tmp_path / "g", columns=1, captions=["a long \n\u732b prompt " * 20])
    ) as picture:
        assert picture.size == (72, 86)


def test_captions_must_be_one_a_row():
    with pytest.raises(ValueError, match="3 captions for 2 rows of 2 columns"):
        grid(torch.zeros(4, 3, 64, 64), columns=2, captions=["a", "b", "c"])
