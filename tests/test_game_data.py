from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from animegamer.config import DataConfig
from animegamer.game import CharacterState, Instruction
from animegamer.game_data import GameDataset, collate
from animegamer.language import IGNORE, Language, add_special_tokens, load_tokenizer
from animegamer.records import Episode, Shot
from tests.tiny_game import NUM_TOKENS, instruction, make_base


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    tokenizer = load_tokenizer(make_base(tmp_path_factory.mktemp("base")))
    add_special_tokens(tokenizer, 8)
    return Language(tokenizer, NUM_TOKENS)


def episode(name, turns, *, opening, first=None):
    first = (0 if opening else 1) if first is None else first
    shots = []
    for turn in range(first, first + turns):
        opens = opening and turn == 0
        shots.append(
            Shot(
                shot_id=f"{name}_{turn}",
                film="one",
                split="train",
                episode=name,
                turn=turn,
                clip=f"{name}_{turn}.mp4",
                instruction=None if opens else instruction(turn),
                action="" if opens else "walk",
                motion_scope=1.0,
                motion_level=1 + turn % 5,
                change=None if opens else CharacterState(1, 2, -3),
            )
        )
    return Episode(name, tuple(shots))


GAMES = [
    episode("a", 8, opening=True),
    episode("b", 6, opening=False),
    episode("c", 1, opening=False),
    episode("d", 2, opening=True),
    episode("e", 5, opening=False, first=7),
]


def features(games=GAMES):
    random = np.random.default_rng(0)
    return {
        shot.shot_id: {
            "f_v": random.standard_normal((4, 3)).astype(np.float16),
            "f_md": random.standard_normal((2, 5)).astype(np.float16),
        }
        for game in games
        for shot in game.shots
    }


def dataset(language, seed=0, group=1, games=GAMES, **settings):
    config = DataConfig(**settings)
    return GameDataset(games, features(games), language, config, seed=seed, group=group)


def views(data, count=600):
    for position in range(count):
        shots, supervised = data.plan(position)
        yield [shot.turn for shot in shots], supervised, shots


def same(one, two):
    fields = ("ids", "position_ids", "branch", "slot", "query", "labels")
    return (
        one.shot_ids == two.shot_ids
        and all(np.array_equal(getattr(one.rendered, f), getattr(two.rendered, f)) for f in fields)
        and np.array_equal(one.f_v, two.f_v)
    )


def test_a_sample_depends_on_seed_and_index_alone(language):
    data, again = dataset(language), dataset(language)
    forwards = [data.sample(i) for i in range(40)]
    backwards = [again.sample(i) for i in reversed(range(40))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    other = dataset(language, seed=1)
    assert not all(same(a, other.sample(i)) for i, a in enumerate(forwards))


def test_global_random_state_is_left_alone(language):
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    dataset(language, group=4).batch(0, 4)
    assert np.array_equal(before[0], np.random.get_state()[1])
    assert torch.equal(before[1], torch.get_rng_state())


def test_every_turn_ends_a_subset_once_an_epoch(language):
    data = dataset(language)
    for epoch in range(3):
        start = epoch * len(data)
        ends = [data.plan(start + i)[0][-1].shot_id for i in range(len(data))]
        asked = {s.shot_id for game in GAMES for s in game.shots if s.instruction is not None}
        assert sorted(ends) == sorted(asked)


def test_lengths_are_those_asked_for(language):
    data = dataset(language, min_turns=2, max_turns=4)
    lengths = [len(turns) for turns, _, shots in views(data) if shots[-1].turn in (4, 5, 6)]
    assert set(lengths) == {2, 3, 4}
    for turns, _, _ in views(data):
        assert turns == list(range(turns[0], turns[-1] + 1))


def test_always_predicts_all_but_openings(language):
    for _, supervised, shots in views(dataset(language)):
        assert supervised == [shot.instruction is not None for shot in shots]


def test_game_start_predicts_what_the_view_explains(language):
    seen = set()
    for turns, supervised, shots in views(dataset(language, supervise_first="game_start")):
        assert any(supervised)
        assert len(turns) <= 5
        opens = shots[0].shot_id in {"b_1", "c_1"}
        assert supervised[0] == opens
        assert all(supervised[1:])
        seen.add((shots[0].episode, turns[0], len(turns)))
    assert {("a", 0, 2), ("b", 1, 1), ("c", 1, 1), ("d", 0, 2), ("e", 7, 2)} <= seen


def test_a_share_of_the_subsets_is_one_turn_without_its_history(language):
    alone = list(views(dataset(language, alone_share=1.0, supervise_first="game_start")))
    assert all(len(turns) == 1 and supervised == [True] for turns, supervised, _ in alone)
    assert {turns[0] for turns, _, _ in alone} > {1, 2, 3}
    some = [len(turns) for turns, _, _ in views(dataset(language, alone_share=0.5, min_turns=2))]
    assert 0.3 < np.mean(np.array(some) == 1) < 0.7


def test_the_sink_keeps_the_first_turn_in_view(language):
    data = dataset(language, sink_share=1.0, supervise_first="game_start", min_turns=3)
    skipped = 0
    for turns, supervised, shots in views(data):
        assert len(turns) <= 5
        if turns[-1] - turns[0] >= len(turns):
            skipped += 1
            assert shots[0].shot_id in {"a_0", "b_1", "e_7"}
            assert turns[1:] == list(range(turns[1], turns[-1] + 1))
            assert supervised[:2] == [turns[0] == 1, False]
            assert all(supervised[2:])
    assert skipped > 100
    assert all(
        turns == list(range(turns[0], turns[-1] + 1))
        for turns, _, _ in views(dataset(language, sink_share=0.0))
    )


def test_grouping_reorders_within_a_pool_and_saves_padding(language):
    games = [episode(f"g{i}", 8, opening=i % 2 == 0) for i in range(20)]
    plain = dataset(language, games=games)
    grouped = dataset(language, games=games, group=4)
    pool = 64
    for start in (0, pool):
        ids = [sorted(d.sample(start + i).shot_ids for i in range(pool)) for d in (plain, grouped)]
        assert ids[0] == ids[1]

    def padding(data):
        batches = [data.batch(4 * i, 4) for i in range(32)]
        return np.mean([(b.branch < 0).float().mean().item() for b in batches])

    assert padding(grouped) < 0.3 * padding(plain)
    assert same(grouped.sample(70), dataset(language, games=games, group=4).sample(70))


def test_a_batch_holds_what_it_says(language):
    data = dataset(language)
    batch = data.batch(0, 5)
    samples = [data.sample(i) for i in range(5)]
    turns = max(len(s.shot_ids) for s in samples)
    assert batch.f_v.shape == (5, turns, 4, 3)
    assert batch.f_md.shape == (5, turns, 2, 5)
    assert batch.f_v.dtype == torch.float32
    assert batch.s_a is None
    store = features()
    for b, sample in enumerate(samples):
        size = len(sample.rendered)
        assert batch.turn_mask[b].tolist() == [t < len(sample.shot_ids) for t in range(turns)]
        for t, shot_id in enumerate(sample.shot_ids):
            assert np.array_equal(batch.f_v[b, t].half().numpy(), store[shot_id]["f_v"])
        assert batch.f_v[b, len(sample.shot_ids) :].abs().sum() == 0
        assert batch.ids[b, :size].tolist() == sample.rendered.ids.tolist()
        assert (batch.branch[b, size:] == -1).all()
        assert (batch.labels[b, size:] == IGNORE).all()
        used = batch.query[b].max() // NUM_TOKENS
        assert used < len(sample.shot_ids)
    moved = batch.to("cpu")
    assert moved.s_a is None
    assert torch.equal(moved.ids, batch.ids)


def test_collate_pads_to_the_longest(language):
    data = dataset(language)
    samples = [data.sample(i) for i in range(6)]
    assert collate(samples).ids.shape[1] == max(len(s.rendered) for s in samples)
    assert collate(samples[:1]).ids.shape[1] == len(samples[0].rendered)


def test_a_sample_keeps_its_seed_wherever_it_is_put(language):
    plain, grouped = dataset(language), dataset(language, group=4)
    seeds = [set(d.batch(0, 64).seeds) for d in (plain, grouped)]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 64
    assert plain.batch(0, 4).to("cpu").seeds == plain.batch(0, 64).seeds[:4]


def test_a_dataset_travels_to_workers(language):
    data = dataset(language, group=4)
    assert pickle.dumps(data)
    again = copy.deepcopy(data)
    assert all(same(data.sample(i), again.sample(i)) for i in range(8))


def test_missing_features_are_named(language):
    store = features()
    del store["a_3"], store["b_2"]
    with pytest.raises(KeyError, match="features of 2 of 22 shots are missing.*a_3"):
        GameDataset(GAMES, store, language, DataConfig())


def test_too_long_an_instruction_names_its_shot(language):
    shot = dataclasses.replace(
        GAMES[2].shots[0], instruction=Instruction(("Nilo",), "walk " * 400, "town")
    )
    with pytest.raises(ValueError, match="shot 'c_1': instruction of"):
        GameDataset([Episode("c", (shot,))], features(), language, DataConfig())


def test_nothing_to_predict_is_an_error(language):
    with pytest.raises(ValueError, match="no turn to predict"):
        dataset(language, games=[episode("z", 1, opening=True)])
    with pytest.raises(ValueError, match="no turn to predict"):
        dataset(language, games=[GAMES[4]], max_turns=1, supervise_first="game_start")
