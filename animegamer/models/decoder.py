"""Animation shot decoder (paper Sec. 3.2): CogVideoX conditioned on ``s_a`` and motion scope.

Axis letters: B batch, F latent frames, C latent channels, H x W latent grid, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from diffusers import CogVideoXTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn

from animegamer.checkpoint import CheckpointError, load_model
from animegamer.config import DiffusionConfig, PredictionType, SamplingConfig
from animegamer.models import diffusion

_INHERITED = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "time_embed_dim",
    "num_layers",
    "sample_width",
    "sample_height",
    "patch_size",
    "temporal_compression_ratio",
    "spatial_interpolation_scale",
    "temporal_interpolation_scale",
)


def inherited_sizes(base: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a decoder takes from its base's ``config.json``. Raises KeyError."""
    return {name: base[name] for name in _INHERITED}


def _width(sizes: Mapping[str, Any]) -> int:
    return int(sizes["num_attention_heads"] * sizes["attention_head_dim"])


def _motion_scope_embedding(width: int, hidden: int, out: int) -> TimestepEmbedding:
    """The MLP behind the sinusoid, of which the last layer starts at zero (release)."""
    embedding = TimestepEmbedding(width, hidden, out_dim=out)
    nn.init.zeros_(embedding.linear_2.weight)
    nn.init.zeros_(embedding.linear_2.bias)
    return embedding


class AnimationDecoder(CogVideoXTransformer3DModel):
    """CogVideoX with ``s_a`` in place of the projected text and ``f_ms`` in the ``ofs`` slot.

    The forward pass is diffusers' own: ``forward(hidden_states, encoder_hidden_states=s_a,
    timestep=t, ofs=f_ms)``. ``s_a`` already has the model's width, so the text projection is an
    identity. The motion-scope embedding is a sinusoid of the model's width and a two-layer MLP
    whose last layer starts at zero, added to the timestep embedding.

    Args:
        motion_scope: condition on motion scope (off: ablation "w/o f_ms").
        motion_scope_hidden: width inside its MLP. Release: 512.
        max_text_seq_length: N, tokens of s_a. Release: 226.
        sample_frames: F of the shot in pixels, 17, or positions are rebuilt at every call.

    The other arguments are CogVideoX-2B's.
    """

    # Fixed by CogVideoX-2B: not part of this class's config.
    ignore_for_config = [
        "activation_fn",
        "attention_bias",
        "dropout",
        "flip_sin_to_cos",
        "freq_shift",
        "norm_elementwise_affine",
        "norm_eps",
        "ofs_embed_dim",
        "patch_bias",
        "text_embed_dim",
        "timestep_activation_fn",
        "use_learned_positional_embeddings",
    ]

    # Names of weights that trained whole beside LoRA, and the base that LoRA stands on.
    whole: frozenset[str] = frozenset()
    lora_base: Path

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 30,
        attention_head_dim: int = 64,
        in_channels: int = 16,
        out_channels: int = 16,
        time_embed_dim: int = 512,
        num_layers: int = 30,
        sample_width: int = 90,
        sample_height: int = 60,
        sample_frames: int = 17,
        patch_size: int = 2,
        patch_size_t: None = None,
        temporal_compression_ratio: int = 4,
        max_text_seq_length: int = 226,
        spatial_interpolation_scale: float = 1.875,
        temporal_interpolation_scale: float = 1.0,
        use_rotary_positional_embeddings: Literal[False] = False,
        motion_scope: bool = True,
        motion_scope_hidden: int = 512,
    ) -> None:
        width = num_attention_heads * attention_head_dim
        super().__init__(
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            time_embed_dim=time_embed_dim,
            text_embed_dim=width,
            num_layers=num_layers,
            sample_width=sample_width,
            sample_height=sample_height,
            sample_frames=sample_frames,
            patch_size=patch_size,
            temporal_compression_ratio=temporal_compression_ratio,
            max_text_seq_length=max_text_seq_length,
            spatial_interpolation_scale=spatial_interpolation_scale,
            temporal_interpolation_scale=temporal_interpolation_scale,
        )
        self.patch_embed.text_proj = nn.Identity()
        # Release: 1e-6 here, where diffusers uses norm_eps for all.
        self.norm_out.norm.eps = 1e-6
        if motion_scope:
            self.ofs_proj = Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)
            self.ofs_embedding = _motion_scope_embedding(width, motion_scope_hidden, time_embed_dim)

    @classmethod
    def from_base(
        cls,
        base: str | Path,
        num_tokens: int,
        motion_scope: bool,
        motion_scope_hidden: int,
        sample_frames: int = 17,
        dtype: torch.dtype = torch.float32,
    ) -> AnimationDecoder:
        """Starts from a stock text-to-video CogVideoX, without its text projection.

        Args:
            base: directory in diffusers layout.
            num_tokens: N, tokens of s_a.
            motion_scope: condition on motion scope.
            motion_scope_hidden: width inside its MLP.
            sample_frames: frames of a shot; the base may have been made for more.
            dtype: of the weights.

        Raises:
            CheckpointError: no such base, a damaged one, or of another kind than CogVideoX-2B.
        """
        stock = load_model(CogVideoXTransformer3DModel, base, torch_dtype=dtype)
        for setting, what in (
            ("patch_size_t", "patches in time, as CogVideoX 1.5"),
            ("ofs_embed_dim", "an embedding of image-to-video models"),
            ("use_rotary_positional_embeddings", "rotary positions, as CogVideoX-5B"),
        ):
            if stock.config[setting]:
                raise CheckpointError(f"{base} has {what}; expected a base like CogVideoX-2B")
        sizes = inherited_sizes(stock.config)
        with init_empty_weights():  # the base's weights become the decoder's, without a second copy
            decoder = cls(
                **sizes,
                sample_frames=sample_frames,
                max_text_seq_length=num_tokens,
                motion_scope=motion_scope,
                motion_scope_hidden=motion_scope_hidden,
            )
        weights = stock.state_dict()
        for key in [key for key in weights if key.startswith("patch_embed.text_proj.")]:
            del weights[key]
        if motion_scope:
            decoder.ofs_embedding = _motion_scope_embedding(
                _width(sizes), motion_scope_hidden, sizes["time_embed_dim"]
            ).to(dtype)
        missing, unexpected = decoder.load_state_dict(weights, strict=False, assign=True)
        wrong = unexpected + [key for key in missing if not key.startswith("ofs_embedding.")]
        if wrong:
            raise CheckpointError(f"{base}: not a CogVideoX-2B-like transformer: {wrong[:3]}")
        return decoder

    def predict(
        self, latents: torch.Tensor, t: torch.Tensor, s_a: torch.Tensor, f_ms: torch.Tensor
    ) -> torch.Tensor:
        """One denoising pass; what it gives is the schedule's ``prediction_type``.

        Args:
            latents: (B, F, C, H, W) float, noisy.
            t: (B,) timesteps, 0 to 999.
            s_a: (B, N, D) float.
            f_ms: (B,) float, motion scope scalars.

        Returns:
            v or clean latents, (B, F, C, H, W) float.
        """
        extra: dict[str, Any] = {"ofs": f_ms} if self.config.motion_scope else {}
        return self(
            hidden_states=latents,
            encoder_hidden_states=s_a.to(latents.dtype),
            timestep=t,
            return_dict=False,
            **extra,
        )[0]

    def loss(
        self,
        latents: torch.Tensor,
        s_a: torch.Tensor,
        f_ms: torch.Tensor,
        levels: torch.Tensor,
        seeds: Sequence[int] = (),
        prediction_type: PredictionType = "v_prediction",
    ) -> torch.Tensor:
        """The diffusion loss at uniformly drawn timesteps (release).

        Args:
            latents: (B, F, C, H, W) float.
            s_a: (B, N, D) float.
            f_ms: (B,) float.
            levels: (train_steps,) signal levels of the schedule.
            seeds: of each sample's timestep and noise, see ``diffusion.draw``.
            prediction_type: what the decoder predicts.

        Returns:
            (B,) float, mean squared error of each shot.
        """
        t, noise = diffusion.draw(latents, len(levels), seeds)
        a = levels.to(latents.device)[t]
        output = self.predict(diffusion.add_noise(latents, noise, a), t, s_a, f_ms)
        return diffusion.loss(output, latents, noise, a, prediction_type)

    def through_layers(self, device: str) -> None:
        """Leaves the blocks in host memory and lets each come to a device as it is needed."""
        self.enable_group_offload(
            onload_device=torch.device(device),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=torch.device(device).type == "cuda",
        )

    @torch.no_grad()
    def sample(
        self,
        s_a: torch.Tensor,
        f_ms: torch.Tensor,
        s_a_null: torch.Tensor,
        sampling: SamplingConfig,
        schedule: DiffusionConfig,
        generators: list[torch.Generator],
    ) -> torch.Tensor:
        """Samples shots.

        Args:
            s_a: (B, N, D) float.
            f_ms: (B,) float, motion scope scalars.
            s_a_null: (N, D) float, the encoder's output for zero features.
            sampling: steps, guidance.
            schedule: the training schedule.
            generators: one per shot, so that a shot does not depend on its batch.

        Returns:
            (B, F, C, H, W) float32 latents. They stay float32 between the steps, whatever the type
            of the weights.

        Raises:
            FloatingPointError: at the first step that gives numbers that are not finite.
        """
        config = self.config
        frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
        shape = (frames, config.in_channels, config.sample_height, config.sample_width)
        dtype = self.patch_embed.proj.weight.dtype

        def draw() -> torch.Tensor:
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(s_a.device)

        def step_noise() -> Any:
            while True:
                yield draw()

        table = diffusion.signal_levels(schedule)
        null = s_a_null.to(s_a).expand_as(s_a)
        guided = sampling.guidance != "none"
        both = torch.cat([null, s_a]) if guided else s_a
        scope = torch.cat([f_ms, f_ms]) if guided else f_ms

        def denoise(latents: torch.Tensor, step: int, timestep: int, a: float) -> torch.Tensor:
            # Release: the denoiser uses the entry of the training table nearest to a.
            level = table[(table - a).abs().argmin()].item()
            inputs = torch.cat([latents, latents]) if guided else latents
            t = torch.full((len(inputs),), timestep, device=latents.device)
            output = self.predict(inputs.to(dtype), t, both, scope).float()
            if not torch.isfinite(output).all():
                raise FloatingPointError(
                    f"the decoder gives numbers that are not finite at sampling step {step + 1} of "
                    f"{sampling.steps}, with weights in {str(dtype).removeprefix('torch.')}: set "
                    "play.decoder_precision=bf16, which has a wider range, or play.precision=no"
                )
            estimate = diffusion.estimate(output, inputs, level, schedule.prediction_type)
            if not guided:
                return estimate
            without, with_condition = estimate.chunk(2)
            scale = diffusion.guidance_scale(sampling, step, timestep)
            return without + scale * (with_condition - without)

        return diffusion.sample(denoise, draw(), schedule, sampling, step_noise())
