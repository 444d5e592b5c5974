"""Video files: what is written is what is read, and a broken file says which one it is."""

from __future__ import annotations

import io

import numpy as np
import pytest

from animegamer.video import (
    VideoError,
    fit,
    read_video,
    resize,
    sample_middle,
    to_float,
    to_uint8,
    write_video,
)


@pytest.fixture
def frames() -> np.ndarray:
    """A bright square that wanders over a smooth background."""
    rows, columns = np.mgrid[0:64, 0:96]
    video = np.empty((17, 64, 96, 3), np.uint8)
    for index in range(17):
        video[index] = np.stack([rows * 2, columns * 2, 120 + 0 * rows], -1)
        video[index, 20:40, 10 + index : 34 + index] = (240, 60, 50)
    return video


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 arrays in dB."""
    error = np.mean((first.astype(np.float64) - second) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def test_near_lossless_round_trip(tmp_path, frames) -> None:
    write_video(tmp_path / "a.mp4", frames, crf=5, pixel_format="yuv444p")
    again = read_video(tmp_path / "a.mp4", frames=17)
    assert again.shape == frames.shape and again.dtype == np.uint8
    assert psnr(frames, again) > 40


def test_browser_defaults(tmp_path, frames) -> None:
    import av

    write_video(tmp_path / "sub" / "a.mp4", frames)
    with av.open(str(tmp_path / "sub" / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 8 and stream.frames == 17
    head = (tmp_path / "sub" / "a.mp4").read_bytes()
    assert head.index(b"moov") < head.index(b"mdat"), "not faststart"


def test_failed_write_leaves_the_old_file(tmp_path, frames) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, frames)
    before = path.read_bytes()
    with pytest.raises(Exception, match="no-such-format"):
        write_video(path, frames, pixel_format="no-such-format")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_a_whole_file_of_a_size_that_decord_does_not_read_is_not_called_damaged(tmp_path) -> None:
    narrow = np.zeros((5, 64, 24, 3), dtype=np.uint8)
    write_video(tmp_path / "narrow.mp4", narrow)
    with pytest.raises(VideoError, match=r"narrow\.mp4: is whole.*24 x 64 pixels; make it larger"):
        read_video(tmp_path / "narrow.mp4")


def test_missing_empty_and_damaged_files_are_named(tmp_path, frames) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.mp4"):
        read_video(tmp_path / "nothing.mp4")
    empty = tmp_path / "empty.mp4"
    empty.touch()
    with pytest.raises(VideoError, match=r"empty\.mp4.*0 bytes"):
        read_video(empty)
    write_video(tmp_path / "good.mp4", frames)
    cut = tmp_path / "cut.mp4"
    whole = (tmp_path / "good.mp4").read_bytes()
    cut.write_bytes(whole[: len(whole) * 3 // 5])
    with pytest.raises(VideoError, match=r"cut\.mp4.*damaged"):
        read_video(cut)
    text = tmp_path / "text.mp4"
    text.write_text("not a video")
    with pytest.raises(VideoError, match=r"text\.mp4"):
        read_video(text)
    with pytest.raises(VideoError, match=r"good\.mp4: holds 17 frames, expected 49"):
        read_video(tmp_path / "good.mp4", frames=49)


def test_sound_without_picture(tmp_path) -> None:
    import wave

    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16000))
    with pytest.raises(VideoError, match=r"sound\.wav.*no video stream"):
        read_video(path)


def test_write_refuses_what_it_cannot_hold(tmp_path, frames) -> None:
    with pytest.raises(ValueError, match="uint8"):
        write_video(tmp_path / "a.mp4", frames.astype(np.float32))
    with pytest.raises(ValueError, match="63x96"):
        write_video(tmp_path / "a.mp4", frames[:, :63])


def test_the_middle_of_a_video_at_another_rate(tmp_path) -> None:
    """24 frames a second, each a little brighter: every third one, round the middle."""
    ramp = np.arange(60, dtype=np.uint8)[:, None, None, None] * 4
    write_video(tmp_path / "a.mp4", np.broadcast_to(ramp, (60, 32, 48, 3)), 24.0, crf=0)
    expected = (2.5 - 1.0) / 2 * 24 + 3 * np.arange(9)  # 2.5 s long, 9 frames span 1 s
    for source in (tmp_path / "a.mp4", io.BytesIO((tmp_path / "a.mp4").read_bytes())):
        shown = sample_middle(source, 9, 8)
        assert shown.shape == (9, 32, 48, 3)
        np.testing.assert_allclose(shown.mean((1, 2, 3)) / 4, expected, atol=0.8)
    with pytest.raises(VideoError, match=r"lasts 2.50 s, expected 4.00 s"):
        sample_middle(tmp_path / "a.mp4", 33, 8)
    with pytest.raises(VideoError, match="is no video or is damaged"):
        sample_middle(io.BytesIO(b"words"), 9, 8)


def test_fitting_cuts_and_never_squashes() -> None:
    wide = np.zeros((2, 8, 32, 3), np.uint8)
    wide[:, :, 10:22] = 200  # the middle 3 : 2
    assert (fit(wide, 4, 6) == 200).all() and fit(wide, 4, 6).shape == (2, 4, 6, 3)


def test_resize_and_colour_range(frames) -> None:
    small = resize(frames, 32, 48)
    assert small.shape == (17, 32, 48, 3) and small.dtype == np.uint8
    assert resize(frames, 64, 96) is frames
    levels = np.arange(256, dtype=np.uint8)
    floats = to_float(levels)
    assert floats.dtype == np.float32 and floats.min() == -1 and floats.max() == 1
    assert np.array_equal(to_uint8(floats), levels)
    assert to_uint8(np.array([-3.0, 3.0])).tolist() == [0, 255]
