"""Memory presets of play: each that a CPU can run plays the same game; loading makes no copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

from animegamer import config as configuration
from animegamer.checkpoint import CheckpointError
from animegamer.config import ConfigError, MemoryConfig
from animegamer.drawing import ShotDrawer, precision
from animegamer.game import Instruction, MotionScope
from animegamer.models.backbones import load_autoencoder
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.mistral import quantisation
from animegamer.placement import Placement, placement
from animegamer.session import GameSession
from tests.tiny_checkpoint import N_TEXT, N_VISUAL, D, make_checkpoint, tiny_config

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "configs/full/memory").glob("*.yaml"))
GAME = [
    Instruction(("Nilo",), "run", "day town"),
    Instruction(("Mavi", "Nilo"), "gently talk", "night forest"),
    Instruction(("Juno",), "run", "night town"),
]
FRAMES, HEIGHT, WIDTH = 9, 16, 24
PICTURE = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)


def make_autoencoder(directory, height, width):
    torch.manual_seed(0)
    AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_height=height,
        sample_width=width,
    ).save_pretrained(directory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint whose autoencoder and decoder are of CogVideoX's kind."""
    directory = make_checkpoint(tmp_path_factory.mktemp("memory") / "tiny")
    make_autoencoder(directory / "backbones" / "autoencoder", HEIGHT, WIDTH)
    AnimationDecoder(
        num_attention_heads=2,
        attention_head_dim=D // 2,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        num_layers=3,
        sample_width=WIDTH // 8,
        sample_height=HEIGHT // 8,
        sample_frames=FRAMES,
        patch_size=1,
        max_text_seq_length=N_TEXT + N_VISUAL,
        motion_scope_hidden=8,
    ).save_pretrained(directory / "decoder")
    return directory


def settings(checkpoint, memory, **play):
    config = tiny_config(checkpoint, checkpoint, memory=memory, history="reencoded", **play)
    config = replace(config, shot=configuration.ShotConfig(FRAMES, 8, HEIGHT, WIDTH))
    configuration.save(config, checkpoint / "config.yaml")
    return config


def play(config):
    session = GameSession.load(config)
    session.open(PICTURE)
    return [session.step(instruction) for instruction in GAME]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The game with everything where it stays."""
    return play(settings(checkpoint, MemoryConfig()))


def on_cpu(path):
    """A preset's memory section, its devices replaced by the CPU."""
    memory = configuration.load(path).play.memory
    devices = {f"{part}_device": None for part in ("mllm", "decoder", "reader")}
    return replace(memory, **devices)


def test_there_are_presets_for_the_usual_cards():
    names = {path.stem for path in PRESETS}
    assert {"one_8gb", "one_24gb", "one_24gb_int8", "one_large", "two_24gb"} <= names
    kinds = {path.stem: configuration.load(path).play for path in PRESETS}
    assert all(play.precision == "bf16" for play in kinds.values())
    halves = {name: play.decoder_precision for name, play in kinds.items()}
    assert halves.pop("one_large") == "bf16" and set(halves.values()) == {"fp16"}
    two = kinds["two_24gb"].memory
    assert two.mllm_device != two.decoder_device


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_plays_the_same_game(checkpoint, expected, path):
    memory = on_cpu(path)
    if memory.mllm_weights != "plain":
        with pytest.raises(ConfigError, match="needs a GPU, but the MLLM's device is cpu"):
            GameSession.load(settings(checkpoint, memory))
        memory = replace(memory, mllm_weights="plain")  # all but the quantisation
    memory = replace(memory, autoencoder_tiling=False)  # the picture would be smaller than a tile
    played = play(settings(checkpoint, memory))
    for state, same in zip(played, expected, strict=True):
        assert (state.change, state.motion_scope) == (same.change, same.motion_scope)
        np.testing.assert_allclose(state.s_a, same.s_a, atol=1e-5)
        assert abs(state.shot.astype(int) - same.shot.astype(int)).max() <= 1


def test_tiles_and_slices_give_nearly_the_same_picture(tmp_path):
    make_autoencoder(tmp_path, 96, 160)  # tiles of 48 x 80
    backbones = configuration.BackbonesConfig(autoencoder=str(tmp_path))
    whole, tiles, slices = (
        load_autoencoder(backbones, **options)
        for options in ({}, {"tiling": True}, {"slicing": True})
    )
    latents = torch.randn(2, 1, 4, 12, 20)
    video = whole.decode(latents)
    torch.testing.assert_close(slices.decode(latents), video)
    tiled = tiles.decode(latents)
    assert tiled.shape == video.shape == (2, 3, 1, 96, 160)
    # Normalisation sees a tile where it saw the picture: close, not equal.
    assert 0 < (tiled - video).abs().mean() < 0.2 * video.std()


def test_what_takes_turns_is_on_its_device_only_then(monkeypatch):
    network = torch.nn.Linear(2, 2)
    place = Placement("cpu", "turns")
    assert place.settle(network) is network
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    before = [p.data_ptr() for p in network.parameters()]
    with place.working(network):
        assert not set(before) & {p.data_ptr() for p in network.parameters()}
    assert [p.data_ptr() for p in network.parameters()] == before
    with pytest.raises(RuntimeError, match="no"), place.working(network):
        raise RuntimeError("no")
    assert [p.data_ptr() for p in network.parameters()] == before
    with Placement("cpu", "stays").working(network):
        assert [p.data_ptr() for p in network.parameters()] == before


def test_by_layers_only_what_computes_is_there(checkpoint, monkeypatch):
    session = GameSession.load(settings(checkpoint, MemoryConfig(mllm="layers")))
    mistral = session.mllm.mistral
    there = []

    def linear(x, weight, bias=None):
        there.append([p for p in mistral.model.layers.parameters() if not p.is_meta])
        return compute(x, weight, bias)

    compute = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    session.step(GAME[0])
    assert max(map(len, there)) == 1
    assert not mistral.lm_head.weight.is_meta
    assert not session.mllm.input_projection[0].weight.is_meta


@pytest.mark.parametrize(
    ("play", "part", "message"),
    [
        ({"device": "cuda:7"}, "mllm", "play.device is cuda:7, but torch sees . GPUs"),
        ({"memory": MemoryConfig(decoder_device="cuda:9")}, "decoder", "decoder_device is cuda:9"),
        ({"device": "gpu"}, "reader", "play.device is 'gpu', expected a torch device"),
    ],
)
def test_a_device_that_is_not_there_is_named(play, part, message):
    with pytest.raises(ConfigError, match=message):
        placement(configuration.PlayConfig(**play), part)


def test_quantising_needs_a_gpu_and_bitsandbytes(monkeypatch):
    assert quantisation("plain", torch.bfloat16, "cpu") is None
    with pytest.raises(ConfigError, match=r"mllm_weights is nf4, which needs a GPU"):
        quantisation("nf4", torch.bfloat16, "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes: pip install"):
        quantisation("int8", torch.bfloat16, "cuda")
    with pytest.raises(ConfigError, match="a quantised MLLM stays on its device"):
        configuration.load(overrides=["play.memory.mllm_weights=int8", "play.memory.mllm=turns"])


def test_the_tiny_autoencoder_has_no_tiles(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("patch") / "tiny")
    backbones = tiny_config(directory, directory).backbones
    with pytest.raises(ConfigError, match="autoencoder_tiling is true, but PatchAutoencoder"):
        load_autoencoder(backbones, tiling=True)


# ---- precision


def test_precision_of_the_parts():
    def types(**play):
        config = replace(configuration.Config(), play=configuration.PlayConfig(**play))
        return [precision(config, part) for part in ("mllm", "decoder", "reader", "autoencoder")]

    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert types() == [full, full, full, full]
    assert types(precision="bf16") == [brain, brain, brain, full]
    assert types(precision="fp16") == [half, half, full, full]  # T5 overflows in float16
    assert types(precision="bf16", decoder_precision="fp16") == [brain, half, brain, full]
    assert types(precision="bf16", decoder_precision="no") == [brain, full, brain, full]
    assert types(autoencoder_precision="fp16") == [full, full, full, half]


def test_a_decoder_in_float16_draws_nearly_the_same(checkpoint, expected):
    half = {"decoder_precision": "fp16", "autoencoder_precision": "fp16"}
    drawer = ShotDrawer.load(settings(checkpoint, MemoryConfig(), **half))
    for network in (drawer.decoder, drawer.autoencoder):
        assert {p.dtype for p in network.parameters()} == {torch.float16}
    shot = drawer.draw([expected[0].s_a], [expected[0].motion_scope], [(0, 1)])[0]
    assert abs(shot.astype(int) - expected[0].shot.astype(int)).mean() < 2


def test_numbers_that_are_not_finite_say_what_to_do(checkpoint, expected):
    drawer = ShotDrawer.load(settings(checkpoint, MemoryConfig(), decoder_precision="fp16"))
    with torch.no_grad():  # beyond what float16 holds, as a wide activation would be
        drawer.decoder.proj_out.weight.fill_(60000.0)
        drawer.decoder.proj_out.bias.fill_(60000.0)
    words = r"sampling step 1 of 2, with weights in float16: set play.decoder_precision=bf16"
    with pytest.raises(FloatingPointError, match=words):
        drawer.draw([expected[0].s_a], [MotionScope(3)], [(0, 1)])


# ---- loading

LOAD = """
import json, sys, threading, time
import torch
from animegamer.models.decoder_files import load_decoder
from animegamer.models.mllm import NextStateMLLM

torch.set_num_threads(1)
load_decoder(sys.argv[1] + "/warm", dtype=torch.float16)  # what is imported on the way

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def watch():
    while not done.is_set():
        seen.append(anonymous())
        time.sleep(0.003)

for name in ("decoder", "lora"):
    seen, done, before = [], threading.Event(), anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    network = load_decoder(f"{sys.argv[1]}/{name}", dtype=torch.float16)
    done.set()
    thread.join()
    size = sum(p.nbytes for p in network.parameters())
    print(json.dumps({"size": size, "peak": max(seen) - before}))
    del network
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads Linux's /proc")
def test_loading_a_decoder_takes_its_size_once(tmp_path):
    """From float16 files to float16 weights, whole and as LoRA on a base."""
    from diffusers import CogVideoXTransformer3DModel

    from animegamer.config import LoraConfig
    from animegamer.models.decoder_files import add_lora, save_decoder

    def sizes(width):
        return {
            "num_attention_heads": width // 64,
            "attention_head_dim": 64,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 64,
            "num_layers": 3,
            "sample_width": 8,
            "sample_height": 8,
        }

    text = {"text_embed_dim": 16, "max_text_seq_length": 10}
    CogVideoXTransformer3DModel(**sizes(768), **text).half().save_pretrained(tmp_path / "base")
    for name, width in (("warm", 64), ("decoder", 768)):
        AnimationDecoder(**sizes(width), max_text_seq_length=10).half().save_pretrained(
            tmp_path / name
        )
    decoder = AnimationDecoder.from_base(tmp_path / "base", 10, True, 16, dtype=torch.float16)
    add_lora(decoder, LoraConfig(2, 1.0), tmp_path / "base")
    decoder.requires_grad_(False)
    decoder.ofs_embedding.requires_grad_(True)
    save_decoder(decoder, tmp_path / "lora")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["size"] > 40e6
        assert found["peak"] < 1.2 * found["size"] + 5e6, "a second copy"


def test_a_part_that_cannot_be_loaded_is_still_named(checkpoint):
    config = settings(checkpoint, MemoryConfig(mllm="turns"))
    missing = replace(config, play=replace(config.play, checkpoint=str(checkpoint / "none")))
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        GameSession.load(missing)
