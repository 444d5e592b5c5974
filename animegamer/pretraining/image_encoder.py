"""Trains the CLIP tower: contrastive, pictures against instruction texts, with open_clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip import ClipLoss
from open_clip.model import CLIP
from safetensors.torch import save_file
from torch import nn

from animegamer.atomic import write_text
from animegamer.config import BackbonesConfig, ImageEncoderSizes
from animegamer.data import Shuffle
from animegamer.models.backbones import preprocess
from animegamer.pretraining.autoencoder import video_tensor


def model_config(
    sizes: ImageEncoderSizes, backbones: BackbonesConfig, vocabulary: int
) -> dict[str, Any]:
    """The model section of ``open_clip_config.json``."""
    return {
        "embed_dim": sizes.embed_dim,
        "vision_cfg": {
            "image_size": [backbones.image_height, backbones.image_width],
            "layers": sizes.layers,
            "width": sizes.width,
            "head_width": sizes.head_width,
            "mlp_ratio": sizes.mlp_ratio,
            "patch_size": sizes.patch,
        },
        "text_cfg": {
            "context_length": sizes.text_length,
            "vocab_size": vocabulary,
            "width": sizes.text_width,
            "heads": max(1, sizes.text_width // 48),
            "layers": sizes.text_layers,
            "mlp_ratio": 2.0,
            # The sentencepiece vocabulary: 0 pads, 1 ends a text.
            "pool_type": "eos",
            "eos_id": 1,
            "pad_id": 0,
        },
    }


@torch.no_grad()
def start_from_components(model: CLIP, frames: torch.Tensor) -> None:
    """Makes the patch embedding the principal components of patches, equalised.

    Deviation: a tower of this size, trained for minutes, would lose the detail that a shot's first
    frame must carry; so its first layer keeps all of it and training adds meaning.

    Args:
        model: the CLIP model.
        frames: (B, 3, H, W) float, preprocessed.
    """
    kernel = model.visual.conv1
    size = kernel.kernel_size[0]
    patches = nn.functional.unfold(frames, size, stride=size).transpose(1, 2).flatten(0, 1).double()
    centred = patches - patches.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    count = kernel.weight.shape[0]
    chosen = vectors.flip(1)[:, :count]
    std = values.flip(0)[:count].clamp_min(1e-8).sqrt()
    weight = (chosen / std.sqrt()).T
    kernel.weight.copy_(weight.view_as(kernel.weight) / weight.norm(dim=1).mean() * 0.5)


class CaptionedFrames:
    """Batches of frames with their instruction's tokens.

    Args:
        clips: (n, F, H, W, 3) uint8.
        tokens: (n, L) token ids.
        backbones: size of the pictures.
        seed: of order and frame choice.
    """

    def __init__(
        self,
        clips: np.ndarray,
        tokens: torch.Tensor,
        backbones: BackbonesConfig,
        seed: int,
    ) -> None:
        self.clips, self.tokens, self.backbones, self.seed = clips, tokens, backbones, seed
        self.order = Shuffle(len(clips), seed)

    def __call__(self, first: int, size: int) -> CaptionBatch:
        """Samples ``first`` to ``first + size - 1``."""
        rows = np.array([self.order[index] for index in range(first, first + size)])
        random = np.random.default_rng((self.seed, 2, first))
        frames = random.integers(0, self.clips.shape[1], size)
        pictures = np.stack([self.clips[r, f] for r, f in zip(rows, frames, strict=True)])
        video = video_tensor(pictures[:, None])[:, :, 0]
        pixels = preprocess(video, self.backbones.image_height, self.backbones.image_width)
        return CaptionBatch(pixels, self.tokens[torch.from_numpy(rows)])


class CaptionBatch:
    """Pictures (B, 3, H, W) float and token ids (B, L)."""

    def __init__(self, pixels: torch.Tensor, tokens: torch.Tensor) -> None:
        self.pixels, self.tokens = pixels, tokens

    def to(self, device: torch.device) -> CaptionBatch:
        """The batch on another device."""
        return CaptionBatch(self.pixels.to(device), self.tokens.to(device))


class ContrastiveLoss(nn.Module):
    """CLIP's loss; equal texts in a batch are right answers for each other."""

    def __init__(self, model: CLIP) -> None:
        super().__init__()
        self.model, self.loss = model, ClipLoss()

    def forward(self, batch: CaptionBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and the share of pictures whose own text scores highest."""
        image = self.model.encode_image(batch.pixels, normalize=True)
        text = self.model.encode_text(batch.tokens, normalize=True)
        scale = self.model.logit_scale.exp().clamp_max(100)
        loss = self.loss(image.float(), text.float(), scale)
        best = (image @ text.T).argmax(1).cpu()
        hit = (batch.tokens.cpu()[best] == batch.tokens.cpu()).all(1).float().mean()
        return loss, {"accuracy": hit}


def build(sizes: ImageEncoderSizes, backbones: BackbonesConfig, vocabulary: int) -> CLIP:
    """A CLIP model of the configured size."""
    config = model_config(sizes, backbones, vocabulary)
    return CLIP(**config)


def tokenize(tokenizer: Any, texts: Sequence[str], length: int) -> torch.Tensor:
    """(n, L) token ids, padded or cut, each with its end token."""
    return tokenizer(
        list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    ).input_ids


def save(model: CLIP, config: dict[str, Any], directory: Path) -> None:
    """Writes the open_clip layout."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, directory / "open_clip_model.safetensors")
    text = json.dumps({"model_cfg": config, "preprocess_cfg": {}}, indent=1)
    write_text(directory / "open_clip_config.json", text)
