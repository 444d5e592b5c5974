"""Trains the text-to-video CogVideoX that the decoder starts from, on whole instruction texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import CogVideoXTransformer3DModel
from torch import nn

from animegamer.config import Config, DiffusionConfig
from animegamer.data import Shuffle, sample_seed
from animegamer.features import FeatureStore
from animegamer.models import diffusion
from animegamer.models.backbones import TextEncoder
from animegamer.records import Shot


@dataclass
class CaptionedShots:
    """A batch for text-to-video training.

    Attributes:
        latents: (B, F, C, H, W) float, scaled.
        text: (B, L, W_t) float, T5 states of the caption, zero where dropped.
        seeds: one a sample, of its noise.
    """

    latents: torch.Tensor
    text: torch.Tensor
    seeds: tuple[int, ...] = ()

    def to(self, device: torch.device) -> CaptionedShots:
        """The batch on another device."""
        return CaptionedShots(self.latents.to(device), self.text.to(device), self.seeds)


class CaptionDataset:
    """Shots with the T5 states of their captions.

    Args:
        shots: the records.
        features: store with ``latents``.
        encoder: T5 with the caption's length.
        seed: of order and dropout.
        dropout: share of captions zeroed, for guidance.
    """

    def __init__(
        self,
        shots: Sequence[Shot],
        features: FeatureStore,
        encoder: TextEncoder,
        seed: int,
        dropout: float = 0.1,
    ) -> None:
        self.shots = [shot for shot in shots if shot.instruction is not None]
        self.features, self.seed, self.dropout = features, seed, dropout
        self.order = Shuffle(len(self.shots), seed)
        texts = sorted({str(shot.instruction) for shot in self.shots})
        self.row = {text: i for i, text in enumerate(texts)}
        parts = [encoder(texts[i : i + 256]).half() for i in range(0, len(texts), 256)]
        self.states = torch.cat(parts)

    def batch(self, first: int, size: int, frames: int | None = None) -> CaptionedShots:
        """Samples ``first`` to ``first + size - 1``; ``frames`` keeps so many latent frames."""
        shots = [self.shots[self.order[i]] for i in range(first, first + size)]
        latents = [self.features[shot.shot_id]["latents"][:frames] for shot in shots]
        text = self.states[[self.row[str(shot.instruction)] for shot in shots]].float()
        indices = range(first, first + size)
        draws = [np.random.default_rng((self.seed, 4, index)).random() for index in indices]
        kept = torch.tensor(draws) >= self.dropout
        return CaptionedShots(
            torch.from_numpy(np.stack(latents)).float(),
            text * kept[:, None, None],
            tuple(sample_seed(self.seed, index) for index in indices),
        )


class TextToVideoLoss(nn.Module):
    """CogVideoX with its diffusion loss."""

    def __init__(self, transformer: CogVideoXTransformer3DModel, schedule: DiffusionConfig) -> None:
        super().__init__()
        self.transformer = transformer
        self.prediction_type = schedule.prediction_type
        self.register_buffer("levels", diffusion.signal_levels(schedule), persistent=False)

    def forward(self, batch: CaptionedShots) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss."""
        latents = batch.latents
        t, noise = diffusion.draw(latents, len(self.levels), batch.seeds)
        a = self.levels[t]
        output = self.transformer(
            hidden_states=diffusion.add_noise(latents, noise, a),
            encoder_hidden_states=batch.text,
            timestep=t,
            return_dict=False,
        )[0]
        return diffusion.loss(output, latents, noise, a, self.prediction_type).mean(), {}


def build(
    config: Config, text_width: int, latent_shape: tuple[int, ...]
) -> CogVideoXTransformer3DModel:
    """A text-to-video CogVideoX of the configured size.

    Args:
        config: sizes.
        text_width: width of the T5 states.
        latent_shape: (F, C, H, W).
    """
    sizes = config.pretrain.video_base
    _, channels, height, width = latent_shape
    return CogVideoXTransformer3DModel(
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_width,
        in_channels=channels,
        out_channels=channels,
        time_embed_dim=sizes.time_embed,
        text_embed_dim=text_width,
        num_layers=sizes.layers,
        sample_width=width,
        sample_height=height,
        sample_frames=config.shot.frames,
        patch_size=2,
        max_text_seq_length=sizes.text_tokens,
        # CogVideoX-2B divides its 30 x 45 grid by 1.875; a tiny grid needs no interpolation.
        spatial_interpolation_scale=1.0,
    )
