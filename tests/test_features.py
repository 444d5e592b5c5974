"""Feature shards: what goes in comes out; what is missing, damaged or foreign is named."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from animegamer import features
from animegamer.features import FeatureError, FeatureStore, FeatureWriter

SOURCE = {"autoencoder": "a", "text_encoder": "b"}


def record(seed):
    random = np.random.default_rng(seed)
    return {
        "f_v": random.standard_normal((3, 4)).astype(np.float16),
        "latents": random.standard_normal((2, 5)).astype(np.float32),
    }


def fill(path, names, shard_size=2, content="v1", **options):
    writer = FeatureWriter(path, SOURCE, shard_size, **options)
    for name in names:
        if not writer.has(name, content):
            writer.add(name, content, record(int(name)))
    writer.flush()
    return writer


def assert_right(store, names):
    assert sorted(store) == sorted(names) and len(store) == len(names)
    for name in names:
        found, expected = store[name], record(int(name))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == value.dtype and np.array_equal(found[key], value)


def test_round_trip_over_several_shards(tmp_path):
    fill(tmp_path, "12345")
    store = FeatureStore(tmp_path, SOURCE)
    assert_right(store, "12345")
    assert store.source == SOURCE and "6" not in store
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_views_are_stored_as_they_are_seen(tmp_path):
    """Not as they lie in memory: latents are transposed on their way here."""
    whole = np.random.default_rng(0).standard_normal((3, 4, 5, 6)).astype(np.float16)
    views = {
        "transposed": whole.transpose(0, 3, 2, 1),
        "sliced": whole[:, ::-1, 1:4],
        "fortran": np.asfortranarray(whole),
    }
    writer = FeatureWriter(tmp_path, SOURCE)
    for row in range(3):
        writer.add(str(row), "", {name: view[row] for name, view in views.items()})
    writer.flush()
    store = FeatureStore(tmp_path)
    for row in range(3):
        for name, view in views.items():
            assert np.array_equal(store[str(row)][name], view[row]), name


def test_a_shard_is_closed_at_its_size_in_bytes(tmp_path):
    size = sum(array.nbytes for array in record(0).values())
    fill(tmp_path, "12345", shard_size=100, shard_bytes=2 * size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert_right(FeatureStore(tmp_path), "12345")


def test_a_second_run_adds_what_is_missing(tmp_path):
    fill(tmp_path, "123")
    written = {f.name: f.stat().st_mtime_ns for f in tmp_path.glob("*.safetensors")}
    fill(tmp_path, "12345")
    assert_right(FeatureStore(tmp_path), "12345")
    for name, time in written.items():
        assert (tmp_path / name).stat().st_mtime_ns == time


def test_changed_content_is_made_again(tmp_path):
    fill(tmp_path, "12")
    writer = FeatureWriter(tmp_path, SOURCE)
    assert writer.has("1", "v1") and not writer.has("1", "v2") and not writer.has("3", "v1")
    writer.add("1", "v2", record(9))
    writer.flush()
    store = FeatureStore(tmp_path)
    assert np.array_equal(store["1"]["f_v"], record(9)["f_v"])
    assert np.array_equal(store["2"]["f_v"], record(2)["f_v"])


@pytest.mark.parametrize("fails", ["write_bytes", "write_text"])
def test_an_interrupted_writer_goes_on(tmp_path, monkeypatch, fails):
    """Killed before a shard is written, or between it and its entry in the index."""

    class Killed(BaseException):
        pass

    write, calls = getattr(features, fails), []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise Killed
        return write(*arguments)

    monkeypatch.setattr(features, fails, killed)
    with pytest.raises(Killed):
        fill(tmp_path, "12345")
    assert_right(FeatureStore(tmp_path), "12")
    monkeypatch.undo()
    fill(tmp_path, "12345")
    assert_right(FeatureStore(tmp_path), "12345")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    fill(tmp_path, "12")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        fill(tmp_path, "1234")
    assert_right(FeatureStore(tmp_path), "12")


def test_nothing_there(tmp_path):
    with pytest.raises(FeatureError, match=f"no features in {tmp_path}.*make them first"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "junk"])
def test_a_missing_or_damaged_shard_is_named(tmp_path, damage):
    fill(tmp_path, "12345")
    shard = tmp_path / "shard_00001.safetensors"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes({"cut": content[:-9], "empty": b"", "junk": b"\xff" * 99}[damage])
    with pytest.raises(FeatureError, match=f"{shard} is missing or damaged.*make the features"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": {}}'])
def test_a_damaged_index_is_named(tmp_path, content):
    fill(tmp_path, "1")
    (tmp_path / "index.json").write_text(content)
    for open_it in (FeatureStore, lambda path: FeatureWriter(path, SOURCE)):
        with pytest.raises(FeatureError, match=r"index.json is damaged.*make the features again"):
            open_it(tmp_path)


def test_another_source_is_refused(tmp_path):
    fill(tmp_path, "1")
    other = {**SOURCE, "autoencoder": "new"}
    with pytest.raises(FeatureError, match="was made with .*'a'.*'new'.*make the features again"):
        FeatureStore(tmp_path, other)
    with pytest.raises(FeatureError, match="was made with .*'a'.*'new'.*delete"):
        FeatureWriter(tmp_path, other)
    assert_right(FeatureStore(tmp_path), "1")  # None accepts all


def test_a_missing_record_says_what_to_do(tmp_path):
    fill(tmp_path, "1")
    with pytest.raises(KeyError, match="no features of 'shot 7' in .*make them first"):
        FeatureStore(tmp_path)["shot 7"]


def test_nothing_pending_writes_nothing(tmp_path):
    FeatureWriter(tmp_path / "new", SOURCE).flush()
    assert not (tmp_path / "new").exists()


def test_the_index_is_readable(tmp_path):
    fill(tmp_path, "12")
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["source"] == SOURCE and index["rows"]["2"] == [0, 1, "v1"]


def test_a_transposed_view_is_stored_as_it_reads(tmp_path):
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1)
    writer = FeatureWriter(tmp_path, {"net": "a"})
    for name in ("one", "two"):
        writer.add(name, "content", {"latents": array})
    writer.flush()
    np.testing.assert_array_equal(FeatureStore(tmp_path)["two"]["latents"], array)


def test_the_empty_text_is_stored_beside_the_shards(tmp_path):
    f_md = np.arange(6, dtype=np.float16).reshape(2, 3)
    features.write_empty_text(tmp_path, f_md.T)
    assert np.array_equal(features.read_empty_text(tmp_path), f_md.T.astype(np.float32))


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_an_empty_text_that_is_not_there_is_named(tmp_path, damage):
    features.write_empty_text(tmp_path, np.zeros((2, 3), np.float16))
    path = tmp_path / features.EMPTY_TEXT
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(FeatureError, match="empty_text.* run python -m data_pipeline.features"):
        features.read_empty_text(tmp_path)
