"""What stage 2 trains: the MLLM on representations from the frozen encoder."""

from __future__ import annotations

import torch
from torch import nn

from animegamer.game_data import GameBatch
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.mllm import NextStateMLLM


class StateModel(nn.Module):
    """Frozen encoder and MLLM; ``s_a`` is computed on the fly, it costs two small MLPs.

    Args:
        encoder: action-aware encoder of stage 1.
        mllm: the MLLM.
    """

    def __init__(self, encoder: ActionAwareEncoder, mllm: NextStateMLLM) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()
        self.mllm = mllm

    def fill(self, batch: GameBatch) -> GameBatch:
        """Sets ``batch.s_a`` (B, T, N, D) from its features."""
        assert batch.f_v is not None and batch.f_md is not None
        size = batch.f_v.shape[:2]
        with torch.no_grad():
            s_a = self.encoder(batch.f_v.flatten(0, 1), batch.f_md.flatten(0, 1))
        batch.s_a = s_a.float().unflatten(0, size)
        return batch

    def forward(self, batch: GameBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The MLLM's loss and metrics."""
        return self.mllm(self.fill(batch))
