"""How fast the camera moves for each motion at each intensity.

``TARGETS`` are the motion scopes that the five intensities aim at, in geometric steps.
``energy.json`` holds the camera speeds, found by ``calibrate.py``, that bring every motion there:
a lively motion needs less of it than a quiet one.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

TARGETS = (2.8, 4.6, 7.6, 12.5, 20.5)
TABLE_FILE = Path(__file__).with_name("energy.json")

# A camera speed of one unit a frame is 720 / 192 pixels of a 720-wide frame.
_UNITS_PER_PIXEL = 192 / 720


@lru_cache(maxsize=1)
def _table() -> dict[str, list[float]]:
    if not TABLE_FILE.is_file():
        return {}
    return json.loads(TABLE_FILE.read_text(encoding="utf-8"))


def camera_speed(motion: str, intensity: int) -> float:
    """Mean speed of the camera's movement, in scene units a frame.

    Args:
        motion: One of the motions.
        intensity: 1 to 5.
    """
    speeds = _table().get(motion, TARGETS)
    return speeds[intensity - 1] * (1.0 if motion in _table() else _UNITS_PER_PIXEL)


def override(table: dict[str, list[float]]) -> None:
    """Replaces the table in memory; only the calibration does this."""
    _table().clear()
    _table().update(table)
