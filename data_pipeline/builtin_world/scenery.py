"""What stands in the eight places: hills, trees, houses, painted in one fixed layout each.

Every layout repeats after ``PERIOD`` units, so that it can scroll for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from data_pipeline.builtin_world.canvas import (
    OUTLINE,
    SCENE_HEIGHT,
    Color,
    Pen,
    arc,
    darker,
    lighter,
    mix,
    scenery_light,
)

PERIOD = 256
MARGIN = 14.0  # scenery drawn beyond the frame on every side, for camera movements

SKIES: dict[str, tuple[Color, Color]] = {
    "day": ((84, 178, 250), (206, 238, 255)),
    "evening": ((236, 104, 128), (255, 204, 120)),
    "night": ((14, 18, 62), (54, 62, 132)),
}


class Brush(Pen):
    """A pen for one periodic layer: colours get the light of the hour, shapes repeat."""

    def __init__(self, image: np.ndarray, scale: float, time: str) -> None:
        super().__init__(image, scale, (0.0, -MARGIN))
        self.time = time

    def tone(self, color: Color) -> Color:
        """``color`` in this brush's light."""
        return scenery_light(color, self.time)

    def lamp(self, color: Color) -> Color:
        """A window: glowing unless it is day."""
        return self.tone(color) if self.time == "day" else (255, 222, 110)

    def repeat(self, shape: Callable[[float], None]) -> None:
        """Draws ``shape(shift)`` at every repetition that may touch the layer."""
        for shift in (-PERIOD, 0, PERIOD):
            shape(float(shift))


def _ridge(brush: Brush, y: float, height: float, color: Color, start: float) -> None:
    turn = 2 * math.pi / PERIOD
    points = [
        (
            float(x),
            y
            + height * math.sin(2 * turn * x + start)
            + 0.4 * height * math.sin(5 * turn * x + 2 * start),
        )
        for x in range(-8, PERIOD + 9, 4)
    ]
    bottom = SCENE_HEIGHT + 2 * MARGIN
    brush.polygon([*points, (PERIOD + 8, bottom), (-8, bottom)], brush.tone(color))


def _ground(brush: Brush, top: float, color: Color) -> None:
    brush.rectangle(-4, top, PERIOD + 4, SCENE_HEIGHT + 2 * MARGIN, brush.tone(color))


def _tree(brush: Brush, x: float, y: float, size: float, color: Color) -> None:
    def draw(shift: float) -> None:
        cx = x + shift
        brush.rectangle(
            cx - 4 * size, y - 20 * size, cx + 4 * size, y, brush.tone((128, 84, 56)), OUTLINE * 0.6
        )
        for dx, dy, r in ((-11, -27, 12), (11, -27, 12), (0, -37, 15)):
            brush.ellipse(
                cx + dx * size, y + dy * size, r * size, r * size, brush.tone(color), OUTLINE * 0.6
            )
        brush.ellipse(cx, y - 30 * size, 13 * size, 11 * size, brush.tone(color))
        brush.ellipse(
            cx - 3 * size, y - 40 * size, 8 * size, 6 * size, brush.tone(lighter(color, 0.22))
        )

    brush.repeat(draw)


def _pine(brush: Brush, x: float, y: float, size: float, color: Color, snow: bool) -> None:
    def draw(shift: float) -> None:
        cx = x + shift
        brush.rectangle(cx - 3 * size, y - 8 * size, cx + 3 * size, y, brush.tone((112, 78, 58)))
        for step in range(3):
            base, wide = y - 6 * size - 12 * size * step, (17 - 4 * step) * size
            tip = base - 18 * size
            brush.polygon(
                [(cx - wide, base), (cx + wide, base), (cx, tip)], brush.tone(color), OUTLINE * 0.5
            )
            if snow:
                brush.polygon(
                    [
                        (cx - wide * 0.5, base - 9 * size),
                        (cx + wide * 0.5, base - 9 * size),
                        (cx, tip),
                    ],
                    brush.tone((250, 252, 255)),
                )

    brush.repeat(draw)


def _dots(brush: Brush, spots: list[tuple[float, float]], colors: list[Color], size: float) -> None:
    for index, (x, y) in enumerate(spots):
        color = brush.tone(colors[index % len(colors)])
        brush.repeat(
            lambda shift, x=x, y=y, c=color: brush.ellipse(x + shift, y, size, size * 0.8, c)
        )


def _scatter(count: int, top: float, bottom: float) -> list[tuple[float, float]]:
    """Evenly strewn fixed spots (a golden-ratio sequence)."""
    return [
        ((index * 0.618034 % 1.0) * PERIOD, top + (index * 0.754878 % 1.0) * (bottom - top))
        for index in range(count)
    ]


def _meadow(far: Brush, near: Brush) -> None:
    _ridge(far, 76, 8, (136, 206, 140), 0.5)
    _ridge(far, 86, 5, (110, 190, 110), 2.5)
    _tree(near, 14, 102, 0.9, (70, 172, 84))
    _tree(near, 222, 102, 1.0, (86, 182, 84))
    _ground(near, 97, (142, 214, 88))
    _dots(near, _scatter(26, 102, 136), [(255, 92, 140), (255, 255, 255), (255, 216, 60)], 3.4)


def _forest(far: Brush, near: Brush) -> None:
    _ground(far, 62, (40, 98, 74))
    for index in range(8):
        _tree(far, 16 + 32 * index, 100, 1.1, (38, 112, 74))
    for index, x in enumerate((4, 96, 192)):
        _tree(near, x, 106, 1.25, ((58, 150, 70), (74, 160, 62), (52, 140, 76))[index])
    _ground(near, 101, (96, 132, 62))
    near.rectangle(-4, 111, PERIOD + 4, 124, near.tone((178, 140, 92)))
    _dots(near, _scatter(16, 127, 138), [(226, 60, 50), (74, 112, 52)], 3.4)
    _dots(near, _scatter(9, 113, 122), [(150, 112, 72)], 3.0)


def _beach(far: Brush, near: Brush) -> None:
    far.rectangle(-4, 64, PERIOD + 4, 150, far.tone((36, 138, 220)))
    far.rectangle(-4, 80, PERIOD + 4, 150, far.tone((70, 186, 234)))
    for x, y in _scatter(14, 68, 92):
        far.repeat(
            lambda shift, x=x, y=y: far.line(
                [(x + shift, y), (x + shift + 9, y)], 2.4, far.tone((214, 244, 255))
            )
        )
    _ridge(near, 97, 2.0, (255, 255, 255), 0.0)
    _ridge(near, 101, 2.0, (252, 222, 150), 0.0)

    def palm(shift: float) -> None:
        x = 12 + shift
        near.line(
            [(x - 4, 110), (x, 84), (x + 6, 56)], 5.5, near.tone((150, 104, 66)), OUTLINE * 0.5
        )
        for dx, dy in ((-24, -2), (-18, -14), (2, -20), (22, -12), (26, 2)):
            near.line(
                [(x + 6, 56), (x + 6 + dx * 0.6, 50 + dy * 0.7), (x + 6 + dx, 60 + dy * 0.5)],
                6.5,
                near.tone((48, 168, 80)),
            )

    near.repeat(palm)

    def parasol(shift: float) -> None:
        x = 178 + shift
        near.line([(x, 112), (x, 78)], 3.6, near.tone((240, 240, 240)), 1.2)
        near.polygon(arc(x, 86, 24, 18, 180, 360, 13), near.tone((255, 110, 90)), OUTLINE * 0.8)
        near.polygon(arc(x, 86, 9, 18, 180, 360, 9), near.tone((255, 250, 240)))

    near.repeat(parasol)
    _dots(near, _scatter(14, 108, 138), [(255, 240, 206), (232, 180, 120)], 3.0)


def _town(far: Brush, near: Brush) -> None:
    walls = ((255, 214, 150), (240, 150, 130), (170, 206, 234), (250, 240, 206), (206, 180, 230))
    roofs = ((200, 70, 60), (84, 98, 160), (150, 90, 70), (70, 130, 120), (180, 70, 110))
    heights = (36, 48, 40, 44, 34, 38, 32)
    wide = PERIOD / len(heights)
    for index, height in enumerate(heights):
        left, top = index * wide, 96 - height
        wall, roof = walls[index % 5], roofs[(index * 3) % 5]

        def house(shift: float, left=left, top=top, wall=wall, roof=roof) -> None:
            x0, x1 = left + shift + 1, left + shift + wide - 1
            far.rectangle(x0, top, x1, 104, far.tone(wall), OUTLINE * 0.5)
            far.polygon(
                [(x0 - 3, top), (x1 + 3, top), ((x0 + x1) / 2, top - 17)],
                far.tone(roof),
                OUTLINE * 0.5,
            )
            for wx in (x0 + 9, x1 - 9):
                for wy in (top + 10, top + 26):
                    far.rectangle(wx - 4.5, wy - 5, wx + 4.5, wy + 5, far.lamp((96, 146, 190)))

        far.repeat(house)
    _ground(near, 97, (214, 200, 186))
    near.rectangle(-4, 107, PERIOD + 4, 150, near.tone((124, 124, 142)))
    for index in range(8):
        near.rectangle(index * 32, 127, index * 32 + 17, 131, near.tone((250, 248, 230)))
        near.rectangle(index * 32, 99, index * 32 + 2.6, 107, near.tone((170, 156, 146)))
    for x in (4, 188):

        def lamp(shift: float, x=x) -> None:
            near.line([(x + shift, 108), (x + shift, 62)], 3.6, near.tone((66, 66, 84)))
            near.ellipse(x + shift, 59, 6, 6, near.lamp((250, 246, 226)), OUTLINE)

        near.repeat(lamp)


def _room(far: Brush, near: Brush) -> None:
    wall = {"day": (250, 224, 184), "evening": (246, 178, 128), "night": (96, 82, 138)}[far.time]
    far.rectangle(-4, -20, PERIOD + 4, 150, wall)
    for index in range(8):
        far.rectangle(index * 32, -20, index * 32 + 13, 150, lighter(wall, 0.14))
    sky, low = SKIES[far.time]
    for x in (22, 216):

        def window(shift: float, x=x) -> None:
            cx = x + shift
            far.rectangle(cx - 19, 22, cx + 19, 66, far.tone((255, 255, 255)), OUTLINE)
            far.rectangle(cx - 15, 26, cx + 15, 62, mix(sky, low, 0.4))
            if far.time == "night":
                far.ellipse(cx + 5, 36, 6, 6, (255, 246, 196))
            far.rectangle(cx - 1.8, 26, cx + 1.8, 62, far.tone((255, 255, 255)))
            for side in (-1, 1):
                far.polygon(
                    [
                        (cx + side * 25, 16),
                        (cx + side * 9, 16),
                        (cx + side * 21, 70),
                        (cx + side * 26, 70),
                    ],
                    far.tone((230, 84, 96)),
                    OUTLINE * 0.5,
                )

        far.repeat(window)

    def shelf(shift: float) -> None:
        left, right = 76 + shift, 120 + shift
        far.rectangle(left, 44, right, 104, far.tone((150, 98, 66)), OUTLINE)
        for row in range(3):
            top = 48 + 17 * row
            far.rectangle(left + 4, top, right - 4, top + 14, far.tone((92, 58, 46)))
            for book in range(6):
                x = left + 5 + 5.8 * book
                color = ((220, 70, 70), (70, 130, 210), (244, 200, 80), (90, 170, 110))
                far.rectangle(
                    x,
                    top + (2 if (book + row) % 3 else 0),
                    x + 4.6,
                    top + 14,
                    far.tone(color[(book + row) % 4]),
                )

    far.repeat(shelf)
    _ground(near, 99, (206, 146, 94))
    near.rectangle(-4, 96, PERIOD + 4, 100, near.tone((140, 92, 62)))
    for row, top in enumerate((100, 110, 121, 133)):
        near.rectangle(-4, top, PERIOD + 4, top + 2, near.tone((168, 112, 72)))
        for index in range(4):
            x = index * 64 + 32 * (row % 2)
            near.rectangle(x, top, x + 2.6, top + 12, near.tone((168, 112, 72)))


def _mountain(far: Brush, near: Brush) -> None:
    for x, top, wide, color in (
        (96, 16, 78, (124, 132, 190)),
        (10, 38, 58, (150, 156, 206)),
        (196, 52, 54, (140, 148, 202)),
    ):

        def peak(shift: float, x=x, top=top, wide=wide, color=color) -> None:
            cx = x + shift
            far.polygon(
                [(cx - wide, 106), (cx, top), (cx + wide, 106)], far.tone(color), OUTLINE * 0.5
            )
            far.polygon(
                [(cx, top), (cx + wide, 106), (cx + wide * 0.2, 106), (cx + 6, top + 30)],
                far.tone(darker(color, 0.15)),
            )
            cap = wide / (106 - top) * 24
            far.polygon(
                [
                    (cx, top),
                    (cx + cap, top + 24),
                    (cx + cap * 0.4, top + 18),
                    (cx, top + 27),
                    (cx - cap * 0.4, top + 18),
                    (cx - cap, top + 24),
                ],
                far.tone((250, 252, 255)),
            )

        far.repeat(peak)
    _pine(near, 10, 102, 0.8, (46, 112, 84), False)
    _pine(near, 186, 103, 0.9, (52, 120, 88), False)
    _pine(near, 226, 102, 0.7, (46, 112, 84), False)
    _ground(near, 98, (168, 178, 104))
    _dots(near, _scatter(16, 104, 138), [(128, 128, 132), (138, 150, 80), (184, 180, 176)], 4.0)


def _snow_field(far: Brush, near: Brush) -> None:
    _ridge(far, 72, 8, (200, 220, 242), 0.4)
    _ridge(far, 84, 5, (222, 234, 250), 2.0)
    for x, size in ((12, 1.0), (104, 0.8), (182, 0.95), (228, 0.8)):
        _pine(near, x, 101, size, (64, 132, 138), True)
    _ground(near, 96, (244, 248, 255))

    def snowman(shift: float) -> None:
        x = 150 + shift
        near.ellipse(x, 95, 12, 11, near.tone((255, 255, 255)), OUTLINE * 0.8)
        near.ellipse(x, 78, 8.5, 8, near.tone((255, 255, 255)), OUTLINE * 0.8)
        near.line([(x - 2, 79), (x - 10, 81)], 3.4, near.tone((255, 140, 40)))
        near.ellipse(x - 3, 75, 1.8, 1.8, (40, 36, 50))
        near.rectangle(x - 7, 62, x + 7, 71, near.tone((70, 74, 110)), OUTLINE * 0.6)

    near.repeat(snowman)
    _dots(near, _scatter(16, 102, 138), [(196, 214, 240), (214, 228, 248)], 4.6)


def _castle(far: Brush, near: Brush) -> None:
    _ridge(far, 80, 6, (120, 186, 130), 0.7)
    stone, roof = (226, 220, 238), (108, 84, 190)

    def castle(shift: float) -> None:
        cx = 96 + shift
        for dx, top, wide in ((-42, 42, 10), (42, 42, 10), (-17, 24, 9), (17, 24, 9)):
            far.rectangle(
                cx + dx - wide,
                top,
                cx + dx + wide,
                104,
                far.tone(darker(stone, 0.08)),
                OUTLINE * 0.6,
            )
            far.polygon(
                [(cx + dx - wide - 3, top), (cx + dx + wide + 3, top), (cx + dx, top - 22)],
                far.tone(roof),
                OUTLINE * 0.6,
            )
            far.rectangle(cx + dx - 3, top + 7, cx + dx + 3, top + 17, far.lamp((92, 88, 140)))
        far.rectangle(cx - 48, 66, cx + 48, 104, far.tone(stone), OUTLINE * 0.6)
        for index in range(7):
            left = cx - 48 + index * 14.4
            far.rectangle(left, 59, left + 9, 67, far.tone(stone), OUTLINE * 0.5)
        far.polygon(
            [*arc(cx, 88, 11, 14, 180, 360, 9), (cx + 11, 104), (cx - 11, 104)],
            far.tone((116, 72, 60)),
            OUTLINE * 0.6,
        )

    far.repeat(castle)
    _ground(near, 97, (132, 196, 104))
    near.repeat(
        lambda shift: near.polygon(
            [(88 + shift, 97), (104 + shift, 97), (150 + shift, 150), (42 + shift, 150)],
            near.tone((236, 214, 166)),
        )
    )
    for x in (8, 182, 214):
        near.repeat(
            lambda shift, x=x: near.ellipse(
                x + shift, 99, 13, 10, near.tone((70, 150, 80)), OUTLINE * 0.5
            )
        )
    _dots(near, _scatter(14, 104, 138), [(255, 255, 255), (255, 120, 160)], 3.2)


PAINTERS: dict[str, Callable[[Brush, Brush], None]] = {
    "meadow": _meadow,
    "forest": _forest,
    "beach": _beach,
    "town": _town,
    "room": _room,
    "mountain": _mountain,
    "snow field": _snow_field,
    "castle": _castle,
}
KNOLLS: dict[str, Color] = {
    "meadow": (120, 190, 126),
    "forest": (74, 132, 92),
    "beach": (150, 140, 130),
    "town": (140, 170, 130),
    "mountain": (140, 160, 130),
    "snow field": (206, 222, 242),
    "castle": (120, 180, 130),
}
