"""Motion scope: known movements give known numbers, noise does not, edges fall into gaps."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from animegamer.motion import level_edges, level_of, motion_scope


def moving_texture(pixels_per_frame: float, height: int = 64, width: int = 96) -> np.ndarray:
    """A smooth random texture that slides to the left."""
    rng = np.random.default_rng(0)
    texture = rng.uniform(0, 255, (height, width + 100, 3)).astype(np.float32)
    texture = cv2.GaussianBlur(texture, (0, 0), 1.5 * width / 96)
    texture = (texture - texture.min()) / (texture.max() - texture.min()) * 255
    frames = []
    for index in range(9):
        shift = np.array([[1, 0, -pixels_per_frame * index], [0, 1, 0]], np.float64)
        frames.append(cv2.warpAffine(texture, shift, (width, height)))
    return np.stack(frames).round().astype(np.uint8)


@pytest.mark.parametrize("speed", [0.4, 1.0, 2.0])
def test_known_movement(speed: float) -> None:
    assert motion_scope(moving_texture(speed)) == pytest.approx(speed * 720 / 96, rel=0.15)


def test_unit_does_not_depend_on_the_size() -> None:
    small = motion_scope(moving_texture(1.0))
    large = motion_scope(moving_texture(2.0, 128, 192))
    assert large == pytest.approx(small, rel=0.15)


def test_still_and_faintly_flickering_pictures_do_not_move() -> None:
    still = np.repeat(moving_texture(0)[:1], 9, axis=0)
    assert motion_scope(still) == 0
    rng = np.random.default_rng(1)
    noise = np.stack(
        [cv2.GaussianBlur(rng.normal(0, 1, still.shape[1:]), (0, 0), 2) for _ in still]
    )
    flicker = np.clip(still + noise / noise.std() * 2, 0, 255).astype(np.uint8)
    assert motion_scope(flicker) < 0.5


def test_threshold_drops_slow_parts() -> None:
    frames = moving_texture(0.4)
    assert motion_scope(frames, threshold=50.0) == 0


def test_wrong_input_is_refused() -> None:
    frames = moving_texture(1.0)
    with pytest.raises(ValueError, match="float64"):
        motion_scope(frames.astype(np.float64))
    with pytest.raises(ValueError, match="2 frames"):
        motion_scope(frames[:1])


def test_edges_fall_into_the_gaps() -> None:
    rng = np.random.default_rng(2)
    centres = [1.5, 2.7, 5.0, 9.0, 16.0]
    sizes = [300, 150, 200, 100, 250]
    values = np.concatenate(
        [c * np.exp(rng.normal(0, 0.08, n)) for c, n in zip(centres, sizes, strict=True)]
    )
    edges = level_edges(values)
    assert edges == sorted(edges) and len(edges) == 4
    assert [level_of(c, edges) for c in centres] == [1, 2, 3, 4, 5]
    assert all(
        low < edge < high for low, edge, high in zip(centres, edges, centres[1:], strict=False)
    )


def test_edges_need_enough_data() -> None:
    with pytest.raises(ValueError, match="distinct"):
        level_edges([1.0, 1.0, 2.0])
