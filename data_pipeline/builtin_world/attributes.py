"""Hidden attributes of a game: scarves, the vehicles' colour, the landmark; and how they look.

They are fixed for a whole game and no instruction ever names them: only a player, or a model, that
remembers earlier shots can keep them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from data_pipeline.builtin_world.canvas import OUTLINE, Color, Pen, darker, scenery_light

SCARVES: dict[str, Color | None] = {
    "none": None,
    "red": (226, 38, 44),
    "green": (34, 168, 66),
    "blue": (40, 92, 232),
    "yellow": (255, 214, 30),
}
LANDMARKS: tuple[str, ...] = ("none", "windmill", "balloon", "lighthouse", "comet")
_PLAIN_VEHICLE: Color = (220, 220, 228)

LANDMARK_SPOT = (172.0, 23.0)  # centre of the landmark on a frame 192 units wide


@dataclass(frozen=True)
class Attributes:
    """The hidden attributes of one game.

    Attributes:
        scarves: Scarf colour of each hero; characters not in it never wear one.
        vehicle: Colour of car and kite, by the world's rule the first hero's scarf colour.
        landmark: One of ``LANDMARKS``.
    """

    scarves: dict[str, str] = field(default_factory=dict)
    vehicle: str = "none"
    landmark: str = "none"

    def scarf_color(self, character: str) -> Color | None:
        """RGB of a character's scarf, None without one."""
        return SCARVES[self.scarves.get(character, "none")]

    def vehicle_color(self) -> Color:
        """RGB of car and kite."""
        return SCARVES[self.vehicle] or _PLAIN_VEHICLE


def draw_landmark(
    pen: Pen, landmark: str, x: float, y: float, time: str, ground: Color | None
) -> None:
    """Draws a landmark about 34 units high.

    Args:
        pen: Where to draw.
        landmark: One of ``LANDMARKS``.
        x: Centre.
        y: Centre, downwards.
        time: day, evening or night.
        ground: Colour of the knoll under windmill and lighthouse; None for no knoll.
    """
    if landmark in ("windmill", "lighthouse") and ground is not None:
        _draw_knoll(pen, x, y, ground)
    if landmark == "windmill":
        _draw_windmill(pen, x, y, time)
    elif landmark == "balloon":
        _draw_balloon(pen, x, y, time)
    elif landmark == "lighthouse":
        _draw_lighthouse(pen, x, y, time)
    elif landmark == "comet":
        _draw_comet(pen, x, y)


def _tone(time: str, color: Color) -> Color:
    return darker(color, 0.25) if time == "night" else scenery_light(color, time)


def _draw_knoll(pen: Pen, x: float, y: float, ground: Color) -> None:
    pen.polygon(
        [
            (x - 40, y + 70),
            (x - 20, y + 19),
            (x - 6, y + 14),
            (x + 10, y + 14),
            (x + 30, y + 24),
            (x + 44, y + 70),
        ],
        ground,
    )


def _draw_windmill(pen: Pen, x: float, y: float, time: str) -> None:
    pen.polygon(
        [(x - 5, y - 4), (x + 5, y - 4), (x + 9, y + 17), (x - 9, y + 17)],
        _tone(time, (250, 244, 232)),
        OUTLINE,
    )
    pen.polygon([(x - 8, y - 3), (x + 8, y - 3), (x, y - 11)], _tone(time, (206, 74, 50)), OUTLINE)
    for quarter in range(4):
        angle = math.radians(45 + 90 * quarter)
        ax, ay = math.cos(angle), math.sin(angle)
        pen.polygon(
            [
                (x, y - 3),
                (x + 17 * ax - 4 * ay, y - 3 + 17 * ay + 4 * ax),
                (x + 17 * ax + 4 * ay, y - 3 + 17 * ay - 4 * ax),
            ],
            _tone(time, (255, 236, 170)),
            OUTLINE * 0.7,
        )


def _draw_balloon(pen: Pen, x: float, y: float, time: str) -> None:
    pen.line([(x - 7, y + 4), (x - 4, y + 13)], 2.0, _tone(time, (90, 60, 50)))
    pen.line([(x + 7, y + 4), (x + 4, y + 13)], 2.0, _tone(time, (90, 60, 50)))
    pen.ellipse(x, y - 4, 14, 14, _tone(time, (255, 96, 170)), OUTLINE)
    pen.ellipse(x, y - 4, 5, 14, _tone(time, (255, 236, 240)))
    pen.rectangle(x - 5, y + 12, x + 5, y + 18, _tone(time, (160, 100, 56)), OUTLINE)


def _draw_lighthouse(pen: Pen, x: float, y: float, time: str) -> None:
    pen.polygon(
        [(x - 5, y - 8), (x + 5, y - 8), (x + 8, y + 17), (x - 8, y + 17)],
        _tone(time, (252, 252, 252)),
        OUTLINE,
    )
    for top in (-3, 8):
        pen.polygon(
            [(x - 6, y + top), (x + 6, y + top), (x + 7, y + top + 5), (x - 7, y + top + 5)],
            _tone(time, (224, 50, 50)),
        )
    pen.polygon([(x - 5, y - 12), (x - 22, y - 17), (x - 22, y - 7)], (255, 246, 150))
    pen.rectangle(x - 6, y - 15, x + 6, y - 8, (255, 240, 120), OUTLINE)
    pen.polygon(
        [(x - 8, y - 15), (x + 8, y - 15), (x, y - 21)], _tone(time, (224, 50, 50)), OUTLINE
    )


def _draw_comet(pen: Pen, x: float, y: float) -> None:
    for offset, color in ((0, (255, 190, 90)), (4, (255, 226, 150))):
        pen.polygon(
            [
                (x - 12, y + 8 - offset),
                (x - 2, y + 14 - offset),
                (x + 20 - offset, y - 17 + offset),
            ],
            color,
        )
    points = []
    for spike in range(10):
        radius = 11.5 if spike % 2 == 0 else 5.5
        angle = math.radians(36 * spike - 90)
        points.append((x - 7 + radius * math.cos(angle), y + 8 + radius * math.sin(angle)))
    pen.polygon(points, (255, 244, 120), OUTLINE)
