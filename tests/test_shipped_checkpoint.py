"""The checkpoint in the repository: it plays, remembers its limits, and its probes judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from animegamer import config as configuration
from animegamer.game import Instruction, read_script

ROOT = Path(__file__).parents[1]
LIMIT, FILE_LIMIT = 24_000_000, 15_000_000


@pytest.fixture(scope="module")
def config():
    config = configuration.load(ROOT / "configs/tiny/play.yaml", ["sampling.steps=4"])
    return replace(config, play=replace(config.play, checkpoint=str(ROOT / config.play.checkpoint)))


def test_it_fits_a_clone():
    files = [f for f in (ROOT / "checkpoints/tiny").rglob("*") if f.is_file()]
    sizes = {str(f): f.stat().st_size for f in files}
    assert sum(sizes.values()) <= LIMIT and max(sizes.values()) <= FILE_LIMIT


def test_it_plays_the_demo_s_first_turns(config):
    from animegamer.session import GameSession

    script = read_script(ROOT / "game_demo/demo.txt")
    session = GameSession.load(config)
    session.open(script.opening)
    states = [session.step(instruction) for instruction in script.instructions[:2]]
    for state in states:
        assert state.shot.shape == (17, 64, 96, 3) and state.shot.dtype == np.uint8
        assert state.shot.std() > 20 and np.isfinite(state.s_a).all()
    # Gently is level 1 and quickly level 4, by the world's own measure.
    assert [state.motion_scope.level for state in states] == [1, 4]
    assert not np.array_equal(states[0].shot, states[1].shot)


def test_resting_restores_and_running_tires(config):
    from animegamer.session import GameSession

    session = GameSession.load(config, draw=False)
    rest = session.step(Instruction(("Nilo",), "gently lie down", "night room"))
    session.restart()
    run = session.step(Instruction(("Nilo",), "furiously run", "day beach"))
    assert rest.change.stamina > 0 > run.change.stamina


def test_its_vocabulary_and_probes_are_whole():
    names = json.loads((ROOT / "checkpoints/tiny/vocabulary.json").read_text(encoding="utf-8"))
    assert len(names["characters"]) == 6 and len(names["motions"]) == 12
    from animegamer.evaluation.probes import load_probe

    assert load_probe(ROOT / "checkpoints/tiny/probes")
