"""The opening of a game: a picture or a shot, fitted to the shot's size. No torch here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from animegamer.config import ShotConfig
from animegamer.video import VideoError, fit, read_video

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class OpeningError(ValueError):
    """An opening that is neither a picture nor a shot; the message names the file."""


def read_opening(opening: str | Path | np.ndarray, shot: ShotConfig) -> np.ndarray:
    """Reads the picture or shot of turn 0 and fits it to the shot's size.

    Args:
        opening: picture or video file, or uint8 frames (H, W, 3) or (F, H, W, 3).
        shot: size of a shot.

    Returns:
        uint8 (F, H, W, 3), F at most ``shot.frames``; cropped round the centre, then scaled.

    Raises:
        FileNotFoundError: if there is no such file.
        OpeningError: if it is neither a picture nor a video.
    """
    if isinstance(opening, (str, Path)):
        frames = _read_frames(Path(opening))
    else:
        frames = np.asarray(opening)[None] if np.ndim(opening) == 3 else np.asarray(opening)
    if frames.dtype != np.uint8 or frames.ndim != 4 or not len(frames) or frames.shape[-1] != 3:
        raise OpeningError(
            f"an opening of {frames.dtype} {frames.shape}, expected uint8 (F, H, W, 3)"
        )
    return fit(frames[: shot.frames], shot.height, shot.width)


def _read_frames(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"no opening picture or shot {path}")
    if path.suffix.lower() in _PICTURES:
        try:
            with Image.open(path) as picture:
                return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))[None]
        except (UnidentifiedImageError, OSError) as error:
            raise OpeningError(f"{path}: not a readable picture ({error})") from None
    try:
        return read_video(path)
    except VideoError as error:
        raise OpeningError(f"{error}; expected a picture (png, jpg) or a video") from None
