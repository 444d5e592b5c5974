"""Probes learn a stand-in world, are saved and read, and see what is there."""

import numpy as np
import pytest
import torch

from animegamer.evaluation.probe_training import ProbeSettings, patch_basis, spoil, train_probe
from animegamer.evaluation.probes import (
    PICKS,
    UNKNOWN,
    ProbeError,
    Vocabulary,
    encode,
    head_accuracy,
    load_probe,
    pick,
    read_frames,
    save_probe,
    to_input,
    trained_with,
)
from animegamer.evaluation.truth import read_truth
from tests.evaluation.worlds import CHARACTERS, make_game, paint

EDGES = (1.0, 4.0, 9.0, 20.0)


def drawn(games, seed):
    shots = [s for g in range(games) for s in make_game(f"game-{g}", 9, seed)]
    return [paint(shot.labels, shot.hidden) for shot in shots], shots


@pytest.fixture(scope="module")
def trained():
    frames, shots = drawn(40, seed=1)
    settings = ProbeSettings(steps=220, batch_size=32, lr=8e-3, width=32)
    probe, about = train_probe(np.stack([pick(f) for f in frames]), shots, settings)
    return probe, about


def test_small_world_is_learnt_in_seconds(trained):
    probe, about = trained
    assert about["shots"] == 400 and about["steps"] == 220
    frames, shots = drawn(8, seed=2)
    accuracy = head_accuracy(read_frames(probe, frames, EDGES), shots)
    assert set(accuracy) == {
        "character",
        "motion",
        "place",
        "time_of_day",
        "scarf",
        "landmark",
        "vehicle",
    }
    assert min(accuracy.values()) > 0.7 and accuracy["character"] > 0.9, accuracy


def test_saved_probe_reads_the_same(trained, tmp_path):
    probe, about = trained
    save_probe(tmp_path, probe, {"made_of": {"games": 3}, **about})
    frames, _ = drawn(1, seed=3)
    again = load_probe(tmp_path)
    assert read_frames(again, frames, EDGES) == read_frames(probe, frames, EDGES)
    assert trained_with(tmp_path, {"games": 3}) and not trained_with(tmp_path, {"games": 4})


def test_missing_probe_says_what_to_run(tmp_path):
    with pytest.raises(ProbeError, match="prepare_evaluation.py"):
        load_probe(tmp_path)


def test_targets_are_unknown_where_a_shot_shows_nothing():
    shots = make_game("g", 9)
    names = Vocabulary.of([s for g in range(9) for s in make_game(f"h{g}", 9)])
    targets = encode(shots, names)
    for row, shot in enumerate(shots):
        truth = read_truth(shot)
        there = [c in truth.characters for c in names.characters]
        assert targets["present"][row].tolist() == [float(t) for t in there]
        assert [k != UNKNOWN for k in targets["scarf"][row].tolist()] == there
        assert (targets["vehicle"][row] == UNKNOWN) == (shot.labels["motion"] != "fly")
    assert names.characters == CHARACTERS


def test_scarfless_guest_is_a_known_answer():
    shot = make_game("g", 1)[1]
    names = Vocabulary.of([s for g in range(9) for s in make_game(f"h{g}", 9)])
    shot.labels["characters"] = ["Cy"]
    shot.hidden["scarves"] = {"Ada": "red"}
    target = encode([shot], names)["scarf"][0, names.characters.index("Cy")]
    assert names.scarves[int(target)] == "none"


def test_vocabulary_names_what_is_never_shown():
    shots = [s for s in make_game("g", 5) if s.labels["motion"] != "fly"]
    with pytest.raises(ProbeError, match="vehicles"):
        Vocabulary.of(shots)


def test_spoilt_shots_keep_their_size_and_range():
    frames, _ = drawn(2, seed=5)
    picked = np.stack([pick(f) for f in frames])
    assert picked.shape[1] == PICKS and np.array_equal(picked[:, -1], np.stack(frames)[:, -1])
    basis = patch_basis(picked)
    assert torch.allclose(basis.T @ basis, torch.eye(192), atol=1e-4)
    clean = to_input(picked)
    changes = []
    for seed in range(12):
        spoilt = spoil(clean, basis, torch.Generator().manual_seed(seed))
        assert spoilt.shape == clean.shape and 0 <= spoilt.min() and spoilt.max() <= 1
        changes.append(float((spoilt - clean).abs().mean()))
    assert min(changes) > 0.003 and max(changes) < 0.2
    again = spoil(clean, basis, torch.Generator().manual_seed(3))
    assert torch.equal(again, spoil(clean, basis, torch.Generator().manual_seed(3)))


def test_training_is_reproducible_and_checks_its_input():
    frames, shots = drawn(4, seed=6)
    picked = np.stack([pick(f) for f in frames])
    settings = ProbeSettings(steps=3, batch_size=8, width=16)
    one, two = (train_probe(picked, shots, settings)[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    with pytest.raises(ProbeError, match="expected one each"):
        train_probe(picked[:3], shots, settings)
