"""Heads: hair, face and expression, drawn once per variant and kept as RGBA sprites."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from data_pipeline.builtin_world.canvas import (
    INK,
    OUTLINE,
    Color,
    Pen,
    arc,
    character_light,
    darker,
    lighter,
    paste,
    premultiply,
)
from data_pipeline.builtin_world.looks import LOOKS, Look

SPRITE_WIDTH, SPRITE_HEIGHT = 104.0, 120.0
CENTRE = (52.0, 50.0)  # where the head's centre lies in its sprite
MOUTHS = ("smile", "half", "open")
EYES = ("open", "closed", "down")


class _Tones:
    """A look's colours in the light of one time of day."""

    def __init__(self, look: Look, time: str) -> None:
        for name in ("hair", "skin", "eye", "trim"):
            setattr(self, name, character_light(getattr(look, name), time))
        self.time = time

    hair: Color
    skin: Color
    eye: Color
    trim: Color

    def lit(self, color: Color) -> Color:
        return character_light(color, self.time)


def _back_tails(pen: Pen, tones: _Tones, flutter: float) -> None:
    for side in (-1, 1):
        swing = -7 * flutter
        pen.line(
            [(side * 20, -4), (side * 32 + swing * 0.5, 8), (side * 31 + swing, 34)],
            13,
            tones.hair,
            OUTLINE,
        )
    pen.ellipse(-22, -4, 6, 6, tones.lit((255, 214, 60)), OUTLINE)
    pen.ellipse(22, -4, 6, 6, tones.lit((255, 214, 60)), OUTLINE)


def _back_long(pen: Pen, tones: _Tones, flutter: float) -> None:
    swing = -10 * flutter
    pen.polygon(
        [
            (-23, -6),
            (20, -6),
            (24, 26),
            (20 + swing * 0.3, 40),
            (0 + swing * 0.5, 46),
            (-24 + swing, 46),
            (-32 + swing, 40),
            (-28, 18),
        ],
        darker(tones.hair, 0.12),
        OUTLINE,
    )


def _face(pen: Pen, tones: _Tones, eyes: str, mouth: str) -> None:
    pen.ellipse(3, 4.5, 18.5, 15.5, tones.skin)
    for side in (-1, 1):
        x = 6.5 + side * 8.2
        if eyes == "open":
            pen.ellipse(x, 4.5, 4.6, 6.8, INK)
            pen.ellipse(x + 0.4, 6.8, 3.4, 4.1, tones.eye)
            pen.ellipse(x + 1.3, 1.8, 2.1, 2.4, (255, 255, 255))
        elif eyes == "down":
            pen.ellipse(x, 7.6, 4.0, 3.6, INK)
            pen.ellipse(x + 0.3, 8.8, 2.6, 2.2, tones.eye)
            pen.line([(x - 4.2, 4.8), (x + 4.2, 4.8)], 2.0, INK)
        else:
            pen.line(arc(x, 4.5, 4.4, 3.6, 10, 170), 2.4, INK)
        pen.ellipse(6.5 + side * 13.2, 12, 3.2, 2.2, tones.lit((255, 150, 140)))
    if mouth == "open":
        pen.ellipse(7, 14.6, 4.4, 4.2, tones.lit((150, 30, 44)))
        pen.ellipse(7, 16.6, 2.9, 1.8, tones.lit((246, 120, 120)))
    elif mouth == "half":
        pen.ellipse(7, 14.4, 3.2, 2.4, tones.lit((160, 36, 48)))
    else:
        pen.line(arc(7, 11.8, 3.8, 2.8, 25, 155), 2.0, tones.lit((130, 40, 50)))


def _fringe(pen: Pen, tones: _Tones, tips: list[tuple[float, float]]) -> None:
    crown = arc(0, 0, 22, 20.5, 0, -180, 15)
    pen.polygon([*crown, *tips], tones.hair)
    pen.line(arc(-2, -3, 14, 11, 215, 290), 3.0, lighter(tones.hair, 0.45))


def _skull(pen: Pen, tones: _Tones) -> None:
    pen.ellipse(0, 0, 22, 20.5, tones.hair, OUTLINE)


def _front_cap(pen: Pen, tones: _Tones, flutter: float) -> None:
    _fringe(pen, tones, [(-21, 10), (-15, 2), (-9, 5), (-3, -1), (4, 1), (11, -2), (20, 2)])
    pen.polygon([*arc(-1, -8, 23.5, 19, 180, 360, 13), (23, -6), (-24, -6)], tones.trim, OUTLINE)
    pen.polygon(
        [(-24, -13), (22, -13), (33, -7), (32, -3), (20, -6), (-24, -5)],
        tones.lit((255, 255, 255)),
        OUTLINE,
    )
    pen.ellipse(4, -19, 4, 4, tones.lit((255, 214, 70)))


def _front_tails(pen: Pen, tones: _Tones, flutter: float) -> None:
    _fringe(
        pen, tones, [(-21, 12), (-15, 1), (-8, 3), (-2, -4), (4, 1), (11, -3), (16, 3), (21, 10)]
    )


def _front_long(pen: Pen, tones: _Tones, flutter: float) -> None:
    _fringe(pen, tones, [(-22, 16), (-17, 14), (-15, -1), (20, -3), (21, 6)])
    pen.line(arc(0, 1, 21.5, 20, 205, 335), 4.4, tones.lit((226, 44, 126)))
    pen.ellipse(-15, -13, 6, 6, tones.lit((255, 255, 255)), OUTLINE)
    pen.ellipse(-15, -13, 2.6, 2.6, tones.lit((255, 190, 40)))


def _front_spikes(pen: Pen, tones: _Tones, flutter: float) -> None:
    drift = -3 * flutter
    spikes = [
        (-22, 8),
        (-34 + drift, 6),
        (-23, -4),
        (-35 + drift, -14),
        (-19, -13),
        (-22 + drift, -30),
        (-8, -19),
        (0 + drift, -35),
        (8, -19),
        (20 + drift, -29),
        (18, -11),
        (27, -12),
        (21, 2),
        (16, -3),
        (10, 4),
        (6, -4),
        (-2, 3),
        (-6, -3),
        (-13, 5),
        (-16, 0),
        (-19, 12),
    ]
    pen.polygon(spikes, tones.hair, OUTLINE)
    pen.line(arc(-2, -4, 13, 10, 215, 285), 3.0, lighter(tones.hair, 0.5))


def _front_buns(pen: Pen, tones: _Tones, flutter: float) -> None:
    _fringe(pen, tones, [(-22, 12), (-17, 4), (-10, 0), (-1, -6), (6, -2), (14, 1), (21, 9)])


def _behind_buns(pen: Pen, tones: _Tones, flutter: float) -> None:
    for side in (-1, 1):
        pen.ellipse(side * 19, -19 + side * flutter, 11, 11, tones.hair, OUTLINE)
        pen.ellipse(side * 19 - 2, -22 + side * flutter, 4, 3.4, lighter(tones.hair))


def _front_flat(pen: Pen, tones: _Tones, flutter: float) -> None:
    pen.polygon(
        [
            (-23, 6),
            (-23, -12),
            (-20, -29),
            (-10, -26),
            (-4, -31),
            (6, -27),
            (13, -31),
            (22, -26),
            (22, -8),
            (20, -6),
            (-14, -8),
            (-17, 7),
        ],
        tones.hair,
        OUTLINE,
    )
    beard = [
        (-19, 8),
        (-14, 11),
        (-3, 10),
        (0, 18),
        (14, 18),
        (16, 10),
        (21, 8),
        (19, 19),
        (9, 26),
        (-6, 25),
        (-16, 18),
    ]
    pen.polygon(beard, tones.hair)
    pen.line([(-6, -5.5), (3, -4)], 2.6, INK)
    pen.line([(10, -4), (19, -5.5)], 2.6, INK)


_BACK = {"tails": _back_tails, "long": _back_long, "buns": _behind_buns}
_FRONT = {
    "cap": _front_cap,
    "tails": _front_tails,
    "long": _front_long,
    "spikes": _front_spikes,
    "buns": _front_buns,
    "flat": _front_flat,
}


def _blank(scale: float) -> tuple[np.ndarray, Pen]:
    size = (round(SPRITE_HEIGHT * scale), round(SPRITE_WIDTH * scale), 4)
    image = np.zeros(size, np.uint8)
    return image, Pen(image, scale, (-CENTRE[0], -CENTRE[1]))


def _trim(image: np.ndarray, scale: float, facing: int) -> tuple[np.ndarray, tuple[float, float]]:
    """Cuts off the empty margin; returns the sprite and the head centre inside it."""
    pivot_x, pivot_y = CENTRE[0] * scale - 0.5, CENTRE[1] * scale - 0.5
    if facing < 0:
        image, pivot_x = image[:, ::-1], image.shape[1] - 1 - pivot_x
    rows = np.flatnonzero(image[..., 3].any(1))
    columns = np.flatnonzero(image[..., 3].any(0))
    top, left = rows[0], columns[0]
    cut = image[top : rows[-1] + 1, left : columns[-1] + 1]
    return np.ascontiguousarray(premultiply(cut)), (pivot_x - left, pivot_y - top)


@lru_cache(maxsize=4096)
def _head_sprite(
    name: str, time: str, eyes: str, mouth: str, flutter: int, facing: int, scale: float
) -> tuple[np.ndarray, tuple[float, float]]:
    look = LOOKS[name]
    tones = _Tones(look, time)
    image, pen = _blank(scale)
    _skull(pen, tones)
    _face(pen, tones, eyes, mouth)
    _FRONT[look.hair_style](pen, tones, flutter / 2)
    if look.hair_style == "flat" and mouth != "smile":
        pen.ellipse(7, 15.0, 4.0, 3.4, tones.lit((110, 20, 30)))
    return _trim(image, scale, facing)


@lru_cache(maxsize=1024)
def _hair_sprite(
    name: str, time: str, flutter: int, facing: int, scale: float
) -> tuple[np.ndarray, tuple[float, float]]:
    look = LOOKS[name]
    image, pen = _blank(scale)
    _BACK[look.hair_style](pen, _Tones(look, time), flutter / 2)
    return _trim(image, scale, facing)


def _flutter_step(flutter: float) -> int:
    return int(np.clip(round(flutter * 2), -2, 4))


def draw_back_hair(
    pen: Pen,
    name: str,
    time: str,
    at: tuple[float, float],
    angle: float,
    facing: int,
    flutter: float,
) -> None:
    """Draws what hangs behind the body (nothing for short hair)."""
    if LOOKS[name].hair_style in _BACK:
        sprite, pivot = _hair_sprite(name, time, _flutter_step(flutter), facing, pen.scale)
        paste(pen.image, sprite, *pen.pixels(at), angle, pivot)


def draw_head(
    pen: Pen,
    name: str,
    time: str,
    at: tuple[float, float],
    angle: float,
    facing: int,
    eyes: str = "open",
    mouth: str = "smile",
    flutter: float = 0.0,
) -> None:
    """Draws a head with its centre at ``at``.

    Args:
        pen: Where to draw.
        name: Character.
        time: day, evening or night.
        at: Scene position of the head's centre.
        angle: Turn in radians, clockwise on screen.
        facing: 1 looks right, -1 left.
        eyes: One of ``EYES``.
        mouth: One of ``MOUTHS``.
        flutter: How far the wind blows the hair back, about -1 to 2.
    """
    sprite, pivot = _head_sprite(name, time, eyes, mouth, _flutter_step(flutter), facing, pen.scale)
    paste(pen.image, sprite, *pen.pixels(at), angle, pivot)
