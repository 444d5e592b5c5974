"""What characters hold, sit on or ride: book, rice ball, stool, kite, car, speech bubble, note."""

from __future__ import annotations

import math

from data_pipeline.builtin_world.bodies import Figure
from data_pipeline.builtin_world.canvas import (
    INK,
    OUTLINE,
    Color,
    Pen,
    character_light,
    darker,
    lighter,
    mix,
)

_WHITE: Color = (255, 252, 244)
_WOOD: Color = (168, 108, 62)


def draw_behind(pen: Pen, motion: str, figure: Figure, vehicle: Color) -> None:
    """Draws the parts of a motion's prop that lie behind the figure."""

    def tone(color: Color) -> Color:
        return character_light(color, figure.time)

    if motion == "sit":
        seat = [figure.place(p) for p in ((-21, -16), (8, -16), (11, 1), (-24, 1))]
        pen.polygon(seat, tone(_WOOD), OUTLINE)
        pen.line([figure.place((-20, -12)), figure.place((7, -12))], 5, tone(lighter(_WOOD)))
    elif motion == "lie down":
        x, y = figure.from_neck((-4, 0))
        far = x + figure.facing * 74
        near = x - figure.facing * 30
        pen.rectangle(
            min(near, far), y + 12, max(near, far), y + 23, tone((120, 196, 236)), OUTLINE
        )
        pen.ellipse(x - figure.facing * 16, y + 14, 20, 9, tone((255, 255, 255)), OUTLINE)
    elif motion == "fly":
        _draw_kite(pen, figure, tone(vehicle))
    elif motion == "drive":
        seat = [figure.place(p) for p in ((-26, -32), (-16, -34), (-12, -2), (-26, -2))]
        pen.polygon(seat, tone((70, 60, 70)), OUTLINE)


def draw_front(pen: Pen, motion: str, figure: Figure, vehicle: Color) -> None:
    """Draws the parts of a motion's prop that lie before the figure but under its front arm."""

    def tone(color: Color) -> Color:
        return character_light(color, figure.time)

    if motion == "read":
        _draw_book(pen, figure, tone)
    elif motion == "drive":
        _draw_car(pen, figure, tone(vehicle), tone)


def draw_in_hand(pen: Pen, motion: str, figure: Figure) -> None:
    """Draws what lies over the hands: the rice ball."""
    if motion != "eat":
        return
    x, y = figure.from_neck(figure.pose.hand_front)
    x -= figure.facing * 3
    white, weed = (character_light(c, figure.time) for c in (_WHITE, (30, 64, 44)))
    pen.polygon(
        [
            (x - 3, y - 14),
            (x + 3, y - 14),
            (x + 12, y + 2),
            (x + 10, y + 5),
            (x - 10, y + 5),
            (x - 12, y + 2),
        ],
        white,
        OUTLINE,
    )
    pen.rectangle(x - 5, y - 4, x + 5, y + 5, weed)


def draw_sign(pen: Pen, motion: str, figure: Figure) -> None:
    """Draws what hangs in the air over everything: speech bubble and music note."""
    if motion == "talk" and figure.pose.prop:
        _draw_bubble(pen, figure)
    elif motion == "dance":
        _draw_note(pen, figure)


def _draw_book(pen: Pen, figure: Figure, tone) -> None:
    cx, cy = 17.0, 10.0

    def at(u: float, v: float) -> tuple[float, float]:
        return figure.from_neck((cx + u, cy + v))

    pen.polygon(
        [at(-19, -9), at(0, -5), at(19, -9), at(19, 9), at(0, 13), at(-19, 9)],
        tone((150, 46, 120)),
        OUTLINE,
    )
    pen.polygon([at(-16, -9), at(0, -5), at(0, 9), at(-16, 5)], tone(_WHITE))
    pen.polygon([at(16, -9), at(0, -5), at(0, 9), at(16, 5)], tone((236, 230, 220)))
    turn = math.cos(2 * math.pi * figure.pose.prop)
    pen.polygon(
        [
            at(0, -5),
            at(16 * turn, -12 - 5 * (1 - abs(turn))),
            at(16 * turn, 3 - 5 * (1 - abs(turn))),
            at(0, 9),
        ],
        tone(_WHITE),
        1.0,
    )


def _draw_kite(pen: Pen, figure: Figure, color: Color) -> None:
    glide = figure.pose.prop
    nose, left, tail, right = ((46, -4), (2, -16), (-46, 0), (2, 17))
    streamer = [(-46, 0), (-56, 8 + 4 * glide), (-66, 2 - 4 * glide), (-76, 10 + 4 * glide)]
    pen.line([figure.place(p) for p in streamer], 3.4, INK)
    for u, v in streamer[1:]:
        pen.ellipse(*figure.place((u, v)), 4.6, 4.6, lighter(color, 0.25), OUTLINE)
    pen.polygon([figure.place(p) for p in (nose, left, tail, right)], color, OUTLINE + 0.6)
    pen.polygon([figure.place(p) for p in (nose, (2, 0), right)], darker(color, 0.18))
    pen.polygon([figure.place(p) for p in (tail, (2, 0), left)], lighter(color, 0.3))
    pen.line([figure.place(nose), figure.place(tail)], 2.4, INK)
    pen.line([figure.place(left), figure.place(right)], 2.4, INK)


def _draw_car(pen: Pen, figure: Figure, color: Color, tone) -> None:
    at = figure.place
    body = [
        (-44, -18),
        (-38, -22),
        (14, -22),
        (20, -20),
        (44, -14),
        (47, -4),
        (46, 8),
        (-46, 8),
        (-47, -8),
    ]
    pen.line([at((20, -21)), at((27, -37))], 3.6, tone((226, 244, 255)), OUTLINE * 0.7)
    pen.polygon([at(p) for p in body], color, OUTLINE + 0.4)
    pen.polygon([at(p) for p in ((-44, -2), (46, -2), (45, 6), (-45, 6))], darker(color, 0.22))
    pen.line([at((-36, -17)), at((12, -17))], 3.4, lighter(color, 0.5))
    pen.ellipse(*at((42, -8)), 4.4, 4.4, (255, 244, 170), OUTLINE * 0.7)
    for u in (-26, 27):
        x, y = at((u, 8))
        pen.ellipse(x, y, 10.5, 10.5, (44, 38, 50), OUTLINE * 0.5)
        pen.ellipse(x, y, 5.5, 5.5, tone((214, 214, 224)))
        a = figure.facing * figure.pose.prop * 1.5
        pen.line(
            [
                (x - 5 * math.cos(a), y - 5 * math.sin(a)),
                (x + 5 * math.cos(a), y + 5 * math.sin(a)),
            ],
            2.6,
            (44, 38, 50),
        )


def _draw_bubble(pen: Pen, figure: Figure) -> None:
    mouth_x, mouth_y = figure.from_neck((29, -17))
    x, y = mouth_x + figure.facing * 12, mouth_y - 34
    pen.polygon(
        [(x - 6, y + 6), (x + 6, y + 6), (mouth_x + figure.facing * 1, mouth_y - 8)],
        _WHITE,
        OUTLINE,
    )
    pen.ellipse(x, y, 17, 11, _WHITE, OUTLINE)
    pen.rectangle(x - 6, y + 5, x + 6, y + 8, _WHITE)
    for offset in (-8, 0, 8):
        pen.ellipse(x + offset, y, 2.4, 2.4, INK)


def _draw_note(pen: Pen, figure: Figure) -> None:
    x, y = figure.from_neck((36, -50))
    y += 5 * math.copysign(1, figure.pose.lean) * abs(figure.pose.lean) / 0.16
    color = mix((255, 90, 160), _WHITE, 0.1)
    pen.line([(x + 4, y), (x + 4, y - 16), (x + 12, y - 12)], 3.4, color, 1.6)
    pen.ellipse(x, y, 5.5, 4.2, color, 1.6)
