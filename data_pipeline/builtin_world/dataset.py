"""Draws games to disk: ``clips/*.mp4``, ``shots.jsonl`` and ``world.json``.

A game is finished when its records lie in ``parts/``; a rerun skips finished games, and the
records are put together at the end, in the order of the games, whoever drew them.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from animegamer.atomic import write_text
from animegamer.records import Shot, read_shots, write_jsonl
from data_pipeline.builtin_world.attributes import LANDMARKS, SCARVES
from data_pipeline.builtin_world.games import SKILLED, Game, TurnPlan, generate_game
from data_pipeline.builtin_world.looks import LOOKS
from data_pipeline.builtin_world.motions import MOTIONS, SOLO, TRAVEL
from data_pipeline.builtin_world.places import PLACES, TIMES
from data_pipeline.builtin_world.renderer import FPS, FRAMES, render
from data_pipeline.builtin_world.words import ADVERBS, LANGUAGES

log = logging.getLogger(__name__)
LEVELS_FILE = Path(__file__).with_name("levels.json")
CLIP_QUALITY = {"crf": 5, "pixel_format": "yuv444p"}


@dataclass(frozen=True)
class Job:
    """What to draw.

    Attributes:
        out: Folder to write to.
        split: train, validation or test.
        games: Number of games.
        seed: Seed of the data set.
        kind: Kind of games, see ``games.generate_game``.
        height: Frame height in pixels.
        width: Frame width in pixels.
        workers: Processes that draw.
    """

    out: Path
    split: str
    games: int
    seed: int = 0
    kind: str = "mixed"
    height: int = 64
    width: int = 96
    workers: int = 1


@lru_cache(maxsize=1)
def edges() -> tuple[float, ...]:
    """The committed borders between the five motion levels."""
    return tuple(json.loads(LEVELS_FILE.read_text(encoding="utf-8"))["level_edges"])


def world_facts(height: int, width: int) -> dict[str, object]:
    """What a reader of the data should know about the world, as written to ``world.json``."""
    return {
        "level_edges": list(edges()),
        "height": height,
        "width": width,
        "frames": FRAMES,
        "fps": FPS,
        "films": {name: look.film for name, look in LOOKS.items()},
        "motions": list(MOTIONS),
        "travel_motions": sorted(TRAVEL),
        "solo_motions": sorted(SOLO),
        "places": list(PLACES),
        "times": list(TIMES),
        "scarves": list(SCARVES),
        "landmarks": list(LANDMARKS),
        "skills": {motion: list(owners) for motion, owners in SKILLED.items()},
        "languages": list(LANGUAGES),
        "adverbs": {str(level): words["en"][0] for level, words in ADVERBS.items()},
    }


def shot_record(game: Game, plan: TurnPlan, clip: str, scope: float) -> Shot:
    """The record of one drawn turn.

    Args:
        game: The game.
        plan: The turn.
        clip: Path of the video, relative to the records.
        scope: Its measured motion scope.
    """
    from animegamer.motion import level_of

    scene = plan.scene
    return Shot(
        shot_id=f"{game.name}-t{plan.turn:03d}",
        film=LOOKS[scene.characters[0]].film,
        split=game.split,
        episode=game.name,
        turn=plan.turn,
        clip=clip,
        instruction=plan.instruction,
        action=plan.action,
        motion_scope=round(scope, 4),
        motion_level=level_of(scope, edges()),
        change=plan.change,
        language=plan.language,
        labels={
            "characters": list(scene.characters),
            "motion": scene.motion,
            "adverb": ADVERBS[scene.intensity]["en"][0] if plan.instruction else "",
            "intensity": scene.intensity if plan.instruction else 0,
            "place": scene.place,
            "time_of_day": scene.time,
        },
        hidden={
            "heroes": list(game.heroes),
            "scarves": dict(game.attributes.scarves),
            "vehicle": game.attributes.vehicle,
            "landmark": game.attributes.landmark,
            "start_slots": list(scene.start_slots()),
            "end_slots": list(scene.end_slots()),
        },
        seed=game.seed,
    )


def draw_game(job: Job, index: int) -> str:
    """Draws one game's clips and writes its records to ``parts/``; returns the game's name."""
    from animegamer.motion import motion_scope
    from animegamer.video import write_video

    game = generate_game(job.split, index, job.seed, job.kind)
    records = []
    for plan in game.turns:
        frames = render(plan.scene, job.height, job.width)
        clip = f"clips/{game.name}-t{plan.turn:03d}.mp4"
        write_video(job.out / clip, frames, FPS, **CLIP_QUALITY)
        records.append(shot_record(game, plan, clip, motion_scope(frames)))
    write_jsonl(job.out / "parts" / f"{game.name}.jsonl", records)
    return game.name


def _draw(task: tuple[Job, int]) -> str:
    return draw_game(*task)


def _one_thread() -> None:
    import cv2

    cv2.setNumThreads(1)


def _drawn(job: Job, todo: list[int]) -> Iterator[str]:
    tasks = [(job, index) for index in todo]
    if job.workers <= 1 or len(tasks) <= 1:
        _one_thread()
        yield from map(_draw, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(job.workers, initializer=_one_thread) as pool:
        yield from pool.imap_unordered(_draw, tasks, chunksize=1)


def draw(job: Job) -> Path:
    """Draws every game that is not finished yet.

    Args:
        job: What to draw.

    Returns:
        The path of ``shots.jsonl``.

    Raises:
        ValueError: If the folder holds clips of another size.
    """
    from tqdm import tqdm

    facts = world_facts(job.height, job.width)
    world = job.out / "world.json"
    if world.is_file():
        found = json.loads(world.read_text(encoding="utf-8"))
        if found != json.loads(json.dumps(facts)):
            raise ValueError(f"{world} was written with other settings; draw into another folder")
    write_text(world, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    names = [generate_game(job.split, index, job.seed, job.kind).name for index in range(job.games)]
    finished = _finished(job.out)
    todo = [index for index, name in enumerate(names) if name not in finished]
    log.info("%d games, %d of them finished before", job.games, job.games - len(todo))
    for _ in tqdm(_drawn(job, todo), total=len(todo), unit="game", desc=f"{job.split} games"):
        pass
    return _collect(job.out)


def _finished(out: Path) -> set[str]:
    names = {path.stem for path in (out / "parts").glob("*.jsonl")}
    shots = out / "shots.jsonl"
    if shots.is_file():
        names |= {shot.episode for shot in read_shots(shots)}
    return names


def _collect(out: Path) -> Path:
    """Puts the parts into ``shots.jsonl``, ordered by game and turn, then removes them."""
    shots_file = out / "shots.jsonl"
    records = read_shots(shots_file, hidden=True) if shots_file.is_file() else []
    parts = sorted((out / "parts").glob("*.jsonl"))
    for part in parts:
        records += read_shots(part, hidden=True)
    unique = {record.shot_id: record for record in records}
    write_jsonl(shots_file, sorted(unique.values(), key=lambda shot: (shot.episode, shot.turn)))
    for part in parts:
        part.unlink()
    if (out / "parts").is_dir():
        (out / "parts").rmdir()
    return shots_file
