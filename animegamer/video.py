"""Video files and frames: read, write, resize, and the one convention for colours.

Outside the networks frames are uint8 RGB 0..255 (F, H, W, 3); inside them float in [-1, 1].
Only numpy here; decoders and encoders are imported when they are needed.
"""

from __future__ import annotations

import os
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FPS = 8


class VideoError(ValueError):
    """A video file that cannot be read or written; the message names the file and the cause."""


def read_video(path: str | Path, frames: int | None = None) -> np.ndarray:
    """Reads a video file.

    Args:
        path: The file.
        frames: How many frames are expected; None takes whatever is there.

    Returns:
        uint8 RGB (F, H, W, 3).

    Raises:
        FileNotFoundError: If there is no such file.
        VideoError: If it is empty, damaged, holds no video, or another number of frames.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no video file {path}")
    if path.stat().st_size == 0:
        raise VideoError(f"{path}: the file is empty (0 bytes); write it again")
    import decord

    try:
        reader = decord.VideoReader(str(path), num_threads=1)
        count = len(reader)
        video = reader.get_batch(range(count)).asnumpy() if count else None
    except Exception as error:
        raise VideoError(f"{path}: {_cause(path)}") from error
    if video is None:
        raise VideoError(f"{path}: holds no frames")
    if frames is not None and len(video) != frames:
        raise VideoError(f"{path}: holds {len(video)} frames, expected {frames}")
    return video


def _cause(path: Path) -> str:
    """Why a file could not be decoded, in words."""
    import av

    try:
        with av.open(str(path)) as container:
            if len(container.streams) and not container.streams.video:
                return "holds no video stream"
            for _ in container.decode(video=0):
                pass
            size = container.streams.video[0]
            return (
                f"is whole, but decord does not read its size of {size.width} x {size.height} "
                "pixels; make it larger"
            )
    except Exception:
        return "is no video or is damaged (cannot be decoded); it may have been cut short"


def write_video(
    path: str | Path,
    frames: np.ndarray,
    fps: float = FPS,
    crf: int = 16,
    pixel_format: str = "yuv420p",
) -> None:
    """Writes an H.264 MP4, whole or not at all.

    The defaults play in every browser. Near-lossless: ``crf`` 6 and ``yuv444p``.

    Args:
        path: The file, ending in ``.mp4``; its folder is made if missing.
        frames: uint8 RGB (F, H, W, 3); ``yuv420p`` needs even sizes.
        fps: Frames per second.
        crf: x264 quality, 0 (lossless) to 51.
        pixel_format: Pixel format of the stream.

    Raises:
        ValueError: If ``frames`` has another shape or type, or an odd size that the pixel format
            cannot hold.
        OSError: Disk full and the like; an older file stays untouched.
    """
    frames = _checked(frames)
    height, width = frames.shape[1:3]
    if pixel_format == "yuv420p" and (height % 2 or width % 2):
        raise ValueError(f"yuv420p needs an even size, got {height}x{width} (height x width)")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".mp4")
    os.close(handle)
    try:
        _encode(temporary, frames, fps, crf, pixel_format)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _encode(path: str, frames: np.ndarray, fps: float, crf: int, pixel_format: str) -> None:
    import av

    rate = Fraction(fps).limit_denominator(1001)
    with av.open(path, "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixel_format
        stream.codec_context.thread_count = 1
        # Macroblock trees make x264's output depend on memory contents from run to run.
        stream.options = {"crf": str(crf), "preset": "veryfast", "x264-params": "mbtree=0"}
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def _checked(frames: np.ndarray) -> np.ndarray:
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ValueError(f"frames are {frames.dtype} {frames.shape}, expected uint8 (F, H, W, 3)")
    return frames


def resize(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes frames, area-averaged when they shrink and bicubic when they grow.

    Args:
        frames: uint8 RGB (F, H, W, 3).
        height: New height in pixels.
        width: New width in pixels.

    Returns:
        uint8 RGB (F, height, width, 3).
    """
    import cv2

    frames = _checked(frames)
    if frames.shape[1:3] == (height, width):
        return frames
    shrinks = height <= frames.shape[1] and width <= frames.shape[2]
    kind = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return np.stack([cv2.resize(frame, (width, height), interpolation=kind) for frame in frames])


def fit(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cuts frames round their centre to another shape and resizes them; nothing is squashed.

    Args:
        frames: uint8 RGB (F, H, W, 3).
        height: New height in pixels.
        width: New width in pixels.

    Returns:
        uint8 RGB (F, height, width, 3).
    """
    rows, columns = _checked(frames).shape[1:3]
    high = min(rows, max(1, round(columns * height / width)))
    wide = min(columns, max(1, round(rows * width / height)))
    top, left = (rows - high) // 2, (columns - wide) // 2
    return resize(frames[:, top : top + high, left : left + wide], height, width)


def sample_middle(source: str | Path | BinaryIO, frames: int, fps: float = FPS) -> np.ndarray:
    """Frames at a steady rate from the middle of a video of any rate.

    Args:
        source: The file, or its open content.
        frames: How many.
        fps: Frames per second of the result; each is the last one shown at its moment.

    Returns:
        uint8 RGB (F, H, W, 3).

    Raises:
        VideoError: If it cannot be decoded, or is too short.
    """
    import av

    content: Any = str(source) if isinstance(source, (str, Path)) else source
    span = (frames - 1) / fps
    try:
        with av.open(content) as container:
            stream = container.streams.video[0]
            packets = container.demux(stream)
            times = sorted(float(p.pts * p.time_base) for p in packets if p.pts is not None)
            if len(times) < 2:
                raise VideoError(f"holds {len(times)} frames")
            # The last frame is shown as long as the others.
            length = (times[-1] - times[0]) * len(times) / (len(times) - 1)
            if length < span:
                raise VideoError(f"lasts {length:.2f} s, expected {span:.2f} s or more")
            wanted = times[0] + (length - span) / 2 + np.arange(frames) / fps
            container.seek(int(wanted[0] / stream.time_base), stream=stream)
            shown: list[np.ndarray] = []
            before: Any = None
            for frame in container.decode(stream):
                while before and len(shown) < frames and frame.time > wanted[len(shown)]:
                    shown.append(before.to_ndarray(format="rgb24"))
                before = frame
                if len(shown) == frames:
                    break
            while len(shown) < frames:
                shown.append(before.to_ndarray(format="rgb24"))
    except VideoError:
        raise
    except Exception as error:
        raise VideoError(f"is no video or is damaged ({type(error).__name__})") from None
    return np.stack(shown)


def to_float(frames: np.ndarray) -> np.ndarray:
    """uint8 0..255 of any shape to float32 in [-1, 1]."""
    if frames.dtype != np.uint8:
        raise ValueError(f"frames are {frames.dtype}, expected uint8")
    return frames.astype(np.float32) / 127.5 - 1.0


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Floats in [-1, 1] of any shape to uint8 0..255, rounded; values beyond are clipped."""
    return np.clip(np.rint((np.asarray(frames, np.float32) + 1.0) * 127.5), 0, 255).astype(np.uint8)
