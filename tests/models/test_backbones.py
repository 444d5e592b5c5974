"""The frozen networks: padding, the right block, one interface for both scales, clear errors."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import CheckpointError
from animegamer.models.backbones import (
    CLIP_MEAN,
    CLIP_STD,
    load_autoencoder,
    load_image_encoder,
    load_text_encoder,
    preprocess,
)
from tests.tiny_checkpoint import N_TEXT, N_VISUAL, make_checkpoint, tiny_config


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return tiny_config(directory, directory / "unused").backbones


@pytest.fixture
def copied(backbones, tmp_path):
    """A copy of one network to damage, and the configuration that names it."""

    def copy(name):
        shutil.copytree(getattr(backbones, name), tmp_path / name)
        return tmp_path / name, replace(backbones, **{name: str(tmp_path / name)})

    return copy


# ---- T5


def test_texts_are_padded_and_cut_to_the_same_length(backbones):
    encoder = load_text_encoder(backbones)
    texts = ["", "run", "gently run and talk to each other in the forest by night"]
    states = encoder(texts)
    assert states.shape == (3, N_TEXT, 16) and not states.requires_grad
    for row, text in enumerate(texts):
        torch.testing.assert_close(encoder([text])[0], states[row], atol=1e-6, rtol=1e-5)


def test_a_long_text_keeps_its_beginning_and_its_end_token(backbones):
    encoder = load_text_encoder(replace(backbones, text_tokens=9))
    seen = {}

    def record(module, arguments, keywords):
        seen.update(keywords)

    encoder.model.register_forward_pre_hook(record, with_kwargs=True)
    encoder(["run", "run run run run run run run run run"])
    ids = seen["input_ids"].tolist()
    assert seen.keys() == {"input_ids"}  # no attention mask: padding counts (release)
    assert ids[0][-1] == 0 and 1 in ids[0] and ids[1][-1] == 1


def test_more_tokens_are_a_setting(backbones):
    assert load_text_encoder(replace(backbones, text_tokens=9))(["run"]).shape == (1, 9, 16)


def test_a_published_t5_may_hold_its_decoder(copied):
    directory, settings = copied("text_encoder")
    path = directory / "model.safetensors"
    extra = {"decoder.block.0.w": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    load_text_encoder(settings)
    save_file({**load_file(path), "visual.w": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="weight visual.w is unexpected"):
        load_text_encoder(settings)


# ---- CLIP


def test_clip_tokens_are_of_the_block_before_the_last(backbones):
    encoder = load_image_encoder(backbones)
    frames = torch.rand(2, 3, 16, 24) * 2 - 1
    tokens = encoder(frames)
    assert tokens.shape == (2, N_VISUAL, 16) and not tokens.requires_grad
    visual, seen = encoder.visual, {}
    for i, block in enumerate(visual.transformer.resblocks):
        block.register_forward_hook(lambda m, a, out, i=i: seen.update({i: out}))
    visual(preprocess(frames, 16, 24))
    assert len(seen) == 2
    torch.testing.assert_close(tokens, seen[0][:, 1:], atol=1e-5, rtol=1e-5)


def test_frames_of_the_right_size_are_only_normalised():
    frames = torch.rand(2, 3, 16, 24) * 2 - 1
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
    torch.testing.assert_close(preprocess(frames, 16, 24) * std + mean, (frames + 1) / 2)


@pytest.mark.parametrize("size", [(8, 12), (32, 48), (32, 12)])
def test_a_plain_colour_stays_plain_at_any_size(size):
    frames = torch.full((1, 3, *size), 0.25)
    pixels = preprocess(frames, 16, 24)
    assert pixels.shape == (1, 3, 16, 24)
    expected = (0.625 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
    torch.testing.assert_close(
        pixels, expected.view(1, 3, 1, 1).expand_as(pixels), atol=1e-5, rtol=0
    )


# ---- autoencoders


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("vae")
    AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_height=16,
        sample_width=24,
    ).save_pretrained(directory)
    return directory


def interface(autoencoder, scale):
    video = torch.rand(2, 3, 17, 16, 24) * 2 - 1
    latents = autoencoder.encode(video)
    assert latents.shape == (2, 5, 4, 2, 3) and not latents.requires_grad
    assert torch.equal(autoencoder.encode(video), latents)
    assert autoencoder.encode(video[:, :, :1]).shape == (2, 1, 4, 2, 3)
    decoded = autoencoder.decode(latents)
    assert decoded.shape == video.shape and decoded.abs().max() <= 1
    assert autoencoder.decode(1000 * latents).abs().max() == 1
    return video, latents / scale


@pytest.mark.parametrize("scale", [1.0, 1.15258426])
@torch.no_grad()
def test_both_autoencoders_have_one_interface(backbones, cogvideox, scale):
    tiny = load_autoencoder(replace(backbones, latent_scale=scale))
    video, latents = interface(tiny, scale)
    torch.testing.assert_close(tiny.model.encode(video), latents.transpose(1, 2))
    full = load_autoencoder(replace(backbones, autoencoder=str(cogvideox), latent_scale=scale))
    video, latents = interface(full, scale)
    moments, _ = full.model.encoder(video)  # all frames at once (release)
    mean = moments.chunk(2, 1)[0]
    torch.testing.assert_close(mean, latents.transpose(1, 2), atol=1e-5, rtol=1e-5)
    expected = full.model.decode(mean).sample.clamp(-1, 1)
    torch.testing.assert_close(full.decode(latents * scale), expected, atol=1e-5, rtol=1e-5)


def test_cogvideox_gives_back_the_papers_frames_and_the_releases_or_says_so(backbones, cogvideox):
    full = load_autoencoder(replace(backbones, autoencoder=str(cogvideox)))
    for frames, latent in ((1, 1), (17, 5), (16, 4)):
        latents = full.encode(torch.zeros(1, 3, frames, 16, 24))
        assert latents.shape == (1, latent, 4, 2, 3)
        assert full.decode(latents).shape == (1, 3, frames, 16, 24)
    with pytest.raises(ValueError, match="cannot give back 13 frames.*such as 17"):
        full.encode(torch.zeros(1, 3, 13, 16, 24))


# ---- what goes wrong

LOADERS = {
    "text_encoder": (load_text_encoder, "model.safetensors"),
    "image_encoder": (load_image_encoder, "open_clip_model.safetensors"),
    "autoencoder": (load_autoencoder, "diffusion_pytorch_model.safetensors"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_nothing_there_says_what_to_do(backbones, tmp_path, name):
    where = tmp_path / "none"
    with pytest.raises(CheckpointError, match=f"no .* at {where}: download or train it"):
        LOADERS[name][0](replace(backbones, **{name: str(where)}))


@pytest.mark.parametrize("damage", ["cut", "empty", "junk", "missing"])
@pytest.mark.parametrize("name", LOADERS)
def test_damaged_weights_are_named(copied, name, damage):
    loader, file = LOADERS[name]
    directory, settings = copied(name)
    content = (directory / file).read_bytes()
    if damage == "missing":
        (directory / file).unlink()
    else:
        parts = {"cut": content[:-50], "empty": b"", "junk": b"\x00" * 200}
        (directory / file).write_bytes(parts[damage])
    with pytest.raises(CheckpointError, match=f"{directory}: not a"):
        loader(settings)


@pytest.mark.parametrize("name", LOADERS)
def test_a_lost_weight_is_no_random_one(copied, name):
    loader, file = LOADERS[name]
    directory, settings = copied(name)
    weights = load_file(directory / file)
    lost = next(key for key in sorted(weights) if key.endswith("weight"))
    del weights[lost]
    save_file(weights, directory / file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"(?s){directory}.*{lost}"):
        loader(settings)


@pytest.mark.parametrize(
    ("name", "other"),
    [*itertools.permutations(LOADERS, 2), *((name, "language_base") for name in LOADERS)],
)
def test_a_foreign_network_is_refused(backbones, name, other):
    with pytest.raises(CheckpointError, match=getattr(backbones, other)):
        LOADERS[name][0](replace(backbones, **{name: getattr(backbones, other)}))


def test_an_autoencoder_of_an_unknown_class_is_named(copied):
    directory, settings = copied("autoencoder")
    about = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**about, "_class_name": "AutoencoderKL"}))
    with pytest.raises(CheckpointError, match="'AutoencoderKL', expected one of AutoencoderKLCog"):
        load_autoencoder(settings)
