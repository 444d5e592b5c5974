"""Typed batches and the datasets that make them; training reads feature shards, never video.

Axis letters: B batch, T turns, F latent frames, N tokens of s_a, L sequence, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ShotBatch:
    """Shots for stages 1 and 3.

    Attributes:
        latents: (B, F, C, H, W) float, scaled VAE latents.
        f_v: (B, N_v, W_v) float, CLIP patch tokens of the reference frame.
        f_md: (B, N_t, W_t) float, T5 states of the action text.
        f_ms: (B,) float, motion scope scalars.
        s_a_hat: (B, N, D) float, cached MLLM predictions, stage 3 only.
    """

    latents: torch.Tensor
    f_v: torch.Tensor
    f_md: torch.Tensor
    f_ms: torch.Tensor
    s_a_hat: torch.Tensor | None = None
