"""Pre-training on captioned clips: shards and folders to shots, then twenty steps of training."""

from __future__ import annotations

import importlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState

from animegamer import config as configuration
from animegamer.records import read_shots
from animegamer.video import read_video, write_video
from data_pipeline import captioned
from data_pipeline.captioned import CaptionedError, Sample, make_shots, read_samples
from tests.tiny_checkpoint import N_TEXT, N_VISUAL, make_checkpoint, make_video_base

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/full/stage1_webvid.yaml"
FRAMES, HEIGHT, WIDTH = 5, 32, 64
COUNT = 8


def video(path, number, seconds=1.5, fps=24.0):
    """A square that moves faster the higher the number, over a ramp; written at another rate."""
    count = round(seconds * fps)
    ramp = np.arange(64, dtype=np.uint8)[:, None]
    frames = np.zeros((count, 48, 64, 3), np.uint8) + ramp
    for f in range(count):
        left = int(f * (number + 1) * 0.4) % 40
        frames[f, 16:32, left : left + 16] = 255 - 20 * number
    write_video(path, frames, fps, crf=10)
    return path.read_bytes()


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Contents of videos."""
    path = tmp_path_factory.mktemp("clips")
    return [video(path / f"{n}.mp4", n) for n in range(COUNT)]


def write_shard(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def members(clips, start=0):
    """One shard's members: captions as text and as JSON, and what else such shards hold."""
    for n, content in enumerate(clips, start):
        yield f"{n:06d}.mp4", content
        if n % 2:
            yield f"{n:06d}.txt", f"a  square\nmoves {n}".encode()
        else:
            yield f"{n:06d}.json", json.dumps({"caption": f"a square moves {n}", "w": 1}).encode()
        yield f"{n:06d}.jpg", b"a thumbnail"


def settings(work, *overrides):
    paths = {
        "data.captioned": "shards",
        "data.train": "webvid/train",
        "data.validation": "webvid/validation",
        "data.features": "webvid/features",
    }
    sizes = {
        "shot.frames": FRAMES,
        "shot.height": HEIGHT,
        "shot.width": WIDTH,
        "data.workers": 1,
        "data.captioned_clips": 100,
    }
    return [
        *(f"{key}={work / path}" for key, path in paths.items()),
        *(f"{key}={value}" for key, value in sizes.items()),
        *overrides,
    ]


def make(work, *overrides):
    return make_shots(configuration.load(CONFIG, settings(work, *overrides)))


@pytest.fixture(scope="module")
def work(clips, tmp_path_factory):
    """Two shards, made into shots."""
    path = tmp_path_factory.mktemp("webvid")
    write_shard(path / "shards/a-000.tar", members(clips[:5]))
    write_shard(path / "shards/a-001.tar", members(clips[5:], 5))
    assert make(path) == {"train": COUNT - 1, "validation": 1}
    return path


def shots(work):
    return [
        (split, shot)
        for split in ("train", "validation")
        for shot in read_shots(work / "webvid" / split / "shots.jsonl")
    ]


def test_every_clip_is_a_shot_with_its_caption(work):
    found = shots(work)
    assert len({shot.shot_id for _, shot in found}) == COUNT
    captions = {f"a square moves {n}" for n in range(COUNT)}
    assert {shot.action for _, shot in found} == captions
    for split, shot in found:
        assert shot.split == split and shot.turn == 0 and shot.instruction is None
        frames = read_video(work / "webvid" / split / shot.clip, FRAMES)
        assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert sum(split == "validation" for split, _ in found) == 1


def test_motion_is_measured_and_its_levels_too(work):
    found = sorted((shot for _, shot in shots(work)), key=lambda shot: shot.action)
    assert found[-1].motion_scope > found[0].motion_scope > 0
    assert {shot.motion_level for shot in found} == {1, 2, 3, 4, 5}
    edges = [
        json.loads((work / "webvid" / split / "world.json").read_text())["level_edges"]
        for split in ("train", "validation")
    ]
    assert edges[0] == edges[1] == sorted(edges[0]) and len(edges[0]) == 4


def test_a_second_run_cuts_nothing_again(work, monkeypatch):
    def fail(*_):
        raise AssertionError("cut again")

    before = {p: p.read_bytes() for p in (work / "webvid").rglob("*.json*")}
    monkeypatch.setattr(captioned, "_cut", fail)
    make(work)
    assert {p: p.read_bytes() for p in (work / "webvid").rglob("*.json*")} == before


def test_an_interrupted_run_goes_on(clips, work, tmp_path, monkeypatch):
    write_shard(tmp_path / "shards/a-000.tar", members(clips[:5]))
    write_shard(tmp_path / "shards/a-001.tar", members(clips[5:], 5))
    cut, done = captioned._cut, []

    def dying(sample, config, clips):
        if len(done) == 6:
            raise KeyboardInterrupt
        done.append(sample.key)
        return cut(sample, config, clips)

    monkeypatch.setattr(captioned, "_cut", dying)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    assert not (tmp_path / "webvid/train/shots.jsonl").exists()
    ledger = tmp_path / "webvid/train/captioned.jsonl"
    ledger.write_text(ledger.read_text() + '{"shot_id": "cut sho')  # killed while it wrote
    monkeypatch.setattr(captioned, "_cut", cut)
    make(tmp_path)
    assert [shot for _, shot in shots(tmp_path)] == [shot for _, shot in shots(work)]
    for split, shot in shots(work):
        ours, theirs = (p / "webvid" / split / shot.clip for p in (tmp_path, work))
        assert ours.read_bytes() == theirs.read_bytes()


def test_only_as_many_as_are_asked_for(work, tmp_path, clips):
    write_shard(tmp_path / "shards/a.tar", members(clips))  # whose names hold one of them out
    assert make(tmp_path, "data.captioned_clips=6") == {"train": 6, "validation": 1}
    assert make(tmp_path, "data.captioned_clips=7")["train"] == 7, "a later run takes more"


def test_clips_of_another_size_are_refused(work):
    with pytest.raises(CaptionedError, match=r"captioned.jsonl was written with .*'height': 32"):
        make(work, "shot.height=48")


def test_a_folder_will_do(clips, tmp_path):
    for n, content in enumerate(clips):
        folder = tmp_path / "shards" / f"part{n % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.mp4").write_bytes(content)
        (folder / f"{n}.txt").write_text(f"a square moves {n}")
    assert make(tmp_path) == {"train": COUNT - 1, "validation": 1}
    assert {shot.action for _, shot in shots(tmp_path)} == {
        f"a square moves {n}" for n in range(COUNT)
    }


def test_what_cannot_be_used_is_counted_with_its_reason(clips, tmp_path):
    short = video(tmp_path / "short.mp4", 1, seconds=0.3)
    write_shard(
        tmp_path / "shards/a.tar",
        [
            *members(clips),
            ("bad/1.mp4", clips[0]),
            ("bad/2.mp4", clips[0]),
            ("bad/2.json", b"{"),
            ("bad/3.txt", b"no picture"),
            ("bad/4.mp4", b"no video"),
            ("bad/4.txt", b"words"),
            ("bad/5.mp4", short),
            ("bad/5.txt", b"words"),
        ],
    )
    found = make(tmp_path)
    assert found.pop("train") == COUNT - 1 and found.pop("validation") == 1
    assert found["no caption"] == 2 and found["no video"] == 1
    assert any(reason.startswith("is no video or is damaged") for reason in found)
    assert any(reason.startswith("lasts 0.29 s, expected 0.50 s") for reason in found)


def test_a_damaged_shard_is_named(clips, tmp_path):
    shard = tmp_path / "shards/a.tar"
    write_shard(shard, members(clips))
    shard.write_bytes(shard.read_bytes()[: -len(shard.read_bytes()) // 3])
    with pytest.raises(CaptionedError, match=r"a\.tar is damaged or cut short behind '00000"):
        make(tmp_path)
    with pytest.raises(CaptionedError, match=r"no directory .*data\.captioned"):
        list(read_samples(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptionedError, match=r"neither \*\.tar nor videos"):
        list(read_samples(tmp_path / "empty"))
    write_shard(tmp_path / "shards/a.tar", [("1.txt", b"words alone")])
    with pytest.raises(CaptionedError, match="no clip of .* can be used: 1 x no video"):
        make(tmp_path, f"data.train={tmp_path / 'other'}")


def test_names_in_a_shard_cannot_leave_the_directory(clips, tmp_path):
    assert Sample("a", "../../evil", b"", "").clip_id.isalnum()
    write_shard(tmp_path / "shards/a.tar", [(f"../../{n}", c) for n, c in members(clips)])
    make(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards", "webvid"]


# ---- training


@pytest.fixture
def fresh_accelerator():
    """Accelerate remembers the first precision of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_pre_training_takes_twenty_steps(work, tmp_path, fresh_accelerator):
    """Shard, features, training: the full configuration at toy sizes, with LoRA."""
    checkpoint = make_checkpoint(tmp_path / "tiny")
    make_video_base(checkpoint, HEIGHT, WIDTH, FRAMES)
    backbones = ("autoencoder", "image_encoder", "text_encoder", "video_base")
    arguments = [
        "--config",
        str(CONFIG),
        *settings(work),
        *(f"backbones.{name}={checkpoint}/backbones/{name}" for name in backbones),
        f"backbones.text_tokens={N_TEXT}",
        f"backbones.visual_tokens={N_VISUAL}",
        "backbones.image_height=16",
        "backbones.image_width=24",
        "decoder.lora.rank=2",
        "decoder.motion_scope_hidden=8",
        f"train.run={tmp_path / 'run'}",
        "train.steps=20",
        "train.save_every=20",
        "train.precision=no",
        "train.threads=1",
        "train.log_every=1",
        "train.validate_every=20",
        "train.validation_batches=1",
        "train.samples=1",
        "train.warmup_steps=1",
        "sampling.steps=2",
    ]
    importlib.import_module("data_pipeline.features").main(arguments)
    importlib.import_module("scripts.train_stage1").main(arguments)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 20 and np.isfinite(losses).all()
    state = json.loads((tmp_path / "run/step_0000020/state.json").read_text())
    assert state["finished"] is True
    export = tmp_path / "run/step_0000020/export"
    assert (export / "decoder/adapter/adapter_model.safetensors").is_file()
    assert (export / "encoder").is_dir()
