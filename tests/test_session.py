"""Play with small fakes in place of the networks, then with real ones of tiny random weights."""

from __future__ import annotations

import dataclasses
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from animegamer.checkpoint import CheckpointError
from animegamer.config import Config, ConfigError, PlayConfig, SamplingConfig, ShotConfig
from animegamer.drawing import ShotDrawer, ShotReader, with_checkpoint
from animegamer.game import CharacterState, Instruction, InstructionError, MotionScope
from animegamer.models.mllm import Prediction
from animegamer.opening import OpeningError
from animegamer.session import GameSession
from animegamer.video import write_video
from animegamer.vocabulary import Vocabulary
from tests.tiny_checkpoint import make_checkpoint, tiny_config

N, D, FRAMES, HEIGHT, WIDTH = 3, 4, 5, 8, 12
NILO = Instruction(("Nilo",), "run", "day town")
MAVI = Instruction(("Mavi", "Nilo"), "gently talk", "night forest")


class FakeMLLM:
    """Answers with a function of instruction and visible history; remembers what it saw."""

    def __init__(self):
        self.seen = []
        self.language = self

    def text_ids(self, instruction):
        if "<img>" in instruction.motion:
            raise InstructionError("reserved word <img>")

    def predict(self, histories, instructions):
        self.seen.append(histories)
        states = []
        for history, instruction in zip(histories, instructions, strict=True):
            base = zlib.crc32(str(instruction).encode()) % 7
            past = sum(turn.state.s_a * (i + 1) for i, turn in enumerate(history))
            states.append(np.tanh(np.full((N, D), 0.1 * base, np.float32) + 0.5 * past))
        levels = [MotionScope(1 + len(history) % 5) for history in histories]
        changes = [CharacterState(1, 0, -len(history) % 5) for history in histories]
        return Prediction(torch.from_numpy(np.stack(states)), levels, changes)


class FakeDecoder(torch.nn.Module):
    """Latents of noise, representation and motion scope."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.broken = False

    def sample(self, s_a, f_ms, s_a_null, sampling, schedule, generators):
        if self.broken:
            raise RuntimeError("out of memory")
        self.batches.append(len(s_a))
        noise = torch.stack([torch.randn(2, generator=g) for g in generators])
        return torch.cat([noise, s_a.mean((1, 2))[:, None], f_ms[:, None]], 1)


class FakeAutoencoder(torch.nn.Module):
    """Grey ramps that tell the latents apart."""

    def decode(self, latents):
        grey = torch.sin(latents.sum(1))[:, None, None, None, None]
        ramp = torch.linspace(0, 0.2, FRAMES)[None, None, :, None, None]
        return (grey * 0.7 + ramp).expand(-1, 3, FRAMES, HEIGHT, WIDTH)


class FakeReader:
    """s_a of the mean colour and the length of the text."""

    def __init__(self):
        self.read_texts = []

    def read(self, frames, texts):
        self.read_texts += texts
        values = [f.mean() / 255 + 10 * len(t) for f, t in zip(frames, texts, strict=True)]
        return np.stack([np.full((N, D), value, np.float32) for value in values])


def session(*, draw=True, vocabulary=None, **play):
    config = Config(
        shot=ShotConfig(FRAMES, 8, HEIGHT, WIDTH),
        sampling=SamplingConfig(batch_size=2),
        play=PlayConfig(**play),
    )
    drawer = None
    if draw:
        drawer = ShotDrawer(config, FakeDecoder(), FakeAutoencoder(), torch.zeros(N, D))
    reader = FakeReader()
    made = GameSession(config, FakeMLLM(), drawer, lambda: reader, vocabulary)
    made.reader_for_tests = reader
    return made


def picture(value, height=HEIGHT, width=WIDTH):
    return np.full((height, width, 3), value, np.uint8)


def test_a_turn_gives_the_whole_state_and_moves_the_meters():
    played = session()
    state = played.step(MAVI)
    assert state.motion_scope == MotionScope(1)
    assert state.change == CharacterState(1, 0, 0)
    assert state.s_a.shape == (N, D) and state.s_a.dtype == np.float32
    assert state.shot.shape == (FRAMES, HEIGHT, WIDTH, 3) and state.shot.dtype == np.uint8
    triple = {"stamina": 55, "social": 45, "entertainment": 45}
    assert played.meters.values == {"Mavi": triple, "Nilo": triple}
    assert played.game.turn == 1


def test_nothing_is_drawn_without_a_drawer():
    assert session(draw=False).step(NILO).shot is None


@pytest.mark.parametrize(
    ("window", "sink", "seen"),
    [(1, 0, []), (3, 0, [4, 5]), (3, 1, [0, 5]), (5, 0, [2, 3, 4, 5]), (9, 1, [0, 1, 2, 3, 4, 5])],
)
def test_the_model_sees_the_window_and_the_sink(window, sink, seen):
    played = session(draw=False, window=window, sink=sink)
    played.open(picture(100))
    for turn in range(1, 7):
        played.step(Instruction(("Nilo",), f"run {turn}", "town"))
    turns = [
        0 if turn.instruction is None else int(turn.instruction.motion.split()[1])
        for turn in played.mllm.seen[-1][0]
    ]
    assert turns == seen


def test_a_batch_is_played_like_single_games():
    asked = [NILO, MAVI, Instruction(("Juno",), "fly", "night beach")]
    together = session(seed=5)
    games = [together.new_game(picture(40 * i)) for i in range(3)]
    batches = [together.step_batch(games, asked[turn:] + asked[:turn]) for turn in range(3)]
    for i in range(3):
        alone = session(seed=5)
        alone.open(picture(40 * i))
        for turn in range(3):
            state = alone.step((asked[turn:] + asked[:turn])[i])
            np.testing.assert_array_equal(state.s_a, batches[turn][i].s_a)
            np.testing.assert_array_equal(state.shot, batches[turn][i].shot)
        assert alone.meters == games[i].meters
    assert together.drawer.decoder.batches == [2, 1] * 3


def test_noise_follows_from_seed_and_turn():
    def shots(seed):
        played = session(seed=seed, window=1)
        return [played.step(NILO).shot for _ in range(2)]

    first, second = shots(1)
    assert (first != second).any()
    np.testing.assert_array_equal(first, shots(1)[0])
    assert (first != shots(2)[0]).any()
    assert (first != shots(-3)[0]).any()


def test_a_snapshot_is_untouched_by_later_turns_and_can_be_used_twice():
    played = session(seed=3)
    played.open(picture(9))
    played.step(NILO)
    saved = played.game.snapshot()
    after = [played.step(MAVI), played.step(NILO)]
    for _ in range(2):
        played.game.restore(saved)
        assert played.game.turn == 1
        assert played.meters.values == saved.meters.values
        again = [played.step(MAVI), played.step(NILO)]
        for one, other in zip(after, again, strict=True):
            np.testing.assert_array_equal(one.shot, other.shot)
            assert one.change == other.change
    assert list(saved.meters.values) == ["Nilo"]


@pytest.mark.parametrize("history", ["predicted", "reencoded"])
def test_a_failing_decoder_leaves_the_games_as_they_were(history):
    played = session(history=history)
    games = [played.new_game(picture(0)), played.new_game()]
    played.step_batch(games, [NILO, MAVI])
    before = [game.snapshot() for game in games]
    played.drawer.decoder.broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        played.step_batch(games, [MAVI, NILO])
    for game, old in zip(games, before, strict=True):
        assert (game.turn, game.meters) == (old.turn, old.meters)
        assert all(a is b for a, b in zip(game.history.turns, old.history.turns, strict=True))
    played.drawer.decoder.broken = False
    played.step_batch(games, [MAVI, NILO])
    assert [game.turn for game in games] == [2, 2]


def test_a_shot_that_is_not_finite_is_no_turn():
    played = session()
    played.drawer.s_a_null = torch.zeros(N, D)
    played.mllm.predict = lambda h, i: Prediction(
        torch.full((1, N, D), torch.nan), [MotionScope(1)], [CharacterState(0, 0, 0)]
    )
    with pytest.raises(FloatingPointError):
        played.step(NILO)
    assert played.game.turn == 0 and played.meters.values == {}


def test_a_reencoded_past_is_what_was_drawn():
    played = session(history="reencoded")
    shot = played.step(NILO).shot
    played.step(MAVI)
    (turn,) = played.mllm.seen[-1][0]
    expected = FakeReader().read(shot[:1], [NILO.motion])[0]
    np.testing.assert_array_equal(turn.state.s_a, expected)
    assert turn.state.shot is None
    assert played.reader_for_tests.read_texts == ["run", "gently talk"]


def test_a_predicted_past_is_what_was_predicted():
    played = session()
    state = played.step(NILO)
    played.step(MAVI)
    np.testing.assert_array_equal(played.mllm.seen[-1][0][0].state.s_a, state.s_a)


def test_a_reencoded_past_needs_shots():
    with pytest.raises(ConfigError, match="reencoded"):
        session(draw=False, history="reencoded")


def test_a_hundred_turns_keep_no_more_than_the_window():
    played = session(window=5, sink=1)
    played.open(picture(1))
    used = []
    tracemalloc.start()
    for _ in range(120):
        played.step(NILO)
        played.mllm.seen.clear()
        played.drawer.decoder.batches.clear()
        used.append(tracemalloc.get_traced_memory()[0])
        assert len(played.game.history.turns) <= 6
    tracemalloc.stop()
    assert all(turn.state.shot is None for turn in played.game.history.turns)
    assert used[-1] - used[20] < 20 * FRAMES * HEIGHT * WIDTH * 3  # 100 turns, under 20 shots
    assert all(0 <= value <= 100 for value in played.meters.values["Nilo"].values())


def test_a_restart_forgets_everything():
    played = session(seed=8)
    first = played.step(MAVI).shot
    played.step(NILO)
    played.restart()
    assert played.game.turn == 0 and played.meters.values == {}
    assert played.game.history.turns == []
    np.testing.assert_array_equal(played.step(MAVI).shot, first)


def test_sessions_share_nothing():
    one, other = session(), session()
    one.step(NILO)
    assert other.meters.values == {} and other.game.history.turns == []


def test_a_game_stands_in_a_batch_once_and_has_one_instruction():
    played = session()
    with pytest.raises(ValueError, match="one instruction for each"):
        played.step_batch([played.game, played.game], [NILO, MAVI])
    with pytest.raises(ValueError, match="one instruction for each"):
        played.step_batch([played.game], [])
    assert played.step_batch([], []) == []


def test_games_of_different_length_are_played_together():
    played = session()
    games = [played.new_game(), played.new_game()]
    turns = played.play(games, [[NILO] * 3, [MAVI]])
    assert [(i, asked) for i, asked, _ in turns] == [(0, NILO), (1, MAVI), (0, NILO), (0, NILO)]
    assert [game.turn for game in games] == [3, 1]


def test_an_instruction_that_cannot_be_played_is_found_before_the_first_turn():
    played = session()
    asked = [NILO, Instruction(("Nilo",), "<img>", "town")]
    with pytest.raises(InstructionError, match="<img>"):
        list(played.play([played.game], [asked]))
    assert played.game.turn == 0


def test_one_character_in_several_spellings_has_one_set_of_meters():
    vocabulary = Vocabulary({"nilo": ("Nilo", "nilo", "尼洛")})
    played = session(vocabulary=vocabulary)
    for name in ("Nilo", "NILO", "尼洛", "Zed", "zed"):
        played.step(Instruction((name,), "run", "town"))
    assert list(played.meters.values) == ["Nilo", "Zed"]
    twice = Instruction(("nilo", "尼洛"), "run", "town")
    before = played.meters.values["Nilo"]["stamina"]
    played.step(twice)
    assert played.meters.values["Nilo"]["stamina"] == before + 5
    assert list(played.meters_of(played.game, twice)) == ["Nilo"]


def test_an_opening_is_cropped_and_never_squashed():
    wide = np.zeros((HEIGHT * 4, WIDTH * 8, 3), np.uint8)
    wide[:, WIDTH * 2 : WIDTH * 6] = 200  # the middle half
    state = session().open(wide)
    assert state.shot.shape == (1, HEIGHT, WIDTH, 3)
    assert (state.shot == 200).all()
    assert state.motion_scope is None and state.change is None
    tall = np.full((90, 5, 3), 7, np.uint8)
    assert session().open(tall).shot.shape == (1, HEIGHT, WIDTH, 3)


def test_an_opening_may_be_a_picture_or_a_video(tmp_path):
    Image.fromarray(picture(120, 64, 96)).convert("RGBA").save(tmp_path / "a.png")
    Image.fromarray(picture(120, 64, 96)).save(tmp_path / "a.jpg")
    write_video(tmp_path / "a.mp4", np.repeat(picture(120, 64, 96)[None], 30, 0))
    for name, frames in (("a.png", 1), ("a.jpg", 1), ("a.mp4", FRAMES)):
        played = session()
        state = played.open(tmp_path / name)
        assert len(state.shot) == frames
        assert abs(state.shot.astype(int) - 120).max() < 6
        assert played.reader_for_tests.read_texts == [""]


def test_a_bad_opening_leaves_the_game_unopened(tmp_path):
    played = session()
    (tmp_path / "bad.png").write_text("no picture")
    (tmp_path / "bad.mp4").write_text("no video")
    for name in ("bad.png", "bad.mp4"):
        with pytest.raises(OpeningError, match=name):
            played.open(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="none.png"):
        played.open(tmp_path / "none.png")
    with pytest.raises(OpeningError, match="uint8"):
        played.open(np.zeros((4, 4), np.float32))
    assert played.game.history.turns == []


def test_an_opening_comes_first_and_once():
    played = session()
    played.open(picture(1))
    with pytest.raises(ValueError, match="comes first"):
        played.open(picture(1))
    played.restart()
    played.step(NILO)
    with pytest.raises(ValueError, match="turn 1"):
        played.open(picture(1))


def test_a_representation_of_another_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match="different checkpoints"):
        session().drawer.draw(np.zeros((1, N + 1, D), np.float32), [MotionScope(1)], [(0, 1)])


# With real networks of tiny random weights.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def real(checkpoint):
    return GameSession.load(tiny_config(checkpoint, checkpoint, history="reencoded", sink=1))


def test_real_networks_play_a_game(real):
    real.restart(picture(50, 32, 48))
    for instruction in (NILO, MAVI, NILO):
        state = real.step(instruction)
        assert state.s_a.shape == (10, 48) and np.isfinite(state.s_a).all()
        assert state.shot.shape == (5, 16, 24, 3)
    assert [turn.instruction for turn in real.game.history.turns] == [None, NILO, MAVI, NILO]
    assert real.vocabulary.character("尼洛") == "Nilo"


def test_real_networks_play_a_batch_like_single_games(real):
    asked = [[NILO, MAVI], [MAVI, NILO], [MAVI, MAVI]]
    games = [real.new_game(picture(80 * i)) for i in range(3)]
    together = [(i, state) for i, _, state in real.play(games, asked)]
    for i in range(3):
        alone = [state for _, _, state in real.play([real.new_game(picture(80 * i))], [asked[i]])]
        for one, other in zip(alone, [s for j, s in together if j == i], strict=True):
            np.testing.assert_allclose(one.s_a, other.s_a, atol=1e-4)
            assert abs(one.shot.astype(int) - other.shot.astype(int)).max() <= 1
            assert (one.motion_scope, one.change) == (other.motion_scope, other.change)


def test_drawing_needs_no_mllm_and_gives_the_same_shots(real, checkpoint):
    drawer = ShotDrawer.load(tiny_config(checkpoint, checkpoint))
    real.restart()
    states = [real.step(NILO), real.step(MAVI)]
    shots = drawer.draw([s.s_a for s in states], [s.motion_scope for s in states], [(0, 1), (0, 2)])
    for shot, state in zip(shots, states, strict=True):
        assert abs(shot.astype(int) - state.shot.astype(int)).max() <= 1


def test_motion_scope_reaches_the_decoder(real):
    """Release: its web app feeds the social change to the decoder instead."""
    seen = []
    sample = real.drawer.decoder.sample
    real.drawer.decoder.sample = lambda s_a, f_ms, *rest: (
        seen.append(f_ms) or sample(s_a, f_ms, *rest)
    )
    try:
        real.restart()
        state = real.step(NILO)
    finally:
        del real.drawer.decoder.sample
    assert seen[0].tolist() == [state.motion_scope.scalar]


def test_bfloat16_halves_the_weights(checkpoint):
    played = GameSession.load(tiny_config(checkpoint, checkpoint, precision="bf16"))
    half = sum(p.numel() for p in played.mllm.parameters() if p.dtype == torch.bfloat16)
    assert half > 0.6 * sum(p.numel() for p in played.mllm.parameters())  # PEFT's LoRA is float32
    assert {p.dtype for p in played.drawer.decoder.parameters()} == {torch.bfloat16}
    played.open(picture(3))
    assert played.step(NILO).shot.shape == (5, 16, 24, 3)
    assert played.step(MAVI).s_a.dtype == np.float32


def test_the_checkpoints_own_model_part_is_played(checkpoint, caplog):
    config = Config(shot=ShotConfig(height=64, width=96), play=PlayConfig(str(checkpoint)))
    resolved = with_checkpoint(config)
    assert resolved.shot == ShotConfig(5, 8, 16, 24)
    assert resolved.backbones.text_encoder == str(checkpoint / "backbones" / "text_encoder")
    assert "shot.height: 64 -> 16" in caplog.text and "mllm" not in caplog.text


def damage(path, name):
    file = next(path.rglob(name))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file, content


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("decoder", "diffusion_pytorch_model.safetensors"),
        ("decoder", "null.safetensors"),
        ("decoder", "config.json"),
        ("mllm", "adapter_model.safetensors"),
        ("mllm", "mllm.json"),
        ("backbones/autoencoder", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_truncated_checkpoint_is_named(checkpoint, part, name):
    file, content = damage(checkpoint / part, name)
    try:
        with pytest.raises(CheckpointError, match=part.split("/")[-1]):
            GameSession.load(tiny_config(checkpoint, checkpoint))
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("part", ["encoder", "backbones/image_encoder", "backbones/text_encoder"])
def test_what_only_openings_need_is_loaded_for_them_alone(checkpoint, part):
    away = (checkpoint / part).rename(checkpoint / "away")
    try:
        played = GameSession.load(tiny_config(checkpoint, checkpoint), draw=False)
        played.step(NILO)
        played.restart()
        with pytest.raises(CheckpointError, match=part.split("/")[-1]):
            played.open(picture(1))
    finally:
        away.rename(checkpoint / part)


def test_a_decoder_with_a_weight_missing_is_refused(checkpoint):
    from safetensors.torch import load_file, save_file

    file = checkpoint / "decoder" / "diffusion_pytorch_model.safetensors"
    content = file.read_bytes()
    weights = load_file(file)
    del weights["proj_out.weight"]
    save_file(weights, file, {"format": "pt"})
    try:
        with pytest.raises(CheckpointError, match="proj_out.weight"):
            ShotDrawer.load(tiny_config(checkpoint, checkpoint))
    finally:
        file.write_bytes(content)


def test_a_missing_checkpoint_is_said(tmp_path):
    config = tiny_config(tmp_path / "none", tmp_path)
    for load in (GameSession.load, ShotDrawer.load, ShotReader.load):
        with pytest.raises(CheckpointError, match="none"):
            load(config)
    empty = dataclasses.replace(config, play=PlayConfig(str(tmp_path)))
    with pytest.raises(CheckpointError, match="mllm"):
        GameSession.load(empty)
