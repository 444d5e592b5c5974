"""Schedule, v-target, guidance and sampler: known answers and parity with the release."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from animegamer.config import DiffusionConfig, SamplingConfig
from animegamer.models import diffusion

CONFIG = DiffusionConfig()


def no_noise():
    raise AssertionError("no noise was to be drawn")
    yield


# ---- what is drawn in training


def test_a_seeded_sample_is_noised_alike_in_any_batch():
    z = torch.zeros(3, 2, 4, 3, 5)
    t, noise = diffusion.draw(z, 1000, (7, 8, 9))
    alone_t, alone = diffusion.draw(z[:1], 1000, (8,))
    assert torch.equal(noise[1], alone[0]) and t[1] == alone_t[0]
    assert not torch.equal(noise[0], noise[1]) and t.dtype == torch.int64
    many_t, many = diffusion.draw(torch.zeros(4000, 1, 1, 2, 2), 10, range(4000))
    assert abs(many.mean()) < 0.03 and abs(many.std() - 1) < 0.03
    assert torch.bincount(many_t, minlength=10).float().std() < 40  # about 400 each


def test_without_seeds_torch_draws():
    z = torch.zeros(2, 1, 1, 3, 3)
    torch.manual_seed(4)
    expected = torch.randint(0, 1000, (2,)), torch.randn_like(z)
    torch.manual_seed(4)
    assert all(map(torch.equal, diffusion.draw(z, 1000), expected))


# ---- schedule


def test_levels_fall_from_nearly_one_to_zero():
    levels = diffusion.signal_levels(CONFIG)
    assert levels.shape == (1000,) and levels.dtype == torch.float32
    assert levels[0] > 0.998 and levels[-1] == 0
    assert (levels.diff() < 0).all()


def test_levels_equal_the_scheduler_of_the_library():
    scheduler = CogVideoXDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0,
        prediction_type="v_prediction",
    )
    levels = diffusion.signal_levels(CONFIG).double()
    torch.testing.assert_close(levels, scheduler.alphas_cumprod.double().sqrt(), atol=1e-6, rtol=0)


def test_one_step_starts_from_pure_noise():
    timesteps = diffusion.sampling_timesteps(CONFIG, 1)
    assert timesteps.tolist() == [999]
    assert diffusion.signal_levels(CONFIG, timesteps).tolist() == [0.0]


# ---- noise and target


def test_noise_and_target_determine_the_latents():
    z, noise = torch.randn(3, 5, 4, 2, 2), torch.randn(3, 5, 4, 2, 2)
    a = torch.tensor([0.0, 0.6, 1.0])
    noisy, v = diffusion.add_noise(z, noise, a), diffusion.v_target(z, noise, a)
    assert torch.equal(noisy[0], noise[0]) and torch.equal(noisy[2], z[2])
    torch.testing.assert_close(v[0], -z[0])
    level = a.view(-1, 1, 1, 1, 1)
    sigma = (1 - level**2).sqrt()
    torch.testing.assert_close(level * noisy - sigma * v, z)
    torch.testing.assert_close(sigma * noisy + level * v, noise)


def test_an_output_of_either_kind_means_the_same_latents():
    z, noise = torch.randn(2, 5, 4, 2, 2), torch.randn(2, 5, 4, 2, 2)
    noisy = diffusion.add_noise(z, noise, torch.full((2,), 0.6))
    v = diffusion.v_target(z, noise, torch.full((2,), 0.6))
    torch.testing.assert_close(diffusion.estimate(v, noisy, 0.6, "v_prediction"), z)
    assert torch.equal(diffusion.estimate(z, noisy, 0.6, "sample"), z)


def test_an_error_costs_what_it_costs_in_terms_of_v():
    z, noise, wrong = (torch.randn(3, 5, 4, 2, 2) for _ in range(3))
    a = torch.tensor([0.0, 0.6, 0.999])
    sigma = (1 - a.view(-1, 1, 1, 1, 1) ** 2).sqrt()
    v = diffusion.v_target(z, noise, a)
    of_v = diffusion.loss(v - wrong, z, noise, a, "v_prediction")
    of_z = diffusion.loss(z + sigma * wrong, z, noise, a, "sample")
    assert of_z.shape == (3,)
    torch.testing.assert_close(of_v, wrong.square().mean((1, 2, 3, 4)))
    torch.testing.assert_close(of_z[:2], of_v[:2])
    assert of_z[2] < of_v[2] / 10  # the last traces of noise do not outweigh all else
    assert diffusion.loss(z, z, noise, a, "sample").tolist() == [0, 0, 0]


# ---- guidance


def test_dynamic_guidance_rises():
    sampling = SamplingConfig(steps=50, guidance="dynamic", scale=6.0, exponent=5.0)
    scales = [diffusion.guidance_scale(sampling, step, 999) for step in range(51)]
    assert scales[0] == 1.0 and scales[-1] == pytest.approx(7.0)
    assert all(a < b for a, b in itertools.pairwise(scales[2:]))
    assert scales[25] == pytest.approx(1 + 6 * (1 - math.cos(math.pi / 32)) / 2)


def test_constant_and_no_guidance():
    constant = SamplingConfig(guidance="constant", scale=2.5)
    assert {diffusion.guidance_scale(constant, step, 999) for step in range(5)} == {2.5}
    assert diffusion.guidance_scale(SamplingConfig(guidance="none", scale=2.5), 3, 10) == 1.0


# ---- sampler


def test_one_step_returns_the_estimate():
    sampling = SamplingConfig(steps=1)
    estimate = torch.randn(1, 2)
    got = diffusion.sample(lambda *_: estimate, torch.randn(1, 2), CONFIG, sampling, no_noise())
    assert torch.equal(got, estimate)


MEAN, STD = 1.5, 0.4


def gaussian(latents, step, timestep, a):
    """The best estimate of z ~ N(MEAN, STD^2) from z_a."""
    gain = a * STD**2 / (a**2 * STD**2 + 1 - a**2)
    return MEAN + gain * (latents - a * MEAN)


def test_the_deterministic_sampler_follows_the_flow_of_a_gaussian():
    """Its probability flow takes noise n to MEAN + STD n; the last step costs a little spread."""
    noise = torch.randn(500, dtype=torch.float64)
    errors = []
    for steps in (10, 40, 160, 1000):
        sampling = SamplingConfig(steps=steps, stochastic=False)
        got = diffusion.sample(gaussian, noise, CONFIG, sampling, no_noise())
        again = diffusion.sample(gaussian, noise, CONFIG, sampling, no_noise())
        assert torch.equal(got, again)
        errors.append((got - (MEAN + STD * noise)).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_the_stochastic_sampler_keeps_a_gaussian():
    noise = torch.randn(10_000, dtype=torch.float64)
    draws = iter(lambda: torch.randn_like(noise), None)
    sampling = SamplingConfig(steps=500, stochastic=True)
    got = diffusion.sample(gaussian, noise, CONFIG, sampling, draws)
    assert got.mean().item() == pytest.approx(MEAN, abs=0.015)
    assert got.std().item() == pytest.approx(STD, abs=0.015)
    assert abs(torch.corrcoef(torch.stack([got, noise]))[0, 1]) < 0.1
