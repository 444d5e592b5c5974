"""What stages 1 and 3 train: the decoder on ``s_a`` from the encoder, or on the MLLM's predictions.

Axis letters: B batch, N tokens of s_a, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from animegamer.config import Config, DiffusionConfig
from animegamer.data import ShotBatch
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.diffusion import signal_levels
from animegamer.models.encoder import ActionAwareEncoder


class ShotModel(nn.Module):
    """Encoder and decoder with the diffusion loss (paper Sec. 3.2).

    Args:
        encoder: action-aware encoder; stage 3 gives it up for the cached null representation.
        decoder: animation decoder.
        schedule: training schedule, and what the decoder predicts.
        null_features: f_md of the empty text, (N_t, W_t): what a dropped action text becomes.
        s_a_null: (N, D), encoder output for zero features; stage 3 only.
    """

    def __init__(
        self,
        encoder: ActionAwareEncoder | None,
        decoder: AnimationDecoder,
        schedule: DiffusionConfig,
        null_features: torch.Tensor | None = None,
        s_a_null: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.prediction_type = schedule.prediction_type
        self.register_buffer("levels", signal_levels(schedule), persistent=False)
        self.register_buffer("null_features", null_features, persistent=False)
        self.register_buffer("s_a_null", s_a_null, persistent=False)

    def condition(self, batch: ShotBatch) -> torch.Tensor:
        """s_a of a batch, (B, N, D), with condition dropout."""
        if self.encoder is None:
            # Decoder adaptation (paper Sec. 3.2): the predictions take the place of s_a.
            assert batch.s_a_hat is not None
            kept = (batch.text_kept & batch.image_kept)[:, None, None]
            return torch.where(kept, batch.s_a_hat, self.s_a_null)
        # Release: a dropped text is the empty text, a dropped image is zeros.
        f_md = torch.where(batch.text_kept[:, None, None], batch.f_md, self.null_features)
        f_v = batch.f_v * batch.image_kept[:, None, None]
        return self.encoder(f_v, f_md)

    def forward(self, batch: ShotBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean diffusion loss, and metrics."""
        s_a = self.condition(batch)
        loss = self.decoder.loss(
            batch.latents, s_a, batch.f_ms, self.levels, batch.seeds, self.prediction_type
        )
        return loss.mean(), {}


def new_encoder(
    config: Config, f_v: tuple[int, ...], f_md: tuple[int, ...]
) -> tuple[ActionAwareEncoder, AnimationDecoder]:
    """A fresh encoder, and the decoder on the video base.

    Args:
        config: variant, sizes, where the base lies.
        f_v: shape (N_v, W_v) of the visual features.
        f_md: shape (N_t, W_t) of the text features.
    """
    decoder = AnimationDecoder.from_base(
        config.backbones.video_base,
        num_tokens(config, f_v[0], f_md[0]),
        config.decoder.motion_scope,
        config.decoder.motion_scope_hidden,
        config.shot.frames,
    )
    return fitting_encoder(config, decoder, f_v, f_md), decoder


def num_tokens(config: Config, visual: int, text: int) -> int:
    """N, tokens of s_a, of the configured variant."""
    return visual + (text if config.encoder.variant in ("concat", "linear") else 0)


def fitting_encoder(
    config: Config, decoder: AnimationDecoder, f_v: tuple[int, ...], f_md: tuple[int, ...]
) -> ActionAwareEncoder:
    """A fresh encoder of the decoder's width; see ``new_encoder``."""
    settings = decoder.config
    grid = (settings.sample_height // 2, settings.sample_width // 2)
    return ActionAwareEncoder(
        variant=config.encoder.variant,
        text_tokens=f_md[0],
        visual_tokens=f_v[0],
        text_width=f_md[1],
        image_width=f_v[1],
        width=settings.num_attention_heads * settings.attention_head_dim,
        visual_grid=grid if config.encoder.visual_positions else None,
    )
