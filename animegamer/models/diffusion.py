"""CogVideoX's diffusion as pure tensor functions: schedule, v-target, sampler, guidance.

Notation: ``a`` is sqrt(alphas_cumprod), so that z_a = a z + sqrt(1 - a^2) n and
v = a n - sqrt(1 - a^2) z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from animegamer.config import DiffusionConfig, PredictionType, SamplingConfig

_LEAST_SIGMA = 0.3


def signal_levels(config: DiffusionConfig, timesteps: torch.Tensor | None = None) -> torch.Tensor:
    """sqrt(alphas_cumprod) with the SNR shift and zero terminal SNR.

    Args:
        config: schedule.
        timesteps: (S,) descending integers, or None for all of them in ascending order. Release:
            the table of a sampling run is rescaled on its own first and last entry.

    Returns:
        (train_steps,) or (S,) float32, 0 at the noisiest step.
    """
    betas = (
        torch.linspace(
            config.beta_start**0.5, config.beta_end**0.5, config.train_steps, dtype=torch.float64
        )
        ** 2
    )
    alphas = torch.cumprod(1 - betas, 0)
    alphas = alphas / (config.snr_shift + (1 - config.snr_shift) * alphas)
    if timesteps is not None:
        alphas = alphas[timesteps.flip(0)]
    levels = alphas.sqrt().float()
    first, last = levels[0].clone(), levels[-1].clone()
    levels = (levels - last) * (first / (first - last)) if len(levels) > 1 else levels * 0
    return levels if timesteps is None else levels.flip(0)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """z_a = a z + sqrt(1 - a^2) n, with ``a`` of shape (B,)."""
    a = a.view(-1, *[1] * (latents.ndim - 1))
    return a * latents + (1 - a**2).sqrt() * noise


def v_target(latents: torch.Tensor, noise: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The target v = a n - sqrt(1 - a^2) z, with ``a`` of shape (B,)."""
    a = a.view(-1, *[1] * (latents.ndim - 1))
    return a * noise - (1 - a**2).sqrt() * latents


def loss(
    output: torch.Tensor,
    latents: torch.Tensor,
    noise: torch.Tensor,
    a: torch.Tensor,
    prediction_type: PredictionType,
) -> torch.Tensor:
    """Squared error of each shot, in terms of v.

    An error of the clean latents is one of v times sigma. For ``sample``, sigma counts as 0.3 at
    least (Assumed), or the last traces of noise, where ten sampling steps never go, would outweigh
    all else.

    Args:
        output: (B, F, C, H, W) float, what the decoder predicts.
        latents: clean, of that shape.
        noise: of that shape.
        a: (B,) signal levels.
        prediction_type: what the decoder predicts.

    Returns:
        (B,) float.
    """
    if prediction_type == "v_prediction":
        return (output.float() - v_target(latents, noise, a)).square().flatten(1).mean(1)
    weight = 1 / (1 - a**2).clamp(min=_LEAST_SIGMA**2)
    return weight * (output.float() - latents).square().flatten(1).mean(1)


def estimate(
    output: torch.Tensor, latents: torch.Tensor, level: float, prediction_type: PredictionType
) -> torch.Tensor:
    """The clean latents that the decoder's output means.

    Args:
        output: what the decoder predicts for ``latents``.
        latents: noisy, of the same shape.
        level: their signal level.
        prediction_type: what the decoder predicts.
    """
    if prediction_type == "v_prediction":
        return level * latents - (1 - level * level) ** 0.5 * output
    return output


def draw(
    latents: torch.Tensor, steps: int, seeds: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Timesteps and noise to train on.

    Args:
        latents: (B, F, C, H, W) float.
        steps: of the training schedule; each is as likely (release).
        seeds: one a sample, whose draws are then the same in any batch and on any process; without
            them torch's generator draws.

    Returns:
        Timesteps (B,) int64, and standard normal noise of the latents' shape.
    """
    if not seeds:
        t = torch.randint(0, steps, (len(latents),), device=latents.device)
        return t, torch.randn_like(latents)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    t = torch.stack([torch.randint(0, steps, (), generator=g) for g in generators])
    noise = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators])
    return t.to(latents.device), noise.to(latents)


def sampling_timesteps(config: DiffusionConfig, steps: int) -> torch.Tensor:
    """(S,) descending integer timesteps, from ``train_steps - 1`` (release)."""
    points = torch.linspace(config.train_steps - 1, 0, steps + 1, dtype=torch.float64)[:-1]
    return points.long()


def guidance_scale(sampling: SamplingConfig, step: int, timestep: int) -> float:
    """Classifier-free guidance scale of one sampling step.

    ``dynamic`` rises from 1 to ``1 + scale``. Release: ``release`` is given the timestep where the
    formula wants the step, so it swings; it must be computed in float64.
    """
    if sampling.guidance == "constant":
        return sampling.scale
    if sampling.guidance == "none":
        return 1.0
    done = step if sampling.guidance == "dynamic" else sampling.steps - timestep
    power = (done / sampling.steps) ** sampling.exponent
    return 1 + sampling.scale * (1 - math.cos(math.pi * power)) / 2


Denoiser = Callable[[torch.Tensor, int, int, float], torch.Tensor]
"""(z_a, step, timestep, a) -> estimate of z."""


def sample(
    denoise: Denoiser,
    noise: torch.Tensor,
    diffusion: DiffusionConfig,
    sampling: SamplingConfig,
    step_noise: Iterator[torch.Tensor],
) -> torch.Tensor:
    """DPM++(2M), in VP form, stochastic or deterministic.

    Args:
        denoise: the guided denoiser.
        noise: (B, F, C, H, W) float, standard normal: the starting point.
        diffusion: training schedule.
        sampling: steps and whether noise is added between them.
        step_noise: standard normal tensors, one is taken per stochastic step but the last.

    Returns:
        Latents, shape of ``noise``.
    """
    timesteps = sampling_timesteps(diffusion, sampling.steps)
    levels = torch.cat([signal_levels(diffusion, timesteps), torch.ones(1)]).double()
    latents, previous, last_width = noise, None, math.inf
    for step, timestep in enumerate(timesteps.tolist()):
        a, a_next = levels[step].item(), levels[step + 1].item()
        estimate = denoise(latents, step, timestep, a)
        if step + 1 == len(timesteps):
            return estimate
        sigma, sigma_next = math.sqrt(1 - a * a), math.sqrt(1 - a_next * a_next)
        # Log-SNR widths; infinite from pure noise, where e^-width is 0.
        width = math.inf if a == 0 else math.log(a_next / sigma_next) - math.log(a / sigma)
        direction = estimate
        if previous is not None and step > 0:
            ratio = last_width / width
            correction = 0.0 if math.isinf(ratio) else 1 / (2 * ratio)
            direction = (1 + correction) * estimate - correction * previous
        if sampling.stochastic:
            latents = (
                (sigma_next / sigma) * math.exp(-width) * latents
                - math.expm1(-2 * width) * a_next * direction
                + sigma_next * math.sqrt(-math.expm1(-2 * width)) * next(step_noise)
            )
        else:
            latents = (sigma_next / sigma) * latents - math.expm1(-width) * a_next * direction
        previous, last_width = estimate, width
    raise AssertionError("no sampling step")
