"""A whole evaluation with a perfect player, bad ones, and a judge that knows the truth."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from animegamer.config import Config, EvaluateConfig, PlayConfig
from animegamer.evaluation import benchmark, evaluator, games, judge, report
from animegamer.evaluation.contact_sheet import contact_sheet, spread
from animegamer.evaluation.truth import TruthError, World, read_truth
from animegamer.records import read_shots
from tests.evaluation.worlds import SHOT, FakeSession, paint, write_games

WINDOW = 3
NAMES = {
    "acc_s",
    "mae_s",
    "acc_f",
    "mae_f",
    "time_of_day",
    "background",
    "character",
    "motion",
    "hidden_attributes",
    "hidden_attributes_window_1",
    "hidden_attributes_chance",
    "hidden_attributes_beyond_window",
    "cross_film",
    "language_change",
    "unseen_character",
    "unseen_motion",
    "autoencoder_psnr_db",
    "sharpness",
    "long_game_change",
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Games on disk, a configuration, and a judge who recognises every painted picture."""
    sets = {
        kind: write_games(tmp_path / "test" / kind, 4, turns, seed)
        for kind, turns, seed in (("standard", 6, 1), ("skill", 6, 2))
    }
    shots = [shot for group in sets.values() for shot in group]
    truth = {paint(s.labels, s.hidden).tobytes(): read_truth(s) for s in shots}
    painted = {(kind, s.clip): paint(s.labels, s.hidden) for kind in sets for s in sets[kind]}
    monkeypatch.setattr(judge, "read_video", lambda p: painted[p.parts[-3], "/".join(p.parts[-2:])])
    monkeypatch.setattr(
        judge, "read_frames", lambda probe, frames, edges: [truth[f.tobytes()] for f in frames]
    )
    probes = tmp_path / "probes"
    probes.mkdir()
    (probes / "probe.safetensors").write_bytes(b"eyes")
    (tmp_path / "autoencoder").write_bytes(b"first stage")
    evaluate = EvaluateConfig(
        games=str(tmp_path / "test"),
        probes=str(probes),
        output=str(tmp_path / "out"),
        count=4,
        window_games=2,
        skill_games=4,
        language_games=0,
        long_games=0,
        bootstrap=50,
    )
    config = Config(shot=SHOT, play=PlayConfig(window=WINDOW), evaluate=evaluate)
    config = replace(
        config, backbones=replace(config.backbones, autoencoder=str(tmp_path / "autoencoder"))
    )
    return config, sets, World.read(tmp_path / "test" / "standard")


def run(world, session=None):
    config, sets, facts = world
    results, frames = {}, {}
    for name, chosen in games.game_sets(config.evaluate).items():
        kind = "skill" if name == "skill" else "standard"
        player = session or FakeSession(sets[kind], config)
        judging = evaluator.Evaluator(config, player, None, facts.edges, "weights")
        results[name], played = judging.evaluate(chosen)
        frames[name] = played.frames
        if name == "standard":
            accuracy = judging.accuracy
    return benchmark.figures(results, facts, WINDOW, 50), results, frames, accuracy


def test_perfect_player_reaches_the_ceiling_everywhere(world):
    figures, results, _, accuracy = run(world)
    assert NAMES <= set(figures)
    for name in NAMES - {
        "mae_s",
        "mae_f",
        "language_change",
        "long_game_change",
        "hidden_attributes_chance",
        "autoencoder_psnr_db",
    }:
        assert figures[name].value == pytest.approx(1), name
        assert figures[name].n > 0
    assert figures["mae_s"].value == figures["mae_f"].value == 0
    assert figures["long_game_change"].n == figures["language_change"].n == 0
    assert figures["motion"].chance < 0.7 and figures["motion"].ceiling == 1
    assert figures["hidden_attributes_chance"].value < 1
    assert figures["hidden_attributes"].n > figures["hidden_attributes_window_1"].n
    assert accuracy["drawn"]["motion"] == accuracy["reconstructed"]["scarf"] == 1
    assert [row["n"] for row in benchmark.levels_table(results["standard"], 10)][3:] == [0, 0]


def test_second_run_judges_nothing_again(world, monkeypatch):
    first, *_ = run(world)
    monkeypatch.setattr(judge, "read_frames", None)
    second, *_ = run(world)
    assert first == second


def test_player_who_always_gives_the_first_shot_is_caught(world, monkeypatch):
    config, sets, _ = world

    class Stuck(FakeSession):
        def step_batch(self, games, instructions):
            states = super().step_batch(games, instructions)
            first = sets["standard"][1]
            return [replace(s, shot=paint(first.labels, first.hidden)) for s in states]

    monkeypatch.setattr(judge, "_CHUNK", 3)
    figures, *_ = run_standard(world, Stuck(sets["standard"], config))
    assert figures["acc_s"].value == 1
    assert figures["character"].value < 0.6
    assert figures["hidden_attributes"].value < 0.8


def run_standard(world, session):
    config, _, facts = world
    only = replace(config.evaluate, skill_games=0, window_games=0)
    judging = evaluator.Evaluator(config, session, None, facts.edges, "weights")
    result, played = judging.evaluate(games.game_sets(only)["standard"])
    return benchmark.figures({"standard": result}, facts, WINDOW, 50), result, played


def test_missing_shots_count_as_wrong(world):
    config, sets, _ = world
    session = FakeSession(sets["standard"], config)
    session.fail = {("test-standard-000", 1)}
    figures, result, _ = run_standard(world, session)
    assert figures["character"].value == figures["acc_s"].value == pytest.approx(3 / 4)
    assert figures["character"].n == 24
    assert "MISSING" in report.caption(result.given[0])


def test_too_few_games_are_an_error(world):
    config, _, _ = world
    with pytest.raises(TruthError, match="holds 4 games, expected 9"):
        games.game_sets(replace(config.evaluate, count=9))


def test_weights_ignore_the_readme(tmp_path):
    (tmp_path / "mllm").mkdir()
    (tmp_path / "mllm" / "a").write_bytes(b"1")
    before = evaluator.weights(tmp_path)
    (tmp_path / "README.md").write_text("new")
    assert evaluator.weights(tmp_path) == before
    (tmp_path / "mllm" / "a").write_bytes(b"2")
    assert evaluator.weights(tmp_path) != before


def test_report_files(world, tmp_path):
    figures, results, frames, accuracy = run(world)
    text = report.table(figures)
    assert len(text.splitlines()) == len(figures) + 2
    assert "1.000 to 1.000" in text and "reconstructed" in report.probes_table(accuracy)
    report.write_metrics(tmp_path / "metrics.json", figures, {"probes": accuracy})
    stored = json.loads((tmp_path / "metrics.json").read_text())
    assert NAMES <= set(stored)
    assert all({"value", "low", "high", "n"} <= set(stored[name]) for name in NAMES)
    standard = results["standard"]
    levels = benchmark.levels_table(standard, 10)
    assert "ceiling" in report.levels_text(levels)
    drawn = [paint(s.labels, s.hidden) for s in standard.games.shots()]
    report.draw_report(
        tmp_path / "report.png", figures, standard, levels, drawn, frames["standard"]
    )
    assert Image.open(tmp_path / "report.png").size[0] > 500


def test_contact_sheet_is_unpicked(tmp_path):
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(100, 4) == [12, 37, 62, 87]
    shots = [np.full((17, 8, 12, 3), i, np.uint8) for i in range(6)]
    contact_sheet(shots, shots, ["a"] * 6, tmp_path / "s.png", count=3, columns=2)
    sheet = np.asarray(Image.open(tmp_path / "s.png"))
    assert sheet.shape[1] == 2 * (8 * 12 + 4) + 4
    assert {1, 3, 5} <= set(np.unique(sheet))
    with pytest.raises(ValueError, match="same number"):
        contact_sheet(shots, shots[:2], ["a"] * 6, tmp_path / "s.png")


def test_long_set_judges_its_ends_alone(world, tmp_path):
    config, _, facts = world
    shots = write_games(tmp_path / "test" / "long", 1, 100, 5)
    assert len(read_shots(tmp_path / "test" / "long" / "shots.jsonl")) == 101
    only = replace(config.evaluate, count=0, window_games=0, skill_games=0, long_games=1)
    ends = games.game_sets(only)["long"]
    assert [s.turn for s in ends.shots()] == [*range(1, 11), *range(91, 101)]
    outcomes = judge.outcomes(
        ends, judge.Judged([read_truth(s) if s.turn < 96 else None for s in ends.shots()], [], [])
    )
    result = benchmark.SetResult(ends, outcomes, [], ([], []), [])
    figure = benchmark.figures({"long": result}, facts, WINDOW, 20)["long_game_change"]
    assert figure.value == pytest.approx(0.5) and figure.n == 20
    assert shots
