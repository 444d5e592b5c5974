"""The patch autoencoder: exact patches, PCA to begin with, causal in time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from animegamer.checkpoint import load_model
from animegamer.models.patch_autoencoder import GridNet, PatchAutoencoder


def make(trained=False, **sizes):
    torch.manual_seed(0)
    settings = {
        "latent_channels": 6,
        "encoder_width": 8,
        "encoder_blocks": 1,
        "decoder_width": 8,
        "decoder_blocks": 1,
        "pixel_widths": (4, 6),
        "pixel_blocks": (1, 1),
        **sizes,
    }
    model = PatchAutoencoder(**settings)
    if trained:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def clips(count=4, frames=9, height=16, width=24):
    """Smooth pictures that move, (B, 3, frames, height, width)."""
    coarse = torch.randn(count, 3, frames, height // 4, width // 4)
    size = (frames, height, width)
    return torch.nn.functional.interpolate(coarse, size, mode="trilinear").clamp(-1, 1)


# ---- patches


@pytest.mark.parametrize("frames", [1, 5, 17])
@pytest.mark.parametrize(("patch", "group"), [(8, 4), (4, 2), (8, 1)])
def test_pixels_is_the_inverse_of_patches(frames, patch, group):
    model = make(patch=patch, group=group)
    video = torch.randn(2, 3, frames, 16, 24)
    first, rest = model.patches(video)
    grid = (16 // patch, 24 // patch)
    assert first.shape == (2, 1, *grid, patch * patch * 3)
    assert rest.shape == (2, (frames - 1) // group, *grid, group * patch * patch * 3)
    assert torch.equal(model.pixels(first, rest), video)


def test_a_patch_holds_its_own_pixels():
    model = make()
    video = torch.zeros(1, 3, 9, 16, 24)
    video[0, 1, 6, 8 + 3, 16 + 5] = 1.0  # group 1, row 1, column 2
    first, rest = model.patches(video)
    assert first.abs().sum() == 0 and rest[0, 1, 1, 2].sum() == 1 == rest.sum()


# ---- principal components


def direct_pca(patches, count):
    flat = patches.reshape(-1, patches.shape[-1]).double().numpy()
    mean = flat.mean(0)
    _, _, vectors = np.linalg.svd(flat - mean, full_matrices=False)
    basis = vectors[:count]
    return torch.from_numpy((flat - mean) @ basis.T @ basis + mean).view(patches.shape).float()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_before_training_it_is_pca(power):
    model, video = make(), clips(8)
    model.set_components(video, power)
    got = model.decode(model.encode(video))
    expected = model.pixels(*(direct_pca(patches, 6) for patches in model.patches(video)))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def test_enough_components_lose_nothing():
    model, video = make(latent_channels=192, patch=8), clips(30)
    model.set_components(video)
    frame = video[:, :, :1]
    torch.testing.assert_close(model.decode(model.encode(frame)), frame, atol=2e-3, rtol=0)


def test_components_are_orthonormal_and_latents_have_unit_size():
    model, video = make(), clips(20)
    model.set_components(video)
    for i in range(2):
        basis = getattr(model, f"basis_{i}")
        torch.testing.assert_close(basis @ basis.T, torch.eye(6), atol=1e-5, rtol=0)
    latents = model.encode(video)
    for part in (latents[:, :, :1], latents[:, :, 1:]):
        assert part.square().mean().item() == pytest.approx(1, abs=0.02)
        assert part.mean((0, 2, 3, 4)).abs().max() < 0.01


def test_whole_powers_give_every_component_its_size():
    model, video = make(), clips(20)
    model.set_components(video, 1.0)
    sizes = model.encode(video)[:, :, 1:].std((0, 2, 3, 4))
    torch.testing.assert_close(sizes, torch.ones(6), atol=0.02, rtol=0)


# ---- shapes and time


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("frames", [1, 5, 9])
def test_shapes_down_to_a_single_frame(frames, trained):
    model = make(trained)
    latents = model.encode(clips(2, frames))
    assert latents.shape == (2, 6, (frames - 1) // 4 + 1, 2, 3)
    assert model.decode(latents).shape == (2, 3, frames, 16, 24)


def test_the_first_latent_frame_does_not_see_the_later_frames():
    model, video = make(trained=True), clips(2)
    model.set_components(clips(8))
    latents = model.encode(video)
    changed = video.clone()
    changed[:, :, 1:] = torch.randn_like(changed[:, :, 1:])
    other = model.encode(changed)
    torch.testing.assert_close(other[:, :, :1], latents[:, :, :1], atol=1e-6, rtol=0)
    assert not torch.allclose(other[:, :, 1:], latents[:, :, 1:], atol=0.1)
    torch.testing.assert_close(model.encode(video[:, :, :1]), latents[:, :, :1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("place", [1, 2])
def test_nothing_looks_ahead(place):
    """Neither latents at later frames nor pixels at later latents."""
    model, video = make(trained=True), clips(1, 13)
    model.set_components(clips(8))
    changed = video.clone()
    changed[:, :, 1 + 4 * place :] += 0.3
    before, after = model.encode(video), model.encode(changed)
    difference = (after - before).abs()
    assert difference[:, :, : place + 1].max() < 1e-5 < 0.01 < difference[:, :, place + 1].max()
    latents = before.clone()
    latents[:, :, place + 1 :] += 1.0
    known, other = model.decode(before), model.decode(latents)
    kept = 1 + 4 * place
    torch.testing.assert_close(other[:, :, :kept], known[:, :, :kept], atol=1e-5, rtol=0)


def test_a_later_frame_sees_the_earlier_ones():
    net = GridNet((4, 4), 8, 1, (4, 4), zero=False)
    first, rest = torch.randn(1, 1, 2, 2, 4), torch.randn(1, 3, 2, 2, 4)
    _, before = net(first, rest)
    _, after = net(first + torch.randn(4), rest)
    changed = (after - before).abs().amax((0, 2, 3, 4))
    assert (changed[:2] > 1e-4).all() and changed[2] < 1e-6  # taps over three frames


def test_refinement_learns():
    model, video = make(), clips(2)
    model.set_components(video)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    errors = []
    for _ in range(20):
        error = (model.decode(model.encode(video)) - video).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.9 * errors[0]


def test_saves_and_loads_exactly(tmp_path):
    model, video = make(trained=True), clips(2)
    model.set_components(video)
    model.save_pretrained(tmp_path)
    again = load_model(PatchAutoencoder, tmp_path)
    assert torch.equal(again.encode(video), model.encode(video))
    latents = model.encode(video)
    assert torch.equal(again.decode(latents), model.decode(latents))
