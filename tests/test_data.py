"""Batches by index: the same whoever asks, every shot once an epoch, dropout by its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from animegamer.data import ShotBatch, ShotDataset, Shuffle, sample_seed
from animegamer.features import FeatureStore, FeatureWriter
from animegamer.game import CharacterState, Instruction, MotionScope
from animegamer.records import Shot

COUNT = 7


def shot(number, turn=1):
    opening = turn == 0
    return Shot(
        shot_id=f"s{number}",
        film="film",
        split="train",
        episode=f"e{number}",
        turn=turn,
        clip="c.mp4",
        instruction=None if opening else Instruction(("Nilo",), "run", "day town"),
        action="" if opening else "run",
        motion_scope=1.0,
        motion_level=number % 5 + 1,
        change=None if opening else CharacterState(0, 1, -1),
    )


def arrays(number):
    return {
        "latents": np.full((3, 2, 2, 2), number, np.float16),
        "f_v": np.full((2, 4), number + 0.25, np.float16),
        "f_v_random": np.full((2, 4), number + 0.5, np.float16),
        "f_md": np.full((3, 5), number + 0.75, np.float16),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("features")
    writer = FeatureWriter(path, {}, 3)
    for number in range(COUNT):
        writer.add(f"s{number}", "", arrays(number))
    writer.flush()
    return FeatureStore(path)


SHOTS = [shot(number) for number in range(COUNT)]


def numbers(batch):
    return batch.latents[:, 0, 0, 0, 0].int().tolist()


# ---- order


def test_every_epoch_is_complete_and_another():
    order = Shuffle(COUNT, 3)
    epochs = [[order[e * COUNT + i] for i in range(COUNT)] for e in range(4)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_depends_on_seed_and_index_alone():
    forward, backward = Shuffle(COUNT, 3), Shuffle(COUNT, 3)
    indices = range(30)
    seen = {i: backward[i] for i in reversed(indices)}
    assert [forward[i] for i in indices] == [seen[i] for i in indices]
    assert [Shuffle(COUNT, 4)[i] for i in indices] != [forward[i] for i in indices]


def test_an_empty_dataset_is_an_error(store):
    with pytest.raises(ValueError, match="nothing to train on"):
        ShotDataset([shot(0, turn=0)], store, 0)


# ---- batches


def test_a_batch_holds_what_belongs_together(store):
    batch = ShotDataset(SHOTS, store, 0).batch(0, COUNT)
    assert sorted(numbers(batch)) == list(range(COUNT))
    assert batch.latents.shape == (COUNT, 3, 2, 2, 2)
    assert batch.f_v.shape == (COUNT, 2, 4) and batch.f_md.shape == (COUNT, 3, 5)
    assert batch.latents.dtype == batch.f_v.dtype == batch.f_ms.dtype == torch.float32
    for row, number in enumerate(numbers(batch)):
        assert batch.f_v[row, 0, 0] == number + 0.25
        assert batch.f_md[row, 0, 0] == number + 0.75
        assert batch.f_ms[row] == MotionScope(number % 5 + 1).scalar
    assert batch.text_kept.all() and batch.image_kept.all() and batch.s_a_hat is None


def test_batches_do_not_depend_on_how_they_are_cut(store):
    def dataset():
        return ShotDataset(SHOTS, store, 5, text_dropout=0.5, image_dropout=0.5)

    whole = dataset().batch(4, 6)
    later, sooner = dataset(), dataset()
    parts = [later.batch(8, 2), sooner.batch(4, 4)][::-1]
    assert numbers(whole) == [n for part in parts for n in numbers(part)]
    for name in ("text_kept", "image_kept"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(p, name) for p in parts]))


def test_first_frames_only(store):
    assert ShotDataset(SHOTS, store, 0).batch(0, 2, 1).latents.shape == (2, 1, 2, 2, 2)


def test_openings_are_left_out(store):
    dataset = ShotDataset([shot(0, turn=0), *SHOTS[1:]], store, 0)
    assert sorted(numbers(dataset.batch(0, COUNT - 1))) == list(range(1, COUNT))


def test_a_random_frame_gives_the_reference(store):
    batch = ShotDataset(SHOTS, store, 0, random_frame=True).batch(0, 3)
    assert [v - n for v, n in zip(batch.f_v[:, 0, 0].tolist(), numbers(batch), strict=True)] == (
        [0.5] * 3
    )


def test_predictions_are_read_beside(store, tmp_path):
    writer = FeatureWriter(tmp_path, {})
    for number in range(COUNT):
        writer.add(f"s{number}", "", {"s_a_hat": np.full((4, 6), -number, np.float16)})
    writer.flush()
    batch = ShotDataset(SHOTS, store, 0, predictions=FeatureStore(tmp_path)).batch(0, 4)
    assert batch.s_a_hat.shape == (4, 4, 6)
    assert (-batch.s_a_hat[:, 0, 0]).int().tolist() == numbers(batch)


def test_a_shot_without_features_is_named(store, tmp_path):
    with pytest.raises(KeyError, match=f"no features of 's{COUNT}' in"):
        ShotDataset([*SHOTS, shot(COUNT)], store, 0)
    writer = FeatureWriter(tmp_path, {})
    writer.add("s0", "", {"s_a_hat": np.zeros((1, 1))})
    writer.flush()
    with pytest.raises(KeyError, match=f"no features of 's1' in {tmp_path}"):
        ShotDataset(SHOTS, store, 0, predictions=FeatureStore(tmp_path))


def test_dropout_by_its_share_and_independently(store):
    dataset = ShotDataset(SHOTS, store, 1, text_dropout=0.3, image_dropout=0.1)
    batch = dataset.batch(0, 4000)
    text, image = ~batch.text_kept, ~batch.image_kept
    assert text.float().mean() == pytest.approx(0.3, abs=0.03)
    assert image.float().mean() == pytest.approx(0.1, abs=0.02)
    assert (text & image).float().mean() == pytest.approx(0.03, abs=0.012)


def test_dropout_differs_between_epochs(store):
    dataset = ShotDataset(SHOTS, store, 1, text_dropout=0.5)
    kept = {}
    for index in range(6 * COUNT):
        batch = dataset.batch(index, 1)
        kept.setdefault(numbers(batch)[0], set()).add(bool(batch.text_kept))
    assert any(len(values) == 2 for values in kept.values())


def test_every_sample_has_a_seed_of_its_own_in_any_batch(store):
    dataset = ShotDataset(SHOTS, store, 3)
    seeds = dataset.batch(0, 4 * COUNT).seeds
    assert len(set(seeds)) == 4 * COUNT  # another in every epoch
    assert dataset.batch(2, 3).seeds == seeds[2:5]
    assert seeds[2] == sample_seed(3, 2) != sample_seed(4, 2)
    moved = dataset.batch(2, 3).to(torch.device("meta"))
    assert moved.seeds == seeds[2:5]
    assert dataset.collate(dataset.shots[:2]).seeds == ()


def test_a_batch_moves_with_all_its_tensors(store):
    batch = ShotDataset(SHOTS, store, 0).batch(0, 2)
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, ShotBatch) and moved.s_a_hat is None
    assert all(getattr(moved, n).is_meta for n in ("latents", "f_v", "f_md", "f_ms", "text_kept"))
