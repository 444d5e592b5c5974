"""Contact sheet: unpicked held-out shots, drawn on the left, generated on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from animegamer.fonts import cut

FRAMES = (0, 5, 10, 16)
_GAP = 4
_LINE = 15
_INK = (40, 40, 48)


def contact_sheet(
    drawn: Sequence[np.ndarray],
    generated: Sequence[np.ndarray],
    captions: Sequence[str],
    path: str | Path,
    count: int = 40,
    columns: int = 2,
    upscale: int = 1,
) -> None:
    """Writes a PNG of ``count`` shots spread evenly over those given; nobody picks.

    Args:
        drawn: true shots, uint8 (F, H, W, 3) each.
        generated: the same turns as generated.
        captions: what was asked, one each.
        path: the PNG.
        count: shots shown; all if there are fewer.
        columns: shots side by side.
        upscale: every pixel becomes so many wide and high.

    Raises:
        ValueError: if there are no shots, or not as many of one as of another.
    """
    if not len(drawn) or not len(drawn) == len(generated) == len(captions):
        raise ValueError(
            f"{len(drawn)} drawn and {len(generated)} generated shots, {len(captions)} captions: "
            "expected the same number of each, and one or more"
        )
    rows = spread(len(drawn), count)
    strips = [np.concatenate([_strip(drawn[row]), _strip(generated[row])], 1) for row in rows]
    strips = [strip.repeat(upscale, 0).repeat(upscale, 1) for strip in strips]
    height, width = strips[0].shape[:2]
    lines = -(-len(rows) // columns)
    cell = (width + _GAP, height + _LINE + _GAP)
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, lines * cell[1] + _GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for place, (row, strip) in enumerate(zip(rows, strips, strict=True)):
        left, top = _GAP + place % columns * cell[0], _GAP + place // columns * cell[1]
        pen.text((left, top), cut(f"drawn | generated: {captions[row]}", font, width), _INK, font)
        sheet.paste(Image.fromarray(strip), (left, top + _LINE))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def spread(total: int, count: int) -> list[int]:
    """``count`` places spread evenly over ``total``."""
    if count >= total:
        return list(range(total))
    return [int(place) for place in (np.arange(count) + 0.5) * total / count]


def _strip(shot: np.ndarray) -> np.ndarray:
    """(F, H, W, 3) to its frames 0, 5, 10 and 16 side by side."""
    last = len(shot) - 1
    return np.concatenate([np.asarray(shot[min(frame, last)]) for frame in FRAMES], 1)
