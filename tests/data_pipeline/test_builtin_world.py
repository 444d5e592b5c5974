"""The built-in world's pictures: determined by the scene, recognisable, moving as asked."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from animegamer.motion import level_of, motion_scope
from data_pipeline.builtin_world.attributes import LANDMARKS, SCARVES, Attributes
from data_pipeline.builtin_world.calibrate import random_scene
from data_pipeline.builtin_world.dataset import edges
from data_pipeline.builtin_world.looks import CHARACTERS, LOOKS
from data_pipeline.builtin_world.motions import MOTIONS, SOLO
from data_pipeline.builtin_world.places import PLACES, TIMES
from data_pipeline.builtin_world.renderer import SceneSpec, render

SCENE = SceneSpec(("Mavi",), "wave", 3, "meadow", "day")


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Mean absolute difference of two uint8 arrays."""
    return float(np.abs(first.astype(int) - second).mean())


def test_shape_and_determinism() -> None:
    frames = render(SCENE)
    assert frames.shape == (17, 64, 96, 3) and frames.dtype == np.uint8
    assert np.array_equal(frames, render(SCENE))
    assert render(SCENE, 96, 144).shape == (17, 96, 144, 3)


def test_scene_does_not_depend_on_what_was_drawn_before() -> None:
    code = (
        "from tests.data_pipeline.test_builtin_world import SCENE, render;"
        "import zlib; print(zlib.crc32(render(SCENE).tobytes()))"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    import zlib

    for place in PLACES:
        render(replace(SCENE, place=place, motion="run"))
    assert int(fresh) == zlib.crc32(render(SCENE).tobytes())


def test_size_in_pixels_does_not_change_the_scene() -> None:
    from animegamer.video import resize

    assert difference(resize(render(SCENE, 128, 192), 64, 96), render(SCENE)) < 6


@pytest.mark.parametrize("first_frame", [True, False])
def test_every_choice_shows(first_frame: bool) -> None:
    """Characters, motions, places and times differ clearly from each other, also in frame 0."""
    cut = slice(0, 1) if first_frame else slice(None)
    for name, values, least in (
        ("characters", [(c,) for c in CHARACTERS], 2.0),
        ("motion", MOTIONS, 1.0),
        ("place", PLACES, 10.0),
        ("time", TIMES, 10.0),
    ):
        pictures = [render(replace(SCENE, **{name: value}))[cut] for value in values]
        for index, picture in enumerate(pictures):
            for other in pictures[:index]:
                assert difference(picture, other) > least, name


def test_intensity_and_slot_show_in_the_pictures() -> None:
    assert difference(render(SCENE), render(replace(SCENE, intensity=5))) > 1
    assert difference(render(SCENE), render(replace(SCENE, slot="right"))) > 5


def hue_count(frames: np.ndarray, color: tuple[int, int, int]) -> int:
    """Pixels of the first frame close to a colour."""
    return int((np.abs(frames[0].astype(int) - color).sum(-1) < 90).sum())


@pytest.mark.parametrize("name", CHARACTERS)
def test_scarf_shows_in_its_colour(name: str) -> None:
    for motion in ("stand", "walk", "talk"):
        scene = SceneSpec((name,), motion, 2, "beach", "day")
        bare = render(scene)
        for scarf, color in SCARVES.items():
            if color is None:
                continue
            worn = render(replace(scene, attributes=Attributes({name: scarf})))
            assert hue_count(worn, color) - hue_count(bare, color) > 35, (motion, scarf)
    other = next(c for c in CHARACTERS if c != name)
    assert np.array_equal(bare, render(replace(scene, attributes=Attributes({other: "red"}))))


@pytest.mark.parametrize("motion", sorted(SOLO))
def test_vehicle_shows_its_colour(motion: str) -> None:
    scene = SceneSpec(("Bruk",), motion, 2, "snow field", "day")
    for color in ("red", "green", "blue", "yellow"):
        frames = render(replace(scene, attributes=Attributes({}, color)))
        assert hue_count(frames, SCARVES[color]) > 80, color


@pytest.mark.parametrize("place", PLACES)
def test_landmark_shows_in_every_place_and_nobody_covers_it(place: str) -> None:
    for motion in ("stand", "jump", "run", "dance"):
        for slot in ("left", "right"):
            scene = SceneSpec(("Mavi",), motion, 2, place, "day", slot)
            pictures = [
                render(replace(scene, attributes=Attributes(landmark=mark)))[8]
                for mark in LANDMARKS
            ]
            for index, picture in enumerate(pictures):
                for other in pictures[:index]:
                    corner = np.abs(picture.astype(int) - other)[:24, 74:]
                    assert (corner.sum(-1) > 60).sum() > 60, (motion, slot)


def test_level_is_the_intensity() -> None:
    rng = random.Random(11)
    scenes = [random_scene(rng) for _ in range(120)]
    right = [level_of(motion_scope(render(s)), edges()) == s.intensity for s in scenes]
    assert np.mean(right) >= 0.95


def test_level_survives_flicker() -> None:
    import cv2

    rng, noise_rng = random.Random(5), np.random.default_rng(5)
    same = []
    for _ in range(40):
        frames = render(random_scene(rng))
        noise = np.empty(frames.shape, np.float32)
        for start, end in ((0, 1), (1, 5), (5, 9), (9, 13), (13, 17)):
            field = cv2.GaussianBlur(noise_rng.normal(0, 1, frames.shape[1:]), (0, 0), 2)
            noise[start:end] = field / field.std() * 2.5
        noisy = np.clip(np.rint(frames + noise), 0, 255).astype(np.uint8)
        same.append(
            level_of(motion_scope(frames), edges()) == level_of(motion_scope(noisy), edges())
        )
    assert np.mean(same) >= 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"motion": "swim"}, "swim"),
        ({"intensity": 6}, "6"),
        ({"slot": "top"}, "top"),
        ({"characters": ()}, "0"),
        ({"characters": ("Mavi", "Bruk"), "motion": "fly"}, "alone"),
    ],
)
def test_impossible_scenes_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SCENE, **change)


def test_two_films_of_three() -> None:
    films = [look.film for look in LOOKS.values()]
    assert sorted(set(films)) == ["Lantern Harbor", "Paper Comet"]
    assert all(films.count(film) == 3 for film in films)
