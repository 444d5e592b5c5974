"""The eight places by day, evening and night, as layers that scroll at different speeds.

Sky and landmark stand still, the far layer moves at ``FAR_SPEED``, the near one with the ground.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data_pipeline.builtin_world.attributes import LANDMARK_SPOT, draw_landmark
from data_pipeline.builtin_world.canvas import (
    OUTLINE,
    SCENE_HEIGHT,
    Pen,
    mix,
    premultiply,
    scenery_light,
)
from data_pipeline.builtin_world.scenery import KNOLLS, MARGIN, PAINTERS, PERIOD, SKIES, Brush

PLACES: tuple[str, ...] = tuple(PAINTERS)
TIMES: tuple[str, ...] = tuple(SKIES)
FAR_SPEED = 0.4


def _sky(place: str, time: str, landmark: str, width: float, scale: float) -> np.ndarray:
    """uint8 RGB: everything that never scrolls, margin included."""
    rows = round((SCENE_HEIGHT + 2 * MARGIN) * scale)
    columns = round((width + 2 * MARGIN) * scale)
    top, bottom = SKIES[time]
    share = np.clip((np.arange(rows) / scale - MARGIN) / 90, 0, 1)[:, None]
    gradient = np.array(top) * (1 - share) + np.array(bottom) * share
    image = np.repeat(gradient[:, None], columns, axis=1).round().astype(np.uint8)
    pen = Pen(image, scale, (-MARGIN, -MARGIN))
    if time == "day":
        pen.ellipse(20, 18, 14, 14, (255, 246, 190))
        pen.ellipse(20, 18, 10.5, 10.5, (255, 226, 90))
        clouds, color = ((62, 16, 0.9), (118, 20, 1.0)), (255, 255, 255)
    elif time == "evening":
        pen.ellipse(22, 46, 20, 20, (255, 196, 110))
        pen.ellipse(22, 46, 15, 15, (255, 240, 150))
        clouds, color = ((66, 14, 0.9), (120, 22, 1.0)), (250, 160, 160)
    else:
        for x, y in (
            (50, 10),
            (70, 24),
            (92, 8),
            (112, 22),
            (134, 9),
            (8, 46),
            (52, 44),
            (140, 34),
            (98, 40),
            (186, 58),
            (30, 62),
        ):
            pen.ellipse(x, y, 1.9, 1.9, (255, 250, 210))
        pen.ellipse(22, 20, 13, 13, (255, 244, 186))
        pen.ellipse(28, 16, 11, 11, mix(top, bottom, 0.15))
        clouds, color = (), (0, 0, 0)
    for x, y, size in clouds:
        for dx, dy, r in ((0, 0, 9), (-12, 3, 7), (12, 3, 7)):
            pen.ellipse(x + dx * size, y + dy * size, r * 1.3 * size, r * 0.8 * size, color)
    if landmark != "none" and place != "room":
        spot = LANDMARK_SPOT[0] - 192 + width, LANDMARK_SPOT[1]
        draw_landmark(pen, landmark, *spot, time, scenery_light(KNOLLS[place], time))
    return image


def _picture(landmark: str, time: str, width: float, scale: float) -> np.ndarray:
    """The room's big wall picture of the landmark, as a still RGBA layer."""
    size = (round((SCENE_HEIGHT + 2 * MARGIN) * scale), round((width + 2 * MARGIN) * scale), 4)
    image = np.zeros(size, np.uint8)
    pen = Pen(image, scale, (-MARGIN, -MARGIN))
    x, y = LANDMARK_SPOT[0] - 192 + width, LANDMARK_SPOT[1] + 2
    pen.rectangle(x - 23, y - 25, x + 23, y + 23, scenery_light((176, 116, 50), time), OUTLINE)
    pen.rectangle(x - 20, y - 22, x + 20, y + 20, scenery_light((120, 200, 246), time))
    draw_landmark(pen, landmark, x, y, time, None)
    return premultiply(image)


@dataclass
class Backdrop:
    """The layers of one place at one hour, in canvas pixels; ``still`` is them unscrolled."""

    sky: np.ndarray
    far: np.ndarray
    near: np.ndarray
    picture: np.ndarray | None
    scale: float
    still: np.ndarray | None = None


@lru_cache(maxsize=160)
def backdrop(place: str, time: str, landmark: str, width: float, scale: float) -> Backdrop:
    """Draws (once) the layers of a place.

    Args:
        place: One of ``PLACES``.
        time: One of ``TIMES``.
        landmark: One of ``LANDMARKS``.
        width: Frame width in scene units.
        scale: Canvas pixels per scene unit.
    """
    far, near = _layers(place, time, width, scale)
    picture = None
    if place == "room" and landmark != "none":
        picture = _picture(landmark, time, width, scale)
    return Backdrop(_sky(place, time, landmark, width, scale), far, near, picture, scale)


@lru_cache(maxsize=48)
def _layers(place: str, time: str, width: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    rows = round((SCENE_HEIGHT + 2 * MARGIN) * scale)
    images = [np.zeros((rows, round(PERIOD * scale), 4), np.uint8) for _ in range(2)]
    far, near = (Brush(image, scale, time) for image in images)
    PAINTERS[place](far, near)
    view = width + 2 * MARGIN
    repeats = math.ceil((PERIOD + view + 2) / PERIOD)
    return tuple(np.tile(premultiply(image), (1, repeats, 1)) for image in images)
