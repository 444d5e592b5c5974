"""The first stage at tiny scale: a patch autoencoder that starts from PCA.

Deviation: ``configs/full`` uses CogVideoX's VAE. A convolutional VAE of that kind needs a night on
a laptop to reach what PCA gives in seconds, so this one begins where PCA ends: its first and last
layers are principal components of 8 x 8 x 4 patches, and zero-initialised residual networks on the
latent grid and, for decoding, on each frame's pixels refine both. Frames are grouped as CogVideoX
does (one, then fours), causal in time: the first latent frame never depends on the later ones.
Deterministic: the posterior has no variance.

Axis letters: B batch, F latent frames, C latent channels, H x W latent grid, K patch values.
"""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from torch import nn


class GridBlock(nn.Module):
    """Residual block on the latent grid: 3 x 3 in space, then causal taps over three frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_space = nn.LayerNorm(width)
        self.space = nn.Conv2d(width, width, 3, padding=1)
        self.norm_time = nn.LayerNorm(width)
        self.time = nn.Linear(3 * width, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, F, H, W, width) -> the same."""
        batch = len(x)
        h = rearrange(self.norm_space(x), "b f h w c -> (b f) c h w")
        h = rearrange(self.space(h), "(b f) c h w -> b f h w c", b=batch)
        x = x + nn.functional.silu(h)
        h = self.norm_time(x)
        one = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        two = torch.cat([torch.zeros_like(h[:, :1]), one[:, :-1]], 1)
        return x + self.mix(nn.functional.silu(self.time(torch.cat([two, one, h], -1))))


class GridNet(nn.Module):
    """A linear layer in, grid blocks, and one linear layer out for each kind of frame group."""

    def __init__(
        self,
        width_in: tuple[int, int],
        width: int,
        blocks: int,
        out: tuple[int, int],
        zero: bool = True,
    ) -> None:
        super().__init__()
        self.inputs = nn.ModuleList([nn.Linear(n, width) for n in width_in])
        self.blocks = nn.ModuleList([GridBlock(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.outputs = nn.ModuleList([nn.Linear(width, n) for n in out])
        for layer in self.outputs if zero else ():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, first: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 1, H, W, k1), (B, F-1, H, W, k2) -> the same with the output widths."""
        x = torch.cat([self.inputs[0](first), self.inputs[1](rest)], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.outputs[0](x[:, :1]), self.outputs[1](x[:, 1:])


class PixelBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, width, H, W) -> the same."""
        h = self.first(nn.functional.silu(x))
        return x + self.second(nn.functional.silu(h))


class PixelNet(nn.Module):
    """Frames from features at two sub-positions a side of each grid cell, by convolutions.

    Args:
        widths: channels at 1/4 and 1/2 of the picture's size.
        blocks: residual blocks at each.
        patch: pixels a side of a grid cell; a quarter of it is what a sub-position covers.
    """

    def __init__(self, widths: tuple[int, int], blocks: tuple[int, int], patch: int) -> None:
        super().__init__()
        coarse, fine = widths
        up = patch // 4
        self.coarse = nn.Sequential(*(PixelBlock(coarse) for _ in range(blocks[0])))
        self.rise = nn.Conv2d(coarse, fine * up * up, 3, padding=1)
        self.shuffle = nn.PixelShuffle(up)
        self.fine = nn.Sequential(*(PixelBlock(fine) for _ in range(blocks[1])))
        self.out = nn.Conv2d(fine, 12, 3, padding=1)
        self.last = nn.PixelShuffle(2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, coarse, H / 4, W / 4) -> (B, 3, H, W)."""
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.shuffle(self.rise(self.coarse(x)))
        return self.last(self.out(nn.functional.silu(self.fine(x))))


class PatchAutoencoder(ModelMixin, ConfigMixin):
    """Patches to latents and back.

    Args:
        latent_channels: C.
        patch: pixels a side of a patch.
        group: frames in a group after the first.
        encoder_width: inner width of the encoder's refinement.
        encoder_blocks: its blocks.
        decoder_width: inner width of the decoder's refinement.
        decoder_blocks: its blocks.
        pixel_widths: channels of the refinement at 1/4 and 1/2 of the picture's size.
        pixel_blocks: its blocks at each.
    """

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 32,
        patch: int = 8,
        group: int = 4,
        encoder_width: int = 96,
        encoder_blocks: int = 2,
        decoder_width: int = 160,
        decoder_blocks: int = 2,
        pixel_widths: tuple[int, int] = (48, 32),
        pixel_blocks: tuple[int, int] = (2, 1),
    ) -> None:
        super().__init__()
        channels = latent_channels
        sizes = (patch * patch * 3, group * patch * patch * 3)
        for i, size in enumerate(sizes):
            # Rows of ``basis`` are orthonormal; ``scale`` brings each component near unit size.
            self.register_buffer(f"mean_{i}", torch.zeros(size))
            self.register_buffer(f"basis_{i}", torch.zeros(min(channels, size), size))
            self.register_buffer(f"scale_{i}", torch.ones(min(channels, size)))
        self.encoder = GridNet(sizes, encoder_width, encoder_blocks, (channels, channels))
        part = 4 * pixel_widths[0]
        self.decoder = GridNet(
            (channels, channels), decoder_width, decoder_blocks, (part, group * part), zero=False
        )
        self.pixel_net = PixelNet(pixel_widths, pixel_blocks, patch)

    def patches(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 3, frames, height, width) -> (B, 1, H, W, K_1) and (B, F-1, H, W, K_2)."""
        p, g = self.config.patch, self.config.group
        first = rearrange(video[:, :, :1], "b c f (h p) (w q) -> b f h w (p q c)", p=p, q=p)
        rest = rearrange(
            video[:, :, 1:], "b c (f g) (h p) (w q) -> b f h w (g p q c)", g=g, p=p, q=p
        )
        return first, rest

    def pixels(self, first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """The inverse of ``patches``."""
        p, g = self.config.patch, self.config.group
        one = rearrange(first, "b f h w (p q c) -> b c f (h p) (w q)", p=p, q=p)
        more = rearrange(rest, "b f h w (g p q c) -> b c (f g) (h p) (w q)", g=g, p=p, q=p)
        return torch.cat([one, more], 2)

    @torch.no_grad()
    def set_components(self, videos: torch.Tensor, power: float = 0.5) -> None:
        """Takes the principal components of patches as the linear first and last layers.

        Args:
            videos: (B, 3, frames, height, width) float in [-1, 1].
            power: each component is divided by (its standard deviation) ** power, so that small
                ones, which carry the outlines, are not drowned in the diffusion's noise.
        """
        for i, patches in enumerate(self.patches(videos)):
            flat = patches.reshape(-1, patches.shape[-1]).double()
            mean = flat.mean(0)
            values, vectors = torch.linalg.eigh((flat - mean).T @ (flat - mean) / len(flat))
            count = getattr(self, f"basis_{i}").shape[0]
            std = values.flip(0)[:count].clamp_min(1e-8).sqrt()
            scale = std**power
            # One overall factor makes the latents' mean square one.
            scale = scale * ((std / scale) ** 2).mean().sqrt()
            getattr(self, f"mean_{i}").copy_(mean)
            getattr(self, f"basis_{i}").copy_(vectors.flip(1)[:, :count].T)
            getattr(self, f"scale_{i}").copy_(scale)

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Latents of videos.

        Args:
            video: (B, 3, frames, height, width) float in [-1, 1], 1 + 4 n frames.

        Returns:
            (B, C, F, H, W) float.
        """
        first, rest = self.patches(video)
        refined = self.encoder(first - self.mean_0, rest - self.mean_1)
        latents = []
        for i, (patches, more) in enumerate(zip((first, rest), refined, strict=True)):
            mean, basis = getattr(self, f"mean_{i}"), getattr(self, f"basis_{i}")
            z = ((patches - mean) @ basis.T) / getattr(self, f"scale_{i}")
            latents.append(z + more)
        return rearrange(torch.cat(latents, 1), "b f h w c -> b c f h w")

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Videos of latents: (B, C, F, H, W) -> (B, 3, frames, height, width), about [-1, 1]."""
        z = rearrange(latents, "b c f h w -> b f h w c")
        parts = (z[:, :1], z[:, 1:])
        linear = self.pixels(
            *(
                (part * getattr(self, f"scale_{i}")) @ getattr(self, f"basis_{i}")
                + getattr(self, f"mean_{i}")
                for i, part in enumerate(parts)
            )
        )
        first, rest = self.decoder(*parts)
        first = rearrange(first, "b f h w (p q c) -> b f c (h p) (w q)", p=2, q=2)
        rest = rearrange(
            rest,
            "b f h w (g p q c) -> b (f g) c (h p) (w q)",
            g=self.config.group,
            p=2,
            q=2,
        )
        features = torch.cat([first, rest], 1)
        batch = len(features)
        refined = self.pixel_net(features.flatten(0, 1))
        return linear + rearrange(refined, "(b f) c h w -> b c f h w", b=batch)
