"""A pen in scene units on an anti-aliased canvas, and the colours of the three times of day.

The picture is 128 units high whatever its size in pixels; x grows to the right, y downwards. We
draw at twice the final resolution with OpenCV's sub-pixel shapes: a movement of a tenth of a pixel
is visible to optical flow, which whole-pixel drawing would turn into jerks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

SCENE_HEIGHT = 128.0
SUPERSAMPLING = 2
INK = (46, 34, 58)
OUTLINE = 2.4
_SHIFT = 4  # fractional bits of OpenCV's fixed-point coordinates

Color = tuple[int, int, int]
Point = tuple[float, float]


def mix(first: Color, second: Color, share: float) -> Color:
    """Blends two RGB colours; ``share`` 0 gives the first, 1 the second."""
    return tuple(round(a + (b - a) * share) for a, b in zip(first, second, strict=True))


def darker(color: Color, share: float = 0.25) -> Color:
    """The shadow side of a colour."""
    return mix(color, (40, 26, 80), share)


def lighter(color: Color, share: float = 0.4) -> Color:
    """The lit side of a colour."""
    return mix(color, (255, 255, 255), share)


# Time of day -> (light colour, its share on scenery, its share on characters).
_LIGHT: dict[str, tuple[Color, float, float]] = {
    "day": ((255, 255, 255), 0.0, 0.0),
    "evening": ((255, 120, 70), 0.34, 0.14),
    "night": ((26, 30, 100), 0.52, 0.2),
}


def scenery_light(color: Color, time: str) -> Color:
    """A scenery colour as it looks at ``time`` (day, evening or night)."""
    light, share, _ = _LIGHT[time]
    return mix(color, light, share)


def character_light(color: Color, time: str) -> Color:
    """A character's colour at ``time``; milder than on scenery, so that faces stay readable."""
    light, _, share = _LIGHT[time]
    return mix(color, light, share)


class Pen:
    """Draws flat shapes, given in scene units, on a uint8 (H, W, 3 or 4) array in place.

    Args:
        image: The canvas; with four channels the last one is coverage and is drawn too.
        scale: Canvas pixels per scene unit.
        origin: Scene position of the canvas's top left corner.
    """

    def __init__(self, image: np.ndarray, scale: float, origin: Point = (0.0, 0.0)) -> None:
        self.image = image
        self.scale = scale
        self._origin = np.array(origin)
        self._opaque = (255,) if image.shape[2] == 4 else ()

    def pixels(self, point: Point) -> Point:
        """Canvas pixel coordinates of a scene position."""
        return (
            (point[0] - self._origin[0]) * self.scale - 0.5,
            (point[1] - self._origin[1]) * self.scale - 0.5,
        )

    def _fixed(self, points: Sequence[Point] | np.ndarray) -> np.ndarray:
        scaled = (np.asarray(points, dtype=np.float64) - self._origin) * self.scale - 0.5
        return np.rint(scaled * (1 << _SHIFT)).astype(np.int32)

    def polygon(
        self, points: Sequence[Point] | np.ndarray, color: Color, outline: float = 0.0
    ) -> None:
        """Fills a polygon, with an ink contour of ``outline`` units around it when positive."""
        corners = [self._fixed(points)]
        if outline > 0:
            width = max(1, round(2 * outline * self.scale))
            ink = (*INK, *self._opaque)
            cv2.polylines(self.image, corners, True, ink, width, cv2.LINE_AA, _SHIFT)
        cv2.fillPoly(self.image, corners, (*color, *self._opaque), cv2.LINE_AA, _SHIFT)

    def ellipse(
        self,
        x: float,
        y: float,
        rx: float,
        ry: float,
        color: Color,
        outline: float = 0.0,
        angle: float = 0.0,
    ) -> None:
        """Fills an ellipse turned by ``angle`` radians, optionally with an ink contour."""
        if outline > 0:
            self.polygon(_ellipse_points(x, y, rx + outline, ry + outline, angle), INK)
        self.polygon(_ellipse_points(x, y, rx, ry, angle), color)

    def rectangle(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        color: Color,
        outline: float = 0.0,
    ) -> None:
        """Fills an upright rectangle."""
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], color, outline)

    def line(
        self, points: Sequence[Point] | np.ndarray, width: float, color: Color, outline: float = 0.0
    ) -> None:
        """Draws a thick line with round ends through the points."""
        path = [self._fixed(points)]
        if outline > 0:
            thick = max(1, round((width + 2 * outline) * self.scale))
            ink = (*INK, *self._opaque)
            cv2.polylines(self.image, path, False, ink, thick, cv2.LINE_AA, _SHIFT)
        thick = max(1, round(width * self.scale))
        color = (*color, *self._opaque)
        cv2.polylines(self.image, path, False, color, thick, cv2.LINE_AA, _SHIFT)


_CIRCLE = np.array([(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 24, False)])


def _ellipse_points(x: float, y: float, rx: float, ry: float, angle: float) -> np.ndarray:
    points = _CIRCLE * (rx, ry)
    if angle:
        cosine, sine = math.cos(angle), math.sin(angle)
        points = points @ np.array([[cosine, sine], [-sine, cosine]])
    return points + (x, y)


def arc(
    x: float, y: float, rx: float, ry: float, start: float, end: float, steps: int = 9
) -> list[Point]:
    """Points along an ellipse from ``start`` to ``end`` degrees (0 right, 90 down)."""
    return [
        (x + rx * math.cos(a), y + ry * math.sin(a))
        for a in np.radians(np.linspace(start, end, steps))
    ]


def paste(
    target: np.ndarray, sprite: np.ndarray, x: float, y: float, angle: float, pivot: Point
) -> None:
    """Blends an RGBA sprite into an RGB canvas, all in canvas pixels.

    Args:
        target: uint8 (H, W, 3), changed in place.
        sprite: uint8 (h, w, 4) with colour premultiplied by coverage.
        x: Where the sprite's pivot comes to lie; fractions of a pixel are kept.
        y: The same, downwards.
        angle: Turn about the pivot in radians, clockwise on screen.
        pivot: The sprite's own pivot point (column, row).
    """
    height, width = sprite.shape[:2]
    reach = (
        math.ceil(math.hypot(max(pivot[0], width - pivot[0]), max(pivot[1], height - pivot[1]))) + 1
    )
    left, top = math.floor(x) - reach, math.floor(y) - reach
    if abs(angle) < 1e-6:
        left, top = math.floor(x - pivot[0]) - 1, math.floor(y - pivot[1]) - 1
        box_width, box_height = width + 3, height + 3
    else:
        box_width = box_height = 2 * reach + 1
    cosine, sine = math.cos(angle), math.sin(angle)
    shift_x = x - left - cosine * pivot[0] + sine * pivot[1]
    shift_y = y - top - sine * pivot[0] - cosine * pivot[1]
    matrix = np.array([[cosine, -sine, shift_x], [sine, cosine, shift_y]])
    moved = cv2.warpAffine(sprite, matrix, (box_width, box_height), flags=cv2.INTER_LINEAR)
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + box_width, target.shape[1]), min(top + box_height, target.shape[0])
    if x0 >= x1 or y0 >= y1:
        return
    blend(target[y0:y1, x0:x1], moved[y0 - top : y1 - top, x0 - left : x1 - left])


def blend(target: np.ndarray, layer: np.ndarray) -> None:
    """Lays a premultiplied RGBA layer over an RGB picture of the same size, in place."""
    color = cv2.cvtColor(layer, cv2.COLOR_RGBA2RGB)
    shown = cv2.cvtColor(255 - cv2.extractChannel(layer, 3), cv2.COLOR_GRAY2RGB)
    target[...] = cv2.add(color, cv2.multiply(target, shown, scale=1 / 255))


def premultiply(layer: np.ndarray) -> np.ndarray:
    """RGBA drawn on a transparent canvas -> colour multiplied by coverage.

    OpenCV's anti-aliased edges already fade to the canvas's black, so the colour of an edge pixel
    is its share of the shape; only values above the coverage need clipping.
    """
    return np.minimum(layer, layer[..., 3:])
