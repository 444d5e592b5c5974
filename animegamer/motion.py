"""Motion scope ``f_ms``: how much moves in a shot, from its frames to a number and a level.

One function for films, the built-in world and generated shots: absolute optical flow, values
under a threshold dropped, mean of the rest (paper App. A). Assumed: the unit is pixels per frame
of a 720-wide frame at 8 fps, whatever the real size.

Deviation: OpenCV's DIS flow instead of MemFlow, which needs no weights and no GPU. Frames pass a
small denoising filter first, and a pixel near which nothing changed between two frames has not
moved: flow in flat areas of decoded pictures is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np

REFERENCE_WIDTH = 720
LEVELS = 5
_WORKING_WIDTH = 192
_CHANGE = 7.0  # grey levels of 255 that count as a change after denoising
_NEAR = 9  # pixels at working size within which a change vouches for flow


@lru_cache(maxsize=1)
def _flow_engine() -> cv2.DISOpticalFlow:
    engine = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_FAST)
    engine.setFinestScale(1)
    # Refinement doubles the time and makes the result less steady under noise (measured).
    engine.setVariationalRefinementIterations(0)
    engine.setPatchStride(5)
    return engine


def _prepare(frames: np.ndarray) -> list[np.ndarray]:
    height, width = frames.shape[1:3]
    size = (_WORKING_WIDTH, max(16, round(height * _WORKING_WIDTH / width)))
    kind = cv2.INTER_AREA if width > _WORKING_WIDTH else cv2.INTER_CUBIC
    grey = []
    for frame in frames:
        image = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        image = cv2.resize(image, size, interpolation=kind)
        grey.append(cv2.GaussianBlur(image, (0, 0), 1.6))
    return grey


def motion_scope(frames: np.ndarray, threshold: float = 0.2) -> float:
    """Mean magnitude of optical flow over whatever moves in a shot.

    Args:
        frames: uint8 RGB (F, H, W, 3) at 8 fps, F at least 2.
        threshold: flow below it is dropped, in the unit of the result.

    Returns:
        Pixels per frame of a 720-wide frame; 0.0 where nothing moves.

    Raises:
        ValueError: if ``frames`` has another shape or type.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"frames are {frames.dtype} {frames.shape}, expected uint8 (F, H, W, 3)")
    if len(frames) < 2:
        raise ValueError(f"motion needs 2 frames or more, got {len(frames)}")
    images = _prepare(frames)
    engine = _flow_engine()
    kernel = np.ones((2 * _NEAR + 1, 2 * _NEAR + 1), np.uint8)
    total, count = 0.0, 0
    for before, after in zip(images, images[1:], strict=False):
        changed = (cv2.absdiff(before, after) > _CHANGE).astype(np.uint8)
        if not changed.any():
            continue
        flow = engine.calc(before, after, None)
        speed = np.hypot(flow[..., 0], flow[..., 1]) * (REFERENCE_WIDTH / _WORKING_WIDTH)
        moving = (cv2.dilate(changed, kernel) > 0) & (speed >= threshold)
        total += float(speed[moving].sum())
        count += int(moving.sum())
    return total / count if count else 0.0


def level_edges(values: Sequence[float] | np.ndarray, levels: int = LEVELS) -> list[float]:
    """Places the borders between motion levels in the gaps of the data.

    Starts from equal shares of the data and refines them by one-dimensional k-means on the
    logarithm, so that a border never cuts through a cluster.

    Args:
        values: Motion scopes of many shots.
        levels: Number of levels.

    Returns:
        ``levels - 1`` rising edges.

    Raises:
        ValueError: if there are fewer distinct values than levels.
    """
    logs = np.sort(np.log(np.maximum(np.asarray(values, dtype=np.float64), 1e-3)))
    if len(np.unique(logs)) < levels:
        raise ValueError(f"{len(np.unique(logs))} distinct values cannot make {levels} levels")
    centres = np.array([part.mean() for part in np.array_split(logs, levels)])
    for _ in range(200):
        borders = (centres[1:] + centres[:-1]) / 2
        groups = np.searchsorted(borders, logs)
        moved = np.array(
            [logs[groups == k].mean() if (groups == k).any() else centres[k] for k in range(levels)]
        )
        if np.allclose(moved, centres):
            break
        centres = moved
    borders = (centres[1:] + centres[:-1]) / 2
    return [float(np.exp(border)) for border in borders]


def level_of(value: float, edges: Sequence[float]) -> int:
    """Motion level of a motion scope: 1 below the first edge, ``len(edges) + 1`` above the last."""
    return int(np.searchsorted(np.asarray(edges), value, side="right")) + 1
