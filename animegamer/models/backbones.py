"""The frozen networks behind one interface for both scales: T5, CLIP tower, video autoencoder.

The only place that loads them. ``configs/full`` names CogVideoX-2B's VAE, T5 v1.1 XXL and OpenCLIP
ViT-B-16; ``configs/tiny`` names small ones of the same kinds, trained by
``scripts/train_backbones.py``.

Axis letters: B batch, F latent frames, C latent channels, H x W latent grid, N_t text and N_v
visual tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from animegamer.checkpoint import CheckpointError, load_model
from animegamer.config import BackbonesConfig, ConfigError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _directory(path: str, what: str) -> Path:
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            f"no {what} at {directory}: download or train it, or correct backbones in the "
            "configuration (checkpoints/README.md says what goes where)"
        )
    return directory


class TextEncoder(nn.Module):
    """Frozen T5 (release: v1.1 XXL, texts padded or cut to 30 tokens, no attention mask)."""

    def __init__(self, model: nn.Module, tokenizer: object, tokens: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.tokenizer, self.tokens = tokenizer, tokens

    @torch.no_grad()
    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        """f_md of action texts: (B, N_t, W_t) float."""
        ids = self.tokenizer(  # type: ignore[operator]
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self.tokens,
            return_tensors="pt",
        ).input_ids
        return self.model(input_ids=ids.to(self.model.device)).last_hidden_state


def load_text_encoder(
    backbones: BackbonesConfig, dtype: torch.dtype = torch.float32
) -> TextEncoder:
    """Loads T5 with weights of a type. Raises CheckpointError if it is not there or not whole."""
    from transformers import AutoTokenizer, T5EncoderModel

    directory = _directory(backbones.text_encoder, "T5 encoder")
    # The published T5 comes with its decoder.
    model = load_model(T5EncoderModel, directory, unused=r"decoder\.|lm_head\.", dtype=dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: no T5 tokenizer ({error})") from error
    return TextEncoder(model, tokenizer, backbones.text_tokens)


def preprocess(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """CLIP's input from frames, as the release makes it.

    Release: bicubic with aligned corners after a Gaussian blur against aliasing, no crop (the
    picture is squashed), then CLIP's mean and standard deviation.

    Args:
        frames: (B, 3, H, W) float in [-1, 1].
        height: pixels.
        width: pixels.

    Returns:
        (B, 3, height, width) float.
    """
    from torchvision.transforms.functional import gaussian_blur

    if frames.shape[-2:] != (height, width):
        factors = (frames.shape[-2] / height, frames.shape[-1] / width)
        if max(factors) > 1:
            sigmas = [max((f - 1) / 2, 0.001) for f in factors]
            kernels = [int(max(2 * 2 * s, 3)) for s in sigmas]
            kernels = [k + 1 - k % 2 for k in kernels]
            frames = gaussian_blur(frames, kernels[::-1], sigmas[::-1])
        frames = nn.functional.interpolate(
            frames, (height, width), mode="bicubic", align_corners=True
        )
    mean = torch.tensor(CLIP_MEAN, device=frames.device).view(1, 3, 1, 1)
    std = torch.tensor(CLIP_STD, device=frames.device).view(1, 3, 1, 1)
    return ((frames + 1) / 2 - mean) / std


class ImageEncoder(nn.Module):
    """Frozen CLIP tower: patch tokens of the second-to-last block, no class token (release)."""

    def __init__(self, visual: nn.Module, height: int, width: int) -> None:
        super().__init__()
        self.visual = visual.requires_grad_(False).eval()
        self.height, self.width = height, width

    @torch.no_grad()
    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """f_v of frames: (B, 3, H, W) float in [-1, 1] -> (B, N_v, W_v) float."""
        pixels = preprocess(frames, self.height, self.width)
        blocks = len(self.visual.transformer.resblocks)
        result = self.visual.forward_intermediates(
            pixels,
            indices=[blocks - 2],
            stop_early=True,
            intermediates_only=True,
            output_fmt="NLC",
        )
        return result["image_intermediates"][0]


def load_image_encoder(backbones: BackbonesConfig) -> ImageEncoder:
    """Loads the CLIP tower (open_clip layout).

    Raises:
        CheckpointError: if it is not there, damaged or something else.
    """
    import open_clip

    directory = _directory(backbones.image_encoder, "CLIP tower")
    try:
        model = open_clip.create_model(f"local-dir:{directory}", require_pretrained=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: not an open_clip model ({error})") from error
    return ImageEncoder(model.visual.float(), backbones.image_height, backbones.image_width)


class Autoencoder(nn.Module):
    """Frozen video autoencoder with the latent scale of the diffusion."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model.requires_grad_(False).eval(), scale

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """(B, 3, frames, height, width) float in [-1, 1] -> scaled latents (B, F, C, H, W).

        The posterior's mean is taken. Deviation: the release samples it in training. All frames go
        in at once (release): diffusers' CogVideoX would cut them into eights, with other results.

        Raises:
            ValueError: of CogVideoX's autoencoder, if decoding would give another number of frames.
        """
        if hasattr(self.model, "num_sample_frames_batch_size"):
            frames = video.shape[2]
            if frames % 8 not in (0, 1):
                raise ValueError(
                    f"CogVideoX's autoencoder cannot give back {frames} frames: set shot.frames to "
                    "8 n + 1, such as 17, or 8 n, such as 16"
                )
            self.model.num_sample_frames_batch_size = frames
        latents = self.model.encode(video)
        if not isinstance(latents, torch.Tensor):
            latents = latents.latent_dist.mode()
        return latents.transpose(1, 2) * self.scale

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents (B, F, C, H, W) -> (B, 3, frames, height, width), clamped to [-1, 1].

        CogVideoX's autoencoder takes three latent frames, then twos (release), and makes 4 F - 3
        frames of an odd F, 4 F of an even one.
        """
        dtype = next(self.model.parameters()).dtype
        video = self.model.decode((latents.transpose(1, 2) / self.scale).to(dtype))
        if not isinstance(video, torch.Tensor):
            video = video.sample
        return video.float().clamp(-1, 1)


def load_autoencoder(
    backbones: BackbonesConfig,
    dtype: torch.dtype = torch.float32,
    *,
    tiling: bool = False,
    slicing: bool = False,
) -> Autoencoder:
    """Loads the video autoencoder named by its config.json.

    Args:
        backbones: where it lies.
        dtype: of its weights and of what it computes in.
        tiling: decode in overlapping tiles (CogVideoX's alone can).
        slicing: decode the videos of a batch one after the other.

    Raises:
        CheckpointError: if it is not there, damaged or something else.
        ConfigError: if it cannot do what is asked.
    """
    from diffusers import AutoencoderKLCogVideoX

    from animegamer.models.patch_autoencoder import PatchAutoencoder

    directory = _directory(backbones.autoencoder, "video autoencoder")
    try:
        kind = json.loads((directory / "config.json").read_text(encoding="utf-8"))["_class_name"]
        classes = {c.__name__: c for c in (AutoencoderKLCogVideoX, PatchAutoencoder)}
        if kind not in classes:
            raise ValueError(f"class {kind!r}, expected one of {', '.join(classes)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: not a video autoencoder ({error})") from error
    model = load_model(classes[kind], directory, torch_dtype=dtype)
    for wanted, what in ((tiling, "tiling"), (slicing, "slicing")):
        enable = getattr(model, f"enable_{what}", None)
        if wanted and enable is None:
            raise ConfigError(
                f"play.memory.autoencoder_{what} is true, but {kind} in {directory} has no "
                f"{what}: set it to false"
            )
        if wanted:
            enable()
    return Autoencoder(model, backbones.latent_scale)
