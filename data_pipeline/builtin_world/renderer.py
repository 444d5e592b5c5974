"""From a scene's description to frames: ``render(SceneSpec(...)) -> uint8 (F, H, W, 3)``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import cv2
import numpy as np

from data_pipeline.builtin_world import energy
from data_pipeline.builtin_world.attributes import Attributes
from data_pipeline.builtin_world.bodies import Figure
from data_pipeline.builtin_world.canvas import (
    SCENE_HEIGHT,
    SUPERSAMPLING,
    Color,
    Pen,
    blend,
    mix,
)
from data_pipeline.builtin_world.motions import (
    JUMP_HEIGHTS,
    POSES,
    REACH,
    SOLO,
    STAND,
    TEMPO,
    TRAVEL,
    Beat,
    tempo,
)
from data_pipeline.builtin_world.places import FAR_SPEED, Backdrop, backdrop
from data_pipeline.builtin_world.props import draw_behind, draw_front, draw_in_hand, draw_sign
from data_pipeline.builtin_world.scenery import MARGIN, PERIOD

FRAMES = 17
FPS = 8
GROUND = 121.0
SLOTS: dict[str, float] = {"left": 0.32, "right": 0.68}  # share of the frame's width
# Part of the way to the other slot that a traveller covers on screen.
_CROSSING = (0.1, 0.2, 0.35, 0.6, 0.9)
# Units a frame at which the ground passes under travellers.
_SCROLL = (0.25, 0.5, 0.9, 1.6, 2.6)


@dataclass(frozen=True)
class SceneSpec:
    """Everything that a shot's pixels depend on.

    Attributes:
        characters: One or two names; of two, the first stands on the left.
        motion: One of ``motions.MOTIONS`` or "stand" (the opening shot).
        intensity: 1 gently to 5 furiously.
        place: One of ``places.PLACES``.
        time: day, evening or night.
        slot: Where a single character starts: "left" or "right". Ignored for two.
        attributes: The game's hidden attributes.
    """

    characters: tuple[str, ...]
    motion: str
    intensity: int
    place: str
    time: str
    slot: str = "left"
    attributes: Attributes = field(default_factory=Attributes)

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn."""
        if self.motion not in POSES:
            raise ValueError(f"unknown motion {self.motion!r}; known: {sorted(POSES)}")
        if len(self.characters) not in (1, 2):
            raise ValueError(f"a shot shows 1 or 2 characters, not {len(self.characters)}")
        if len(self.characters) == 2 and self.motion in SOLO:
            raise ValueError(f"{self.motion!r} is done by one character alone")
        if self.slot not in SLOTS:
            raise ValueError(f"unknown slot {self.slot!r}; known: {sorted(SLOTS)}")
        if not 1 <= self.intensity <= 5:
            raise ValueError(f"intensity {self.intensity} is not in 1..5")

    def start_slots(self) -> tuple[str, ...]:
        """The slot each character starts in."""
        return (self.slot,) if len(self.characters) == 1 else ("left", "right")

    def end_slots(self) -> tuple[str, ...]:
        """The slot each character is in when the next shot starts."""
        if len(self.characters) == 1 and self.motion in TRAVEL:
            return ("right" if self.slot == "left" else "left",)
        return self.start_slots()


def render(spec: SceneSpec, height: int = 64, width: int = 96) -> np.ndarray:
    """Draws a shot.

    Args:
        spec: What to draw.
        height: Frame height in pixels.
        width: Frame width in pixels, at least 1.4 times the height.

    Returns:
        uint8 RGB frames (17, height, width, 3), to be shown at 8 frames per second.
    """
    scale = SUPERSAMPLING * height / SCENE_HEIGHT
    wide = SCENE_HEIGHT * width / height
    layers = backdrop(spec.place, spec.time, spec.attributes.landmark, wide, scale)
    frames = np.empty((FRAMES, height, width, 3), np.uint8)
    for index in range(FRAMES):
        frames[index] = _frame(spec, layers, index, wide, (height, width))
    return frames


def _frame(
    spec: SceneSpec, layers: Backdrop, index: int, wide: float, size: tuple[int, int]
) -> np.ndarray:
    level = spec.intensity - 1
    cycles = tempo(spec.motion, spec.intensity)
    phase = 2 * math.pi * cycles * index / FPS
    travels = spec.motion in TRAVEL
    starts = spec.start_slots()
    facings = [1 if slot == "left" else -1 for slot in starts]
    heading = facings[0]
    if travels and len(facings) == 2:
        facings = [1, 1]
    scroll = heading * _SCROLL[level] * index if travels else 0.0
    canvas = _background(layers, scroll, wide)
    pen = Pen(canvas, layers.scale, (-MARGIN, -MARGIN))
    progress = index / (FRAMES - 1)
    figures = []
    for order, name in enumerate(spec.characters):
        x = SLOTS[starts[order]] * wide
        if travels and len(starts) == 1:
            distance = (SLOTS["right"] - SLOTS["left"]) * wide
            x += heading * distance * _CROSSING[level] * progress
        beat = Beat(phase, REACH[level], JUMP_HEIGHTS[level], second=order == 1)
        pose = POSES[spec.motion](beat)
        figures.append(
            Figure(
                name, pose, x, GROUND, facings[order], spec.time, spec.attributes.scarf_color(name)
            )
        )
        _shadow(pen, figures[-1], x, spec.motion, layers)
    for figure in figures:
        vehicle = spec.attributes.vehicle_color()
        draw_behind(pen, spec.motion, figure, vehicle)
        figure.draw(pen)
        draw_front(pen, spec.motion, figure, vehicle)
        figure.draw_arm(pen)
        draw_in_hand(pen, spec.motion, figure)
    signs = figures[:1] if spec.motion == "dance" else figures
    for figure in signs:
        draw_sign(pen, spec.motion, figure)
    shake = energy.camera_speed(spec.motion, spec.intensity) * FPS / (4 * TEMPO[level])
    turn = 2 * math.pi * TEMPO[level] * index / FPS
    return _develop(canvas, _camera(spec.motion, shake, turn, heading), layers.scale, size)


def _camera(motion: str, shake: float, phase: float, heading: int) -> tuple[float, float]:
    """Camera offset in units: it breathes, and shakes with the intensity.

    The whole picture moves with it, so the speed of a shot depends little on who is in it and
    where. It starts at rest, and bobs for travellers, whose scenery moves sideways already.
    """
    if motion == STAND:
        return 0.0, 0.0
    if motion in TRAVEL:
        return 0.0, shake * math.sin(phase)
    return heading * shake * math.sin(phase), 0.3 * shake * (math.sin(phase + 1.0) - 0.84)


def _background(layers: Backdrop, scroll: float, wide: float) -> np.ndarray:
    if scroll == 0.0 and layers.still is not None:
        return layers.still.copy()
    canvas = layers.sky.copy()
    blend(canvas, _window(layers.far, scroll * FAR_SPEED, wide, layers.scale))
    if layers.picture is not None:
        blend(canvas, layers.picture)
    blend(canvas, _window(layers.near, scroll, wide, layers.scale))
    if scroll == 0.0:
        layers.still = canvas.copy()
    return canvas


def _window(layer: np.ndarray, scroll: float, wide: float, scale: float) -> np.ndarray:
    """The part of a periodic layer that is in view; fractions of a pixel are interpolated."""
    columns = round((wide + 2 * MARGIN) * scale)
    start = ((scroll - MARGIN) % PERIOD) * scale
    whole = int(start)
    share = start - whole
    view = layer[:, whole : whole + columns]
    if share < 1e-6:
        return view
    return cv2.addWeighted(view, 1 - share, layer[:, whole + 1 : whole + 1 + columns], share, 0)


def _shadow(pen: Pen, figure: Figure, x: float, motion: str, layers: Backdrop) -> None:
    column = int((x + MARGIN) * layers.scale)
    row = int((GROUND + 2 + MARGIN) * layers.scale)
    ground: Color = tuple(
        int(c) for c in pen.image[row, min(max(column, 0), pen.image.shape[1] - 1)]
    )
    reach = 44.0 if motion in ("lie down", "drive", "fly") else 21.0
    pen.ellipse(x, GROUND + 1.5, reach, 5, mix(ground, (30, 30, 60), 0.32))


def _develop(
    canvas: np.ndarray, sway: tuple[float, float], scale: float, size: tuple[int, int]
) -> np.ndarray:
    """Cuts the frame out of the canvas at the camera's place and reduces it."""
    height, width = size
    large = (width * SUPERSAMPLING, height * SUPERSAMPLING)
    matrix = np.array(
        [[1.0, 0.0, (sway[0] - MARGIN) * scale], [0.0, 1.0, (sway[1] - MARGIN) * scale]]
    )
    cut = cv2.warpAffine(
        canvas, matrix, large, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    return cv2.resize(cut, (width, height), interpolation=cv2.INTER_AREA)
