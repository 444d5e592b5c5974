"""The decoder: the release's network and sampler, motion scope from zero, exact files."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import CheckpointError, load_model
from animegamer.config import DiffusionConfig, SamplingConfig
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.diffusion import add_noise, draw, signal_levels

TOKENS, WIDTH = 5, 32
SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 6,
    "sample_height": 4,
    "spatial_interpolation_scale": 1.0,
}
LATENTS = (5, 4, 4, 6)


def make(**settings):
    torch.manual_seed(0)
    settings = {"max_text_seq_length": TOKENS, "motion_scope_hidden": 8, **settings}
    return AnimationDecoder(**SIZES, **settings).eval()


def inputs(batch=2):
    return (
        torch.randn(batch, *LATENTS),
        torch.linspace(100, 900, batch),
        torch.randn(batch, TOKENS, WIDTH),
        torch.linspace(0.5, 40, batch),
    )


def with_scope(decoder):
    """The motion-scope MLP after some training."""
    torch.nn.init.normal_(decoder.ofs_embedding.linear_2.weight)
    return decoder


# ---- what it is


def test_defaults_are_the_release():
    with torch.device("meta"):
        decoder = AnimationDecoder()
    assert sum(p.numel() for p in decoder.parameters()) == 1_687_163_840


def test_shape_and_dependence():
    decoder = with_scope(make())
    z, t, s_a, f_ms = inputs()
    v = decoder.predict(z, t, s_a, f_ms)
    assert v.shape == (2, *LATENTS)
    for changed in (
        (z + 1, t, s_a, f_ms),
        (z, t + 50, s_a, f_ms),
        (z, t, s_a.flip(0), f_ms),
        (z, t, s_a, f_ms + 5),
    ):
        assert not torch.allclose(decoder.predict(*changed), v, atol=1e-4)


def test_one_latent_frame_is_enough():
    decoder = make()
    z, t, s_a, f_ms = inputs()
    assert decoder.predict(z[:, :1], t, s_a, f_ms).shape == (2, 1, *LATENTS[1:])


def test_gradient_checkpointing_changes_nothing():
    decoder = with_scope(make())
    arguments = inputs()
    plain = torch.autograd.grad(
        decoder.predict(*arguments).square().mean(), decoder.proj_out.weight
    )
    decoder.enable_gradient_checkpointing()
    decoder.train()
    saving = torch.autograd.grad(
        decoder.predict(*arguments).square().mean(), decoder.proj_out.weight
    )
    torch.testing.assert_close(plain, saving)


# ---- motion scope


def test_motion_scope_starts_at_zero():
    decoder, without = make(), make(motion_scope=False)
    assert without.ofs_embedding is None
    missing, unexpected = without.load_state_dict(decoder.state_dict(), strict=False)
    assert not missing and all(name.startswith("ofs_embedding.") for name in unexpected)
    z, t, s_a, f_ms = inputs()
    assert torch.equal(decoder.predict(z, t, s_a, f_ms), without.predict(z, t, s_a, f_ms))
    assert torch.equal(decoder.predict(z, t, s_a, f_ms), decoder.predict(z, t, s_a, f_ms * 3))


def test_one_step_of_training_teaches_it_motion_scope():
    decoder = make()
    levels = signal_levels(DiffusionConfig())
    optimizer = torch.optim.SGD(decoder.ofs_embedding.parameters(), lr=1.0)
    z, t, s_a, f_ms = inputs()
    decoder.loss(z, s_a, f_ms, levels).mean().backward()
    assert decoder.ofs_embedding.linear_2.weight.grad.abs().max() > 0
    optimizer.step()
    v = decoder.predict(z, t, s_a, f_ms)
    assert not torch.equal(v, decoder.predict(z, t, s_a, f_ms.flip(0)))


# ---- loss


def test_the_loss_is_of_v_at_the_drawn_levels():
    decoder, levels = make(), signal_levels(DiffusionConfig())
    z, _, s_a, f_ms = inputs(3)
    torch.manual_seed(7)
    loss = decoder.loss(z, s_a, f_ms, levels)
    assert loss.shape == (3,)
    torch.manual_seed(7)
    t = torch.randint(0, 1000, (3,))
    noise, a = torch.randn_like(z), levels[t].view(-1, 1, 1, 1, 1)
    sigma = (1 - a**2).sqrt()
    v = decoder.predict(a * z + sigma * noise, t, s_a, f_ms)
    expected = (v - (a * noise - sigma * z)).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(loss, expected)


def test_a_decoder_of_clean_latents_has_its_own_loss_and_samples_its_output():
    decoder, schedule = make(), DiffusionConfig(prediction_type="sample", snr_shift=1.0)
    z, _, s_a, f_ms = inputs(3)
    levels = signal_levels(schedule)
    loss = decoder.loss(z, s_a, f_ms, levels, (1, 2, 3), "sample")
    t, noise = draw(z, 1000, (1, 2, 3))
    noisy = add_noise(z, noise, levels[t])
    error = (decoder.predict(noisy, t, s_a, f_ms) - z).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(loss, error / (1 - levels[t] ** 2).clamp(min=0.09))
    sampling = SamplingConfig(steps=1, guidance="none")
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(LATENTS, generator=torch.Generator().manual_seed(5))[None]
    got = decoder.sample(s_a[:1], f_ms[:1], s_a[0], sampling, schedule, [generator])
    expected = decoder.predict(start, torch.tensor([999]), s_a[:1], f_ms[:1])
    torch.testing.assert_close(got, expected)


# ---- sampling


def sample(decoder, rows, guidance="constant", stochastic=True, steps=3):
    torch.manual_seed(3)
    s_a, null = torch.randn(4, TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    f_ms = torch.tensor([0.5, 2.5, 10.0, 40.0])
    sampling = SamplingConfig(steps=steps, guidance=guidance, scale=2.0, stochastic=stochastic)
    generators = [torch.Generator().manual_seed(100 + row) for row in rows]
    return decoder.sample(s_a[rows], f_ms[rows], null, sampling, DiffusionConfig(), generators)


@pytest.mark.parametrize("guidance", ["none", "constant", "dynamic", "release"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_a_shot_does_not_depend_on_its_batch(guidance, stochastic):
    decoder = with_scope(make())
    together = sample(decoder, [0, 1, 2, 3], guidance, stochastic)
    assert together.shape == (4, *LATENTS) and together.isfinite().all()
    alone = torch.cat([sample(decoder, [row], guidance, stochastic) for row in (2, 0)])
    torch.testing.assert_close(together[[2, 0]], alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together[0], together[1])


def test_sampling_is_repeatable_and_follows_the_generator():
    decoder = make()
    assert torch.equal(sample(decoder, [1]), sample(decoder, [1]))
    assert not torch.equal(sample(decoder, [1], "none"), sample(decoder, [1]))


def test_guidance_of_scale_zero_and_one():
    """Scale 1 is the condition alone, scale 0 the null representation."""
    decoder = with_scope(make())
    s_a, null = torch.randn(1, TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    f_ms = torch.tensor([10.0])

    def draw(condition, **settings):
        sampling = SamplingConfig(steps=2, stochastic=False, **settings)
        generator = [torch.Generator().manual_seed(1)]
        return decoder.sample(condition, f_ms, null, sampling, DiffusionConfig(), generator)

    alone, empty = draw(s_a, guidance="none"), draw(null[None], guidance="none")
    torch.testing.assert_close(draw(s_a, guidance="constant", scale=1.0), alone)
    torch.testing.assert_close(draw(s_a, guidance="constant", scale=0.0), empty)
    assert not torch.allclose(alone, empty, atol=1e-3)


# ---- files


@pytest.mark.parametrize("motion_scope", [True, False])
def test_saves_and_loads_exactly(tmp_path, motion_scope):
    decoder = make(motion_scope=motion_scope)
    if motion_scope:
        with_scope(decoder)
    decoder.save_pretrained(tmp_path)
    again = load_model(AnimationDecoder, tmp_path)
    assert again.state_dict().keys() == decoder.state_dict().keys()
    arguments = inputs()
    assert torch.equal(again.predict(*arguments), decoder.predict(*arguments))
    assert again.norm_out.norm.eps == 1e-6 and again.norm_final.eps == 1e-5
    assert isinstance(again.patch_embed.text_proj, torch.nn.Identity)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["sample_frames"] == 17 and saved["motion_scope"] is motion_scope


BASE = {**SIZES, "text_embed_dim": 12, "max_text_seq_length": 9, "sample_frames": 49}


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(1)
    stock = CogVideoXTransformer3DModel(**BASE)
    stock.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_starts_from_a_base(base):
    decoder = AnimationDecoder.from_base(base, TOKENS, True, 8).eval()
    weights = load_file(base / "diffusion_pytorch_model.safetensors")
    mine = decoder.state_dict()
    left = {name for name in weights if name.startswith("patch_embed.text_proj.")}
    assert left and mine.keys() - weights.keys() == {
        f"ofs_embedding.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
    assert all(torch.equal(mine[name], weights[name]) for name in weights.keys() - left)
    # CogVideoX-2B was made for 49 frames, shots have 17.
    assert decoder.config.sample_frames == 17
    assert decoder.patch_embed.pos_embedding.shape == (1, TOKENS + 5 * 6, WIDTH)
    assert decoder.predict(*inputs()).shape == (2, *LATENTS)


def test_from_base_equals_the_base_on_projected_text(base):
    """But for the eps of the last norm, which is the release's."""
    stock = CogVideoXTransformer3DModel.from_pretrained(base).eval()
    stock.norm_out.norm.eps = 1e-6
    decoder = AnimationDecoder.from_base(base, 9, True, 8).eval()
    z, t, _, f_ms = inputs()
    text = torch.randn(2, 9, 12)
    expected = stock(z, text, t, return_dict=False)[0]
    got = decoder.predict(z, t, stock.patch_embed.text_proj(text), f_ms)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rotary_positional_embeddings": True}, "rotary positions"),
        ({"ofs_embed_dim": 8}, "image-to-video"),
        ({"patch_size_t": 2, "use_rotary_positional_embeddings": True}, "patches in time"),
    ],
)
def test_another_kind_of_base_is_refused(tmp_path, change, message):
    CogVideoXTransformer3DModel(**BASE, **change).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.*expected a base like CogVideoX-2B"):
        AnimationDecoder.from_base(tmp_path, TOKENS, True, 16)


def test_a_damaged_base_is_refused(base, tmp_path):
    with pytest.raises(CheckpointError, match="no CogVideoXTransformer3DModel at .*none"):
        AnimationDecoder.from_base(tmp_path / "none", TOKENS, True, 8)
    path = base / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["proj_out.weight"]
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="weight proj_out.weight is missing"):
        AnimationDecoder.from_base(base, TOKENS, True, 8)
    path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a whole CogVideoXTransformer3DModel"):
        AnimationDecoder.from_base(base, TOKENS, True, 8)
