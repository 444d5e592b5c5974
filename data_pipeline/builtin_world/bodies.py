"""A posed figure: limbs, clothes and scarf around the head sprite."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_pipeline.builtin_world.canvas import (
    OUTLINE,
    Color,
    Pen,
    Point,
    character_light,
    darker,
)
from data_pipeline.builtin_world.heads import draw_back_hair, draw_head
from data_pipeline.builtin_world.looks import LOOKS, Look

HIP_HEIGHT = 19.0
TORSO = 22.0
NECK_TO_HEAD = 23.0
ARM_WIDTH, LEG_WIDTH = 7.5, 8.5


@dataclass
class Pose:
    """Where a figure's parts are, in scene units, x towards where it looks, y downwards.

    Attributes:
        slide: Shift of the whole figure forwards.
        lift: Height of the whole figure above the ground.
        turn: Rotation of the whole figure about its hip, clockwise radians when facing right.
        hip: Hip relative to the ground point.
        lean: Forward lean of torso and head in radians.
        nod: Extra tilt of the head in radians.
        hand_front: Hand nearer to the viewer, relative to the neck.
        hand_back: The other hand, relative to the neck.
        foot_front: Foot nearer to the viewer, relative to the ground point.
        foot_back: The other foot.
        elbow: How far the front elbow bends out, to the left of shoulder-to-hand.
        elbow_back: The same for the other arm; None for the same value.
        knee: How far both knees bend out, forwards positive.
        eyes: "open", "closed" or "down".
        mouth: 0 smiling to 1 wide open.
        flutter: How far hair, cape and scarf blow back.
        prop: Free number a motion hands to its prop (page angle, bite, wheel turn).
    """

    slide: float = 0.0
    lift: float = 0.0
    turn: float = 0.0
    hip: Point = (0.0, -HIP_HEIGHT)
    lean: float = 0.0
    nod: float = 0.0
    hand_front: Point = (13.0, 19.0)
    hand_back: Point = (-13.0, 19.0)
    foot_front: Point = (5.0, 0.0)
    foot_back: Point = (-5.0, 0.0)
    elbow: float = 3.0
    elbow_back: float | None = None
    knee: float = 2.0
    eyes: str = "open"
    mouth: float = 0.0
    flutter: float = 0.0
    prop: float = 0.0


class Figure:
    """One character in one pose at one spot, ready to be drawn part by part.

    Args:
        name: Character.
        pose: The pose.
        x: Scene position of the ground point.
        y: The same, downwards.
        facing: 1 looks right, -1 left.
        time: day, evening or night.
        scarf: Scarf colour or None.
    """

    def __init__(
        self,
        name: str,
        pose: Pose,
        x: float,
        y: float,
        facing: int,
        time: str,
        scarf: Color | None = None,
    ) -> None:
        self.name, self.pose, self.facing, self.time = name, pose, facing, time
        self._look: Look = LOOKS[name]
        self._ground = (x + facing * pose.slide, y - pose.lift)
        self._scarf = scarf
        lean_x, lean_y = math.sin(pose.lean), -math.cos(pose.lean)
        self._hip = pose.hip
        self.neck = (pose.hip[0] + TORSO * lean_x, pose.hip[1] + TORSO * lean_y)
        self._head = (self.neck[0] + NECK_TO_HEAD * lean_x, self.neck[1] + NECK_TO_HEAD * lean_y)

    def place(self, local: Point) -> Point:
        """Scene position of a point given in the figure's own frame."""
        u, v = local
        if self.pose.turn:
            cosine, sine = math.cos(self.pose.turn), math.sin(self.pose.turn)
            du, dv = u - self._hip[0], v - self._hip[1]
            u = self._hip[0] + cosine * du - sine * dv
            v = self._hip[1] + sine * du + cosine * dv
        return self._ground[0] + self.facing * u, self._ground[1] + v

    def from_neck(self, offset: Point) -> Point:
        """Scene position of a point given relative to the neck."""
        return self.place((self.neck[0] + offset[0], self.neck[1] + offset[1]))

    def _tone(self, color: Color, back: bool = False) -> Color:
        return character_light(darker(color, 0.2) if back else color, self.time)

    def _across(self, along: float, aside: float) -> Point:
        """Scene point on the torso: 0 at the neck, 1 at the hip; ``aside`` units forwards."""
        (hx, hy), (nx, ny) = self._hip, self.neck
        ax, ay = (hx - nx) / TORSO, (hy - ny) / TORSO
        return self.place(
            (nx + (hx - nx) * along + ay * aside, ny + (hy - ny) * along - ax * aside)
        )

    def draw(self, pen: Pen) -> None:
        """Draws the figure, except the front arm, which may have to lie over a prop."""
        pose = self.pose
        angle = self.facing * (pose.turn + pose.lean + pose.nod)
        head = self.place(self._head)
        draw_back_hair(pen, self.name, self.time, head, angle, self.facing, pose.flutter)
        if self._look.outfit == "cape":
            self._draw_cape(pen)
        self.draw_arm(pen, front=False)
        self._draw_leg(pen, pose.foot_back, -3.5, back=True)
        self._draw_leg(pen, pose.foot_front, 3.5, back=False)
        self._draw_torso(pen)
        if self._scarf is not None:
            self._draw_scarf_tail(pen)
        mouth = "smile" if pose.mouth < 0.25 else "half" if pose.mouth < 0.6 else "open"
        draw_head(
            pen, self.name, self.time, head, angle, self.facing, pose.eyes, mouth, pose.flutter
        )
        if self._scarf is not None:
            self._draw_scarf(pen)

    def draw_arm(self, pen: Pen, front: bool = True) -> None:
        """Draws one arm with its hand."""
        pose = self.pose
        reach = self._look.girth * 0.72
        aside = reach if front else -reach
        hand = pose.hand_front if front else pose.hand_back
        shoulder = (self.neck[0] + aside, self.neck[1] + 4.5)
        end = (self.neck[0] + hand[0], self.neck[1] + hand[1])
        same = front or pose.elbow_back is None
        bend = pose.elbow if same else pose.elbow_back
        joints = [self.place(p) for p in _bent(shoulder, end, bend)]
        pen.line(joints, ARM_WIDTH, self._tone(self._look.top, back=not front), OUTLINE)
        pen.ellipse(*joints[-1], 4.3, 4.3, self._tone(self._look.skin, back=not front), OUTLINE)

    def _draw_leg(self, pen: Pen, foot: Point, aside: float, back: bool) -> None:
        look, pose = self._look, self.pose
        hip = (self._hip[0] + aside * look.girth / 10, self._hip[1] + 1)
        joints = [self.place(p) for p in _bent(hip, (foot[0], foot[1] - 4), -pose.knee)]
        color = look.skin if look.outfit in ("dress", "stripes") else look.bottom
        pen.line(joints, LEG_WIDTH, self._tone(color, back), OUTLINE)
        toe = self.place((foot[0] + 2, foot[1] - 3.5))
        angle = self.facing * pose.turn
        pen.ellipse(*toe, 6.6, 4.2, self._tone(look.shoe, back), OUTLINE, angle)

    def _draw_torso(self, pen: Pen) -> None:
        look = self._look
        top, bottom, trim = (self._tone(c) for c in (look.top, look.bottom, look.trim))
        wide = look.girth
        shape = [
            self._across(0.02, -wide * 0.8),
            self._across(0.02, wide * 0.8),
            self._across(1.08, wide),
            self._across(1.08, -wide),
        ]
        pen.polygon(shape, top, OUTLINE)
        if look.outfit == "dress":
            back = wide + 7 + 2 * max(self.pose.flutter, 0)
            pen.polygon(
                [
                    self._across(0.6, wide * 0.9),
                    self._across(1.45, wide + 6),
                    self._across(1.45, -back),
                    self._across(0.6, -wide * 0.9),
                ],
                bottom,
                OUTLINE,
            )
            pen.line([self._across(1.36, wide + 4), self._across(1.36, -back + 2)], 3.5, trim)
        elif look.outfit == "stripes":
            for along in (0.3, 0.62):
                pen.line(
                    [self._across(along, wide * 0.75), self._across(along, -wide * 0.75)], 3.4, trim
                )
            pen.polygon(
                [
                    self._across(0.85, wide),
                    self._across(1.3, wide + 1),
                    self._across(1.3, -wide - 1),
                    self._across(0.85, -wide),
                ],
                bottom,
                OUTLINE * 0.6,
            )
        elif look.outfit == "overalls":
            pen.polygon(
                [
                    self._across(0.4, wide * 0.55),
                    self._across(1.14, wide),
                    self._across(1.14, -wide),
                    self._across(0.4, -wide * 0.55),
                ],
                bottom,
            )
            for side in (-1, 1):
                pen.line(
                    [self._across(0.05, side * wide * 0.5), self._across(0.5, side * wide * 0.42)],
                    3.6,
                    bottom,
                )
        else:
            pen.line([self._across(0.85, wide * 0.95), self._across(0.85, -wide * 0.95)], 4, trim)

    def _draw_cape(self, pen: Pen) -> None:
        trim = self._tone(self._look.trim)
        blow = 9 * self.pose.flutter
        rise = 4 * max(self.pose.flutter, 0)
        pen.polygon(
            [
                self._across(0, 12),
                self._across(1.3, 17 - blow * 0.3),
                self._across(1.6 - rise * 0.04, -6 - blow * 0.7),
                self._across(1.45 - rise * 0.06, -26 - blow),
                self._across(0, -12),
            ],
            trim,
            OUTLINE,
        )

    def _draw_scarf(self, pen: Pen) -> None:
        wide = self._look.girth + 4.5
        band = [self._across(0.08, -wide), self._across(0.24, 0), self._across(0.08, wide)]
        pen.line(band, 10, self._tone(self._scarf), OUTLINE)

    def _draw_scarf_tail(self, pen: Pen) -> None:
        blow = self.pose.flutter
        wide = self._look.girth
        tail = [
            self._across(0.02, -wide),
            self._across(0.35 - 0.2 * blow, -wide - 9 - 3 * blow),
            self._across(0.85 - 0.45 * blow, -wide - 12 - 10 * blow),
        ]
        pen.line(tail, 9.5, self._tone(darker(self._scarf, 0.12)), OUTLINE)


def _bent(start: Point, end: Point, bend: float) -> list[Point]:
    """Start, joint and end of a limb whose joint lies ``bend`` units behind the middle."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy) or 1.0
    joint = (
        (start[0] + end[0]) / 2 - dy / length * bend,
        (start[1] + end[1]) / 2 + dx / length * bend,
    )
    return [start, joint, end]
