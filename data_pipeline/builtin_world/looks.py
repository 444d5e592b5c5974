"""Who lives in the world: two films, six characters, and what each of them looks like."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.builtin_world.canvas import Color


@dataclass(frozen=True)
class Look:
    """Everything fixed about a character's appearance.

    Attributes:
        film: Title of the film the character comes from.
        hair_style: Which hair drawing of ``heads.py`` is used; also gives the outline.
        hair: Hair colour; the other colours likewise.
        outfit: Which clothes drawing of ``bodies.py`` is used.
        trim: Second colour of the clothes (stripes, apron, cap, ribbon).
        girth: Half the width of the torso in scene units.
    """

    film: str
    hair_style: str
    hair: Color
    skin: Color
    eye: Color
    outfit: str
    top: Color
    bottom: Color
    trim: Color
    shoe: Color
    girth: float = 10.0


LANTERN_HARBOR = "Lantern Harbor"
PAPER_COMET = "Paper Comet"

LOOKS: dict[str, Look] = {
    "Nilo": Look(
        LANTERN_HARBOR,
        "cap",
        hair=(150, 84, 44),
        skin=(255, 222, 190),
        eye=(60, 120, 60),
        outfit="stripes",
        top=(250, 250, 246),
        bottom=(198, 160, 108),
        trim=(38, 70, 150),
        shoe=(120, 66, 40),
    ),
    "Mavi": Look(
        LANTERN_HARBOR,
        "tails",
        hair=(146, 86, 214),
        skin=(255, 228, 206),
        eye=(116, 52, 176),
        outfit="dress",
        top=(255, 150, 40),
        bottom=(255, 132, 24),
        trim=(255, 244, 214),
        shoe=(120, 60, 150),
    ),
    "Juno": Look(
        LANTERN_HARBOR,
        "long",
        hair=(255, 226, 136),
        skin=(255, 230, 210),
        eye=(40, 130, 200),
        outfit="dress",
        top=(226, 44, 126),
        bottom=(200, 30, 108),
        trim=(255, 206, 226),
        shoe=(130, 30, 80),
    ),
    "Orin": Look(
        PAPER_COMET,
        "spikes",
        hair=(60, 212, 190),
        skin=(248, 214, 184),
        eye=(200, 80, 30),
        outfit="cape",
        top=(98, 92, 124),
        bottom=(62, 58, 86),
        trim=(250, 248, 255),
        shoe=(40, 36, 54),
    ),
    "Pela": Look(
        PAPER_COMET,
        "buns",
        hair=(255, 130, 170),
        skin=(255, 224, 204),
        eye=(30, 140, 130),
        outfit="overalls",
        top=(255, 252, 240),
        bottom=(28, 150, 160),
        trim=(28, 150, 160),
        shoe=(240, 240, 236),
    ),
    "Bruk": Look(
        PAPER_COMET,
        "flat",
        hair=(196, 66, 30),
        skin=(196, 138, 96),
        eye=(70, 44, 30),
        outfit="overalls",
        top=(120, 116, 112),
        bottom=(120, 84, 52),
        trim=(120, 84, 52),
        shoe=(64, 48, 44),
        girth=16.0,
    ),
}

CHARACTERS: tuple[str, ...] = tuple(LOOKS)
