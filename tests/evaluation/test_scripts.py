"""The evaluation scripts on a few games of the built-in world, played by one who cannot err."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from animegamer import drawing, session
from animegamer.evaluation import decoder_only, evaluator
from animegamer.evaluation.games import GameSet
from animegamer.game import MotionScope
from animegamer.records import read_episodes, read_shots
from animegamer.video import read_video
from tests.evaluation import worlds
from tests.evaluation.worlds import FakeSession

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "autoencoder").write_bytes(b"first stage")
    return [
        f"evaluate.games={tmp_path}/test",
        f"evaluate.probes={tmp_path}/probes",
        f"evaluate.output={tmp_path}/out",
        "evaluate.count=1",
        "evaluate.window_games=1",
        "evaluate.skill_games=1",
        "evaluate.language_games=0",
        "evaluate.long_games=0",
        "evaluate.bootstrap=20",
        "evaluate.probe_games=8",
        "evaluate.probe_steps=2",
        "play.scripts=[]",
        f"backbones.autoencoder={tmp_path}/autoencoder",
    ]


@pytest.mark.slow
def test_evaluate_draws_trains_plays_judges_and_reports(settings, tmp_path, monkeypatch, capsys):
    opened = []

    def load(config):
        shots = [
            s
            for kind in ("standard", "skill")
            for s in read_shots(tmp_path / "test" / kind / "shots.jsonl")
        ]
        clips = {s.shot_id: tmp_path / "test" / s.episode.split("-")[1] / s.clip for s in shots}
        monkeypatch.setattr(FakeSession, "picture", lambda self, s: read_video(clips[s.shot_id]))
        opened.append(FakeSession(shots, config))
        return opened[-1]

    monkeypatch.setattr(session.GameSession, "load", load)
    monkeypatch.setattr(drawing, "with_checkpoint", lambda config: config)
    monkeypatch.setattr(evaluator, "weights", lambda checkpoint: "weights")
    arguments = ["--config", str(ROOT / "configs/tiny/evaluate.yaml"), *settings]
    assert script("evaluate").main(arguments) == 0
    printed = capsys.readouterr().out
    assert "hidden_attributes_window_1" in printed and "probe head" in printed
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["acc_s"]["value"] == 1 and metrics["acc_s"]["n"] == 10
    assert metrics["acc_f"]["value"] == 1, "drawn shots have the level that their records say"
    assert metrics["unseen_motion"]["n"] == 3
    assert set(metrics["probes"]["drawn"]) >= {"character", "motion", "place", "scarf"}
    for name in ("report.txt", "report.png", "contact_sheet.png"):
        assert (tmp_path / "out" / name).stat().st_size > 500
    assert script("evaluate").main(arguments) == 0
    assert opened[1].stepped == 4, "played sets are used again; only the stopwatch runs"


def test_decoder_alone(tmp_path, monkeypatch):
    shots = worlds.write_games(tmp_path, 2, 3)
    games = GameSet(
        "standard", tmp_path, tuple(read_episodes(tmp_path / "shots.jsonl", hidden=True))
    )
    asked = {}

    class Drawer:
        def draw_each(self, s_a, scopes, seeds):
            asked.update(scopes=scopes, seeds=seeds)
            wanted = {s.shot_id: s for s in shots}
            yield from (worlds.paint(wanted[i].labels, wanted[i].hidden) for i in s_a)

    def encode(frames, texts):
        assert len(frames) == len(texts) == 6
        return [s.shot_id for s in games.shots()]

    drawn, generated = decoder_only.redraw(
        Drawer(), SimpleNamespace(read=encode), tmp_path, games.shots(), seed=3
    )
    assert asked["scopes"] == [MotionScope(s.motion_level) for s in games.shots()]
    assert len(set(asked["seeds"])) == 6
    from animegamer.evaluation.truth import read_truth

    monkeypatch.setattr(
        decoder_only,
        "read_frames",
        lambda probe, frames, edges: [read_truth(s) for s in games.shots()],
    )
    figures, outcomes = decoder_only.judge_redrawn(None, (), games.shots(), drawn, generated, 20)
    assert figures["motion"].value == figures["acc_f"].value == 1 and len(outcomes) == 6
    assert figures["psnr_db"].value > 30, "the clips were compressed"
    assert figures["sharpness"].value == pytest.approx(1, abs=0.02)
    grey = [np.full_like(shot, 128) for shot in drawn]
    figures, _ = decoder_only.judge_redrawn(None, (), games.shots(), drawn, grey, 20)
    assert figures["psnr_db"].value < 20 and figures["sharpness"].value == 0


def test_unusable_settings_are_one_line_of_text(capsys):
    arguments = ["--config", str(ROOT / "configs/tiny/evaluate.yaml"), "evaluate.cuont=3"]
    for name in ("evaluate", "evaluate_decoder", "prepare_evaluation"):
        assert script(name).main(arguments) == 2
        assert "did you mean evaluate.count" in capsys.readouterr().err
