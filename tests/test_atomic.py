"""A file is old or new, never half, and a failed write leaves nothing behind."""

import errno
import os

import pytest

from animegamer import atomic


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "new directory" / "file.txt"
    atomic.write_text(path, "alt")
    atomic.write_text(path, "neu: 角色, ö")
    assert path.read_text(encoding="utf-8") == "neu: 角色, ö"
    assert os.listdir(path.parent) == ["file.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_bytes_are_written_as_they_are(tmp_path):
    content = bytes(range(256)) + b"\r\n\n"
    atomic.write_bytes(tmp_path / "b", content)
    assert (tmp_path / "b").read_bytes() == content


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("call", "fault", "error"),
    [
        ("fsync", full_disk, OSError),
        ("replace", full_disk, OSError),
        ("fsync", interrupt, KeyboardInterrupt),
    ],
)
def test_failure_keeps_the_old_file(tmp_path, monkeypatch, existing, call, fault, error):
    path = tmp_path / "state.json"
    if existing:
        path.write_text("old")
    monkeypatch.setattr(os, call, fault)
    with pytest.raises(error):
        atomic.write_text(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == (["state.json"] if existing else [])
    if existing:
        assert path.read_text() == "old"


def test_failure_in_the_middle_of_writing(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    path.write_text("old")
    fdopen = os.fdopen

    def small_disk(*arguments, **options):
        file = fdopen(*arguments, **options)

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def write(self, content):
                file.write(content[: len(content) // 2])
                full_disk()

        return Full()

    monkeypatch.setattr(os, "fdopen", small_disk)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_directory_in_the_way(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        atomic.write_text(tmp_path / "file", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
