"""The grid of a decoder, read from its stored table of positions.

The authors' file has no settings beside the weights; how many frames, rows and columns the network
was made for shows in this table alone.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from diffusers.models.embeddings import get_3d_sincos_pos_embed

from animegamer.checkpoint import CheckpointError
from animegamer.convert.tensors import LazyTensor


def read_positions(positions: LazyTensor, where: str) -> tuple[int, int, int, int, float]:
    """Reads the grid from the stored table of positions, which is zero for the tokens of s_a.

    Args:
        positions: (1, N + frames * rows * columns, D).
        where: file and key, for messages.

    Returns:
        N, latent frames, rows, columns, and the scale that rows and columns are divided by.

    Raises:
        CheckpointError: if it is not CogVideoX's sine-cosine table.
    """
    if len(positions.shape) != 3 or positions.shape[2] < 16:
        raise CheckpointError(f"{where} has shape {positions.shape}, expected (1, positions, D)")
    table = positions.make().flatten(0, 1).float()
    width = table.shape[1]
    used = table.abs().sum(1) > 0
    tokens = int(used.int().argmax())
    table = table[tokens:]
    time, column, row = table.split((width // 4, 3 * width // 8, width - 5 * width // 8), 1)

    def period(values: torch.Tensor, *, repeats: bool) -> int:
        same = (values[1:] == values[:1]).all(1)
        places = (same if repeats else ~same).nonzero()
        return int(places[0]) + 1 if len(places) else len(values)

    area = period(time, repeats=False)
    columns = period(column[:area], repeats=True)
    axis = max(column[:columns], row[:area:columns], key=len)
    half = axis.shape[1] // 2  # sines, then cosines, the first of frequency 1
    phase = np.unwrap(torch.atan2(axis[:, 0], axis[:, half]).numpy())
    scale = 1.0
    if len(axis) > 1 and phase[-1] > 0:
        scale = float(Fraction((len(axis) - 1) / float(phase[-1])).limit_denominator(32))
    frames, rows = len(table) // area, area // columns
    if width % 16 == 0 and frames * rows * columns == len(table):
        expected = get_3d_sincos_pos_embed(width, (columns, rows), frames, scale).flatten(0, 1)
        error = (expected.float() - table).abs().max().item()
        if error <= 1e-5 + 2 * torch.finfo(positions.dtype).eps:
            return tokens, frames, rows, columns, scale
    raise CheckpointError(
        f"{where} {positions.shape} is not CogVideoX's sine-cosine table of a grid (read as "
        f"{frames} frames of {rows} x {columns}, scale {scale:g}, behind {tokens} tokens)"
    )
