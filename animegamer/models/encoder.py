"""Action-aware encoder (paper Eq. 1): first frame and action text to ``s_a``.

Axis letters: B batch, N tokens of s_a (text first, then visual), D width.
"""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from diffusers.models.modeling_utils import ModelMixin
from torch import nn


class Branch(nn.Module):
    """One branch: Linear, GELU, Linear, LayerNorm; or Linear, LayerNorm ("w/ less para")."""

    def __init__(self, width_in: int, width: int, linear: bool) -> None:
        super().__init__()
        self.proj: nn.Module = (
            nn.Linear(width_in, width)
            if linear
            else nn.Sequential(nn.Linear(width_in, width), nn.GELU(), nn.Linear(width, width))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, n, width_in) -> (B, n, D)."""
        return self.norm(self.proj(tokens))


class ActionAwareEncoder(ModelMixin, ConfigMixin):
    """s_a = Concat(LN(MLP(f_md)), LN(MLP(f_v))), text tokens first (paper Eq. 1).

    Args:
        variant: ``concat`` (paper), ``linear``, ``addition`` or ``cross_attention`` (App. C.3).
        text_tokens: N_t. Release: 30.
        visual_tokens: N_v. Release: 196.
        text_width: width of ``f_md``. Release: 4096.
        image_width: width of ``f_v``. Release: 768.
        width: D, the decoder's width. Release: 1920.
        visual_grid: rows and columns of a fixed sin-cos table that is added to the visual tokens,
            or None. Deviation: the paper has none.
    """

    @register_to_config
    def __init__(
        self,
        variant: str = "concat",
        text_tokens: int = 30,
        visual_tokens: int = 196,
        text_width: int = 4096,
        image_width: int = 768,
        width: int = 1920,
        visual_grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if variant not in ("concat", "linear", "addition", "cross_attention"):
            raise ValueError(f"unknown encoder variant {variant!r}")
        self.text = Branch(text_width, width, variant == "linear")
        self.visual = Branch(image_width, width, variant == "linear")
        if variant == "cross_attention":
            # Assumed: visual tokens ask, text tokens answer; the paper gives no detail.
            self.attention = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        if visual_grid is not None:
            rows, columns = visual_grid
            if rows * columns != visual_tokens:
                raise ValueError(
                    f"visual grid {rows} x {columns} holds {rows * columns} tokens, "
                    f"visual_tokens is {visual_tokens}"
                )
            table = get_2d_sincos_pos_embed(width, (rows, columns), output_type="pt")
            self.register_buffer("positions", table.float().view(rows * columns, width), False)

    @property
    def num_tokens(self) -> int:
        """N, tokens of s_a."""
        config = self.config
        joined = config.variant in ("concat", "linear")
        return config.visual_tokens + (config.text_tokens if joined else 0)

    def forward(self, f_v: torch.Tensor, f_md: torch.Tensor) -> torch.Tensor:
        """Encodes shots.

        Args:
            f_v: (B, N_v, W_v) float, CLIP patch tokens.
            f_md: (B, N_t, W_t) float, T5 states.

        Returns:
            s_a, (B, N, D) float.

        Raises:
            ValueError: if the features have another shape than the encoder was made for.
        """
        config = self.config
        for name, tokens, count, width in (
            ("f_v", f_v, config.visual_tokens, config.image_width),
            ("f_md", f_md, config.text_tokens, config.text_width),
        ):
            if tokens.shape[1:] != (count, width):
                raise ValueError(
                    f"{name} is {tuple(tokens.shape)}, expected (B, {count}, {width}): the "
                    "features come from other backbones than the encoder"
                )
        text, visual = self.text(f_md), self.visual(f_v)
        if config.visual_grid is not None:
            visual = visual + self.positions.to(visual.dtype)
        if config.variant == "addition":
            # Assumed: the mean text token is added to each visual token.
            return visual + text.mean(1, keepdim=True)
        if config.variant == "cross_attention":
            return visual + self.attention(visual, text, text, need_weights=False)[0]
        return torch.cat([text, visual], 1)

    @torch.no_grad()
    def null(self) -> torch.Tensor:
        """s_a of zero features, (N, D): the unconditional input of guidance (release)."""
        config, weight = self.config, next(self.parameters())
        f_v = weight.new_zeros(1, config.visual_tokens, config.image_width)
        f_md = weight.new_zeros(1, config.text_tokens, config.text_width)
        return self(f_v, f_md)[0]
