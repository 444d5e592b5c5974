"""Trains the patch autoencoder: principal components, then residual refinement on pixels."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from animegamer.config import AutoencoderSizes
from animegamer.data import Shuffle
from animegamer.models.patch_autoencoder import PatchAutoencoder
from animegamer.video import to_float


class Pixels:
    """Batches of whole clips.

    Args:
        clips: (n, F, H, W, 3) uint8, may be memory-mapped.
        seed: of the order.
    """

    def __init__(self, clips: np.ndarray, seed: int) -> None:
        self.clips, self.order = clips, Shuffle(len(clips), seed)

    def __call__(self, first: int, size: int) -> PixelBatch:
        """Samples ``first`` to ``first + size - 1``."""
        rows = [self.order[index] for index in range(first, first + size)]
        return PixelBatch(video_tensor(self.clips[sorted(rows)]))


class PixelBatch:
    """(B, 3, F, H, W) float video in [-1, 1]."""

    def __init__(self, video: torch.Tensor) -> None:
        self.video = video

    def to(self, device: torch.device) -> PixelBatch:
        """The batch on another device."""
        return PixelBatch(self.video.to(device))


def video_tensor(clips: np.ndarray) -> torch.Tensor:
    """(B, F, H, W, 3) uint8 -> (B, 3, F, H, W) float in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(to_float(clips))).permute(0, 4, 1, 2, 3)


def build(sizes: AutoencoderSizes, clips: np.ndarray) -> PatchAutoencoder:
    """A PatchAutoencoder whose linear layers are the principal components of ``clips``."""
    model = PatchAutoencoder(
        latent_channels=sizes.latent_channels,
        patch=sizes.patch,
        encoder_width=sizes.encoder_width,
        encoder_blocks=sizes.encoder_blocks,
        decoder_width=sizes.decoder_width,
        decoder_blocks=sizes.decoder_blocks,
        pixel_widths=tuple(sizes.pixel_widths),
        pixel_blocks=tuple(sizes.pixel_blocks),
    )
    chosen = np.linspace(0, len(clips) - 1, min(len(clips), 400)).astype(int)
    model.set_components(video_tensor(clips[chosen]))
    return model


class AutoencoderLoss(nn.Module):
    """Pixel error with an edge term; a little latent noise makes the decoder forgiving.

    Args:
        model: the autoencoder.
        noise: standard deviation of noise on the latents, as the diffusion's samples have.
        edges: weight of the error of horizontal and vertical differences, which keeps outlines.
    """

    def __init__(self, model: PatchAutoencoder, noise: float = 0.05, edges: float = 0.5) -> None:
        super().__init__()
        self.model, self.noise, self.edges = model, noise, edges

    def forward(self, batch: PixelBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and PSNR."""
        video = batch.video
        latents = self.model.encode(video)
        decoded = self.model.decode(latents + self.noise * torch.randn_like(latents))
        error = decoded.float() - video
        squared = error.square().mean()
        loss = squared + self.edges * (
            error.diff(dim=-1).square().mean() + error.diff(dim=-2).square().mean()
        )
        # Latents may drift in scale: the diffusion wants their mean square at one.
        scale = latents.float().square().mean()
        loss = loss + 0.01 * (scale - 1).square()
        return loss, {"psnr": 10 * torch.log10(4 / squared.detach()), "scale": scale.detach()}


@torch.no_grad()
def psnr(model: PatchAutoencoder, clips: np.ndarray, batch: int = 16) -> float:
    """Mean over clips of the peak signal-to-noise ratio of reconstructions, dB."""
    values = []
    for i in range(0, len(clips), batch):
        video = video_tensor(clips[i : i + batch])
        decoded = model.decode(model.encode(video)).clamp(-1, 1)
        error = (decoded - video).square().flatten(1).mean(1)
        values.append(10 * torch.log10(4 / error))
    return float(torch.cat(values).mean())
