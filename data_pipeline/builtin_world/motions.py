"""The twelve motions: from a moment and an intensity to a pose.

A motion function gets a ``Beat`` and returns a ``Pose``. Beat 0 already shows the motion's own
stance, so that a single frame is enough to recognise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.builtin_world.bodies import HIP_HEIGHT, Pose

MOTIONS: tuple[str, ...] = (
    "walk",
    "run",
    "jump",
    "sit",
    "lie down",
    "wave",
    "talk",
    "read",
    "dance",
    "eat",
    "fly",
    "drive",
)
TRAVEL: frozenset[str] = frozenset({"walk", "run", "fly", "drive"})
SOLO: frozenset[str] = frozenset({"fly", "drive"})
STAND = "stand"
INTENSITIES = (1, 2, 3, 4, 5)

# Cycles per second and size of the gestures at the five intensities.
# Whole cycles in a shot, and at the fastest in the four frames of one latent.
TEMPO = (0.5, 0.5, 1.0, 1.5, 2.0)
_PACE = {"walk": 0.8, "run": 0.75, "jump": 0.7}
JUMP_HEIGHTS = (2.5, 5.0, 7.0, 11.0, 15.0)
REACH = (0.35, 0.5, 0.7, 0.9, 1.1)


@dataclass(frozen=True)
class Beat:
    """A moment of a motion.

    Attributes:
        phase: Angle of the cycle in radians, 0 at the first frame.
        reach: Size of the gestures, about 0.5 (gently) to 1.2 (furiously).
        jump: Height of a jump in units.
        second: True for the second of two characters, who moves half a cycle later.
    """

    phase: float
    reach: float
    jump: float = 0.0
    second: bool = False

    @property
    def swing(self) -> float:
        """Goes 0, 1, 0, -1 with the phase, the other way round for the second character."""
        return math.sin(self.phase) * (-1 if self.second else 1)

    @property
    def stride(self) -> float:
        """Goes 1, 0, -1, 0 with the phase."""
        return math.cos(self.phase) * (-1 if self.second else 1)


def tempo(motion: str, intensity: int) -> float:
    """Cycles per second of a motion at an intensity."""
    return TEMPO[intensity - 1] * _PACE.get(motion, 1.0)


def _stand(beat: Beat) -> Pose:
    return Pose(hip=(0, -HIP_HEIGHT + 0.8 * beat.swing), flutter=0.25 * beat.swing)


def _walk(beat: Beat) -> Pose:
    step, reach = beat.stride, 0.6 + 0.4 * beat.reach
    rise = math.sin(beat.phase) * (-1 if beat.second else 1)
    return Pose(
        hip=(0, -HIP_HEIGHT - 1.5 + 2 * abs(step)),
        lean=0.06,
        foot_front=(14 * step * reach, -max(0, -rise) * 6),
        foot_back=(-14 * step * reach, -max(0, rise) * 6),
        hand_front=(3 - 15 * step * reach, 18),
        hand_back=(-3 + 15 * step * reach, 18),
        elbow=3,
        knee=3,
        flutter=0.45 + 0.2 * beat.swing,
    )


def _run(beat: Beat) -> Pose:
    step, rise, reach = beat.stride, beat.swing, 0.45 + 0.45 * beat.reach
    return Pose(
        hip=(0, -HIP_HEIGHT - 3 + 3 * abs(step)),
        lean=0.32,
        nod=-0.16,
        foot_front=(-3 + 24 * step * reach, -6 + 4 * step - max(0, -rise) * 10),
        foot_back=(-3 - 24 * step * reach, -6 - 4 * step - max(0, rise) * 10),
        hand_front=(2 - 18 * step * reach, 12),
        hand_back=(2 + 20 * step * reach, 10),
        elbow=7,
        knee=6,
        mouth=0.7,
        flutter=1.4 + 0.3 * rise,
    )


def _jump(beat: Beat) -> Pose:
    height = abs(math.sin(beat.phase / 2))
    lift = beat.jump * height
    height *= min(1.0, 0.8 * beat.reach)
    crouch = max(0.0, 1 - 1.6 * height)
    return Pose(
        lift=lift,
        hip=(-2 * crouch, -HIP_HEIGHT + 7 * crouch),
        lean=0.24 * crouch,
        foot_front=(9, -6 * height),
        foot_back=(-9, -10 * height),
        knee=4 + 4 * crouch,
        hand_front=(4 + 16 * height, 14 - 20 * height),
        hand_back=(-20 - 3 * height, 8 - 18 * height),
        mouth=height,
        flutter=0.5 * math.cos(beat.phase / 2),
    )


def _sit(beat: Beat) -> Pose:
    kick = beat.swing * beat.reach
    return Pose(
        hip=(-6, -22),
        lean=-0.08 + 0.04 * kick,
        nod=0.1 + 0.06 * kick,
        foot_front=(21 + 6 * kick, -1 - 3 * abs(kick)),
        foot_back=(15 - 6 * kick, -1 - 3 * abs(kick)),
        knee=11,
        hand_front=(15, 16),
        hand_back=(-14, 19),
        flutter=0.3 * kick,
    )


def _lie(beat: Beat) -> Pose:
    toss = beat.swing * beat.reach
    return Pose(
        slide=20,
        lift=9,
        turn=-math.pi / 2 + 0.05 * toss,
        nod=0.1 * toss,
        foot_front=(8 + 5 * toss, -1),
        foot_back=(-2 - 3 * toss, -1),
        hand_front=(13 + 3 * toss, 17),
        hand_back=(-10, 15),
        knee=3,
        eyes="closed",
        mouth=0.3 if toss > 0.3 else 0.0,
        flutter=0.2,
    )


def _wave(beat: Beat) -> Pose:
    sway = beat.stride * beat.reach
    return Pose(
        hip=(0, -HIP_HEIGHT),
        lean=-0.04,
        nod=0.08 * sway,
        hand_front=(32 + 9 * sway, -38 + 5 * abs(sway)),
        elbow=11,
        hand_back=(-13, 18),
        mouth=0.5,
        flutter=0.2 * sway,
    )


def _talk(beat: Beat) -> Pose:
    speaking = beat.stride > -0.2
    gesture = math.sin(2 * beat.phase + 0.9) * beat.reach
    return Pose(
        nod=0.08 * gesture,
        lean=0.05,
        hand_front=(25 + 3 * gesture, 6 - 7 * gesture) if speaking else (14, 17),
        hand_back=(-15, 14) if speaking else (-13, 18),
        elbow=5,
        mouth=(0.9 if math.cos(2 * beat.phase) > -0.3 else 0.4) if speaking else 0.0,
        flutter=0.2 * gesture,
        prop=1.0 if speaking else 0.0,
    )


def _read(beat: Beat) -> Pose:
    page = beat.phase / (2 * math.pi)
    return Pose(
        lean=0.08,
        nod=0.12 + 0.05 * beat.swing * beat.reach,
        eyes="down",
        hand_front=(24, 14),
        hand_back=(6, 16),
        elbow=5,
        prop=page % 1.0,
    )


def _dance(beat: Beat) -> Pose:
    reach = 0.7 * beat.reach
    sway = (1 - reach * (1 - math.cos(beat.phase))) * (-1 if beat.second else 1)
    kick = max(0.0, sway)
    return Pose(
        slide=4 * reach * beat.swing,
        hip=(3 * sway, -HIP_HEIGHT - 2 * abs(beat.swing)),
        lean=-0.16 * sway,
        nod=-0.12 * sway,
        hand_front=(27, -30 + 12 * (1 - sway)),
        hand_back=(-27, -30 + 12 * (1 + sway)),
        elbow=9,
        elbow_back=-9,
        foot_front=(7 + 15 * kick, -9 * kick),
        foot_back=(-7 + 12 * min(0, sway), 9 * min(0, sway)),
        mouth=0.7,
        flutter=0.8 * beat.swing * reach,
    )


def _eat(beat: Beat) -> Pose:
    bite = 0.5 + 0.5 * beat.stride
    reach = 0.6 + 0.4 * beat.reach
    return Pose(
        lean=0.03,
        nod=0.1 * bite * reach,
        hand_front=(23 - 3 * bite, 11 - 9 * bite * reach),
        hand_back=(13 - 3 * bite, 13 - 9 * bite * reach),
        elbow=-8,
        mouth=0.9 if bite > 0.45 else 0.4,
        eyes="open" if bite > 0.25 else "closed",
        prop=bite,
    )


def _fly(beat: Beat) -> Pose:
    glide = beat.swing * beat.reach
    return Pose(
        lift=20 + 5 * glide,
        turn=0.05 * glide,
        hip=(-4, -11),
        lean=0.22,
        nod=-0.1,
        foot_front=(10, 2),
        foot_back=(-16, 2),
        knee=7,
        hand_front=(24, 14),
        hand_back=(18, 16),
        elbow=4,
        mouth=0.7,
        flutter=1.3 + 0.4 * math.sin(2 * beat.phase),
        prop=glide,
    )


def _drive(beat: Beat) -> Pose:
    rumble = math.sin(2 * beat.phase) * beat.reach
    return Pose(
        lift=17 + 1.6 * rumble,
        hip=(-6, -12),
        lean=0.06,
        foot_front=(8, 0),
        foot_back=(6, 0),
        hand_front=(23, 13),
        hand_back=(19, 12),
        elbow=4,
        mouth=0.5,
        flutter=1.0 + 0.3 * rumble,
        prop=beat.phase,
    )


POSES: dict[str, Callable[[Beat], Pose]] = {
    "walk": _walk,
    "run": _run,
    "jump": _jump,
    "sit": _sit,
    "lie down": _lie,
    "wave": _wave,
    "talk": _talk,
    "read": _read,
    "dance": _dance,
    "eat": _eat,
    "fly": _fly,
    "drive": _drive,
    STAND: _stand,
}
