"""Captioned clips to shots, for pre-training (paper C.1: 100,000 clips of WebVid).

Run: ``python -m data_pipeline.captioned --config configs/full/stage1_webvid.yaml``. Reads
``data.captioned``: WebDataset shards (``*.tar`` whose members ``key.mp4`` and ``key.txt`` or
``key.json`` belong together), or a directory of videos with their captions beside them. Of every
clip the middle two seconds become a shot: ``clips/*.mp4``, ``shots.jsonl`` and ``world.json`` in
``data.train``, every hundredth in ``data.validation``. The caption is the action text; the motion
levels are measured. Interrupt and run again at will: finished clips are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from animegamer.config import Config

logger = logging.getLogger(__name__)

VIDEOS = ("mp4", "webm", "mkv", "mov", "avi", "m4v")
_CAPTIONS = ("txt", "json")
_CAPTION_KEYS = ("caption", "text")
_HELD_OUT = 100  # every so many clips one is for validation


class CaptionedError(RuntimeError):
    """Captioned clips that cannot be used; the message says which and what to do."""


@dataclass(frozen=True)
class Sample:
    """One captioned clip as it lies in its source.

    Attributes:
        source: shard or directory that it comes from.
        key: its name there.
        video: content or file of the video, or None where there is none.
        caption: as written, empty where there is none.
    """

    source: str
    key: str
    video: bytes | Path | None
    caption: str

    @property
    def clip_id(self) -> str:
        """A name that files can have, the same in every run."""
        return hashlib.sha256(f"{self.source}/{self.key}".encode()).hexdigest()[:20]


def read_samples(source: str | Path) -> Iterator[Sample]:
    """Reads shards one after the other, or a directory of files, in the order of names.

    Raises:
        CaptionedError: no such directory, nothing in it, or a damaged shard.
    """
    directory = Path(source)
    if not directory.is_dir():
        raise CaptionedError(
            f"no directory {directory} (data.captioned): put WebDataset shards there, or videos "
            "with their captions beside them"
        )
    shards = sorted(directory.glob("*.tar"))
    if shards:
        for shard in shards:
            yield from _read_shard(shard)
        return
    files = sorted(path for path in directory.rglob("*") if _kind(path.name) in VIDEOS)
    if not files:
        raise CaptionedError(
            f"{directory} (data.captioned) holds neither *.tar nor videos ({', '.join(VIDEOS)})"
        )
    for file in files:
        found = {kind: file.with_suffix(f".{kind}") for kind in _CAPTIONS}
        texts = {kind: p.read_bytes() for kind, p in found.items() if p.is_file()}
        key = file.relative_to(directory).as_posix()
        yield Sample(directory.name, key, file, _caption(texts))


def _read_shard(shard: Path) -> Iterator[Sample]:
    """Members with one key follow each other (WebDataset); nothing is unpacked to disk."""
    key, parts = None, {}
    try:
        with tarfile.open(shard, "r|*") as archive:
            for member in archive:
                kind = _kind(member.name)
                if not member.isfile() or kind not in (*VIDEOS, *_CAPTIONS):
                    continue
                name = member.name[: -len(kind) - 1]
                if name != key:
                    if key is not None:
                        yield _sample(shard, key, parts)
                    key, parts = name, {}
                content = archive.extractfile(member)
                assert content is not None
                parts[kind] = content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CaptionedError(
            f"{shard} is damaged or cut short behind {key!r} ({error}): fetch it again or take it "
            "away; what came before it is kept"
        ) from None
    if key is not None:
        yield _sample(shard, key, parts)


def _sample(shard: Path, key: str, parts: dict[str, bytes]) -> Sample:
    video = next((parts[kind] for kind in VIDEOS if kind in parts), None)
    return Sample(shard.stem, key, video, _caption(parts))


def _kind(name: str) -> str:
    """What stands behind the last dot."""
    return name.rpartition(".")[2].lower()


def _caption(parts: dict[str, bytes]) -> str:
    """The caption of a text or JSON file in one line, empty where there is none to read."""
    try:
        if "txt" in parts:
            return " ".join(parts["txt"].decode("utf-8").split())
        tree = json.loads(parts["json"]) if "json" in parts else {}
        texts = [tree[key] for key in _CAPTION_KEYS if isinstance(tree.get(key), str)]
        return " ".join(texts[0].split()) if texts else ""
    except (ValueError, AttributeError):
        return ""


class Ledger:
    """What became of every clip so far, a line each, so that an interrupted run goes on.

    Args:
        path: the file.
        settings: of the clips; a ledger of others is refused.

    Raises:
        CaptionedError: if the clips there were made with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.rows = path, {}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole and whole[0] != settings:
            raise CaptionedError(
                f"{path} was written with {whole[0]}, the configuration says {settings}: delete "
                f"{path.parent}, or set data.train to another directory"
            )
        self.rows = {row["shot_id"]: row for row in whole[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        # What a killed run wrote of its last line goes.
        path.write_text("".join(json.dumps(row) + "\n" for row in (settings, *whole[1:])), "utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """Writes a line."""
        self.rows[row["shot_id"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _cut(sample: Sample, config: Config, clips: dict[str, Path]) -> dict[str, Any]:
    """Writes one shot and measures it; a clip that cannot be used is a row that says why."""
    from animegamer.motion import motion_scope
    from animegamer.video import VideoError, fit, sample_middle, write_video

    row: dict[str, Any] = {"shot_id": sample.clip_id, "source": sample.source, "key": sample.key}
    if not sample.caption:
        return {**row, "rejected": "no caption"}
    if sample.video is None:
        return {**row, "rejected": "no video"}
    video: Path | BinaryIO = (
        sample.video if isinstance(sample.video, Path) else io.BytesIO(sample.video)
    )
    shot = config.shot
    try:
        frames = fit(sample_middle(video, shot.frames, shot.fps), shot.height, shot.width)
    except VideoError as error:
        return {**row, "rejected": str(error)}
    # By name, so that a second run puts a clip where the first one did.
    row["split"] = "validation" if int(sample.clip_id, 16) % _HELD_OUT == 0 else "train"
    write_video(_clip_file(clips, row), frames, shot.fps)
    scope = round(motion_scope(frames), 4)
    return {**row, "caption": sample.caption, "motion_scope": scope}


def make_shots(config: Config) -> dict[str, int]:
    """Cuts ``data.captioned_clips`` training clips, and writes the records when all are there.

    Returns:
        How many clips are for training and for validation, and how many were rejected and why.

    Raises:
        CaptionedError: nothing to read, a damaged shard, or nothing that can be used.
    """
    from tqdm import tqdm

    data, shot = config.data, config.shot
    clips = {"train": Path(data.train), "validation": Path(data.validation)}
    settings = {name: getattr(shot, name) for name in ("frames", "fps", "height", "width")}
    ledger = Ledger(clips["train"] / "captioned.jsonl", settings)
    count = sum(row.get("split") == "train" for row in ledger.rows.values())
    with ThreadPoolExecutor(max(1, data.workers)) as pool, tqdm(unit="clip", initial=count) as bar:
        new = (s for s in read_samples(data.captioned) if s.clip_id not in ledger.rows)
        for samples in _chunks(new, 4 * max(1, data.workers)):
            if count >= data.captioned_clips:
                break
            for row in pool.map(lambda sample: _cut(sample, config, clips), samples):
                ledger.add(row)
                count += row.get("split") == "train"
                bar.update(row.get("split") == "train")
    rows = list(ledger.rows.values())
    rejected = Counter(row["rejected"] for row in rows if "rejected" in row)
    good = [row for row in rows if "split" in row]
    if not good:
        raise CaptionedError(f"no clip of {data.captioned} can be used: {_reasons(rejected)}")
    trained = [row for row in good if row["split"] == "train"][: data.captioned_clips]
    held_out = [row for row in good if row["split"] == "validation"]
    if not held_out:  # too few for one of every hundred
        trained, held_out = trained[1:], trained[:1]
    _write_records({"train": trained, "validation": held_out}, clips)
    if rejected:
        logger.warning("left out: %s", _reasons(rejected))
    return {"train": len(trained), "validation": len(held_out), **rejected}


def _reasons(rejected: Counter[str]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in rejected.most_common(5))


def _chunks(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _write_records(splits: dict[str, list[dict[str, Any]]], clips: dict[str, Path]) -> None:
    """``world.json`` with the measured level edges, then ``shots.jsonl``, of both splits."""
    from animegamer.atomic import write_text
    from animegamer.motion import level_edges, level_of
    from animegamer.records import Shot, write_jsonl

    scopes = [row["motion_scope"] for rows in splits.values() for row in rows]
    try:
        edges = [round(edge, 4) for edge in level_edges(scopes)]
    except ValueError as error:
        raise CaptionedError(f"{len(scopes)} clips do not tell motion levels: {error}") from None
    for split, rows in splits.items():
        write_text(clips[split] / "world.json", json.dumps({"level_edges": edges}) + "\n")
        shots = [
            Shot(
                shot_id=row["shot_id"],
                film=row["source"],
                split=split,
                episode=row["shot_id"],
                turn=0,
                clip=os.path.relpath(_clip_file(clips, row), clips[split]),
                instruction=None,
                action=row["caption"],
                motion_scope=row["motion_scope"],
                motion_level=level_of(row["motion_scope"], edges),
                change=None,
            )
            for row in sorted(rows, key=lambda row: row["shot_id"])
        ]
        write_jsonl(clips[split] / "shots.jsonl", shots)


def _clip_file(clips: dict[str, Path], row: dict[str, Any]) -> Path:
    return clips[row["split"]] / "clips" / f"{row['shot_id']}.mp4"


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/full/stage1_webvid.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    from animegamer.config import load

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for what, count in make_shots(load(options.config, options.overrides)).items():
        logger.info("%8d %s", count, what)


if __name__ == "__main__":
    main()
