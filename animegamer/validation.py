"""Validation during the decoder's training: loss, samples against the truth, a sheet of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from animegamer.config import Config
from animegamer.data import ShotDataset
from animegamer.models.backbones import Autoencoder
from animegamer.models.shot_model import ShotModel
from animegamer.motion import level_of, motion_scope
from animegamer.video import to_uint8


class ShotValidation:
    """Fixed held-out shots, judged the same way at every validation.

    Args:
        config: sampling, sizes.
        dataset: held-out shots without condition dropout.
        autoencoder: decodes samples.
        edges: level edges of motion scope.
        s_a_null: (N, D) or None to ask the encoder.
    """

    def __init__(
        self,
        config: Config,
        dataset: ShotDataset,
        autoencoder: Autoencoder,
        edges: list[float],
        s_a_null: torch.Tensor | None = None,
    ) -> None:
        self.config, self.dataset, self.autoencoder = config, dataset, autoencoder
        self.edges, self.s_a_null = edges, s_a_null
        count = min(config.train.samples, len(dataset.shots))
        places = np.linspace(0, len(dataset.shots) - 1, count).astype(int)
        self.shots = [dataset.shots[place] for place in places]

    def __call__(self, model: ShotModel, step: int, directory: Path) -> dict[str, float]:
        """Metrics; writes ``samples/step_*.png``: drawn on the left, generated on the right."""
        config, results = self.config, {}
        device = model.levels.device
        torch.manual_seed(config.train.seed)
        losses = []
        for number in range(config.train.validation_batches):
            size = config.train.batch_size
            batch = self.dataset.batch(number * size, size).to(device)
            losses.append(model(batch)[0].float())
        results["loss"] = float(torch.stack(losses).mean())
        batch = self.dataset.collate(self.shots).to(device)
        null = self.s_a_null if self.s_a_null is not None else model.encoder.null()
        generators = [torch.Generator().manual_seed(i) for i in range(len(self.shots))]
        latents = model.decoder.sample(
            model.condition(batch), batch.f_ms, null, config.sampling, config.diffusion, generators
        ).float()
        results["latent_mse"] = float((latents - batch.latents).square().mean())
        drawn, generated = self._pixels(batch.latents), self._pixels(latents)
        error = (drawn.astype(float) - generated).reshape(len(drawn), -1)
        mse = np.square(error).mean(1)
        results["psnr"] = float((10 * np.log10(255**2 / np.maximum(mse, 1e-3))).mean())
        levels = np.array([level_of(motion_scope(shot), self.edges) for shot in generated])
        truth = np.array([shot.motion_level for shot in self.shots])
        results["acc_f"] = float((levels == truth).mean())
        results["mae_f"] = float(np.abs(levels - truth).mean())
        results["sharpness"] = float(_gradient(generated) / _gradient(drawn))
        sheet = np.concatenate([_strip(drawn), _strip(generated)], 2)
        path = directory / "samples" / f"step_{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.concatenate(list(sheet), 0)).save(path)
        return results

    def _pixels(self, latents: torch.Tensor) -> np.ndarray:
        """(B, F, C, H, W) latents -> (B, frames, H, W, 3) uint8."""
        # Between validations the autoencoder leaves the device's memory to the training.
        self.autoencoder.model.to(latents.device)
        parts = [
            self.autoencoder.decode(latents[i : i + 8]).float().cpu()
            for i in range(0, len(latents), 8)
        ]
        self.autoencoder.model.to("cpu")
        return to_uint8(torch.cat(parts).permute(0, 2, 3, 4, 1).numpy())


def _gradient(frames: np.ndarray) -> float:
    pixels = frames.astype(float)
    across, down = np.diff(pixels, axis=-2), np.diff(pixels, axis=-3)
    return float(np.square(across).mean() + np.square(down).mean())


def _strip(shots: np.ndarray) -> np.ndarray:
    """(B, F, H, W, 3) -> (B, H, 4 W, 3): four frames side by side."""
    chosen = np.linspace(0, shots.shape[1] - 1, 4).astype(int)
    return np.concatenate([shots[:, f] for f in chosen], 2)
