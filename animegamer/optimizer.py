"""The optimiser of a training run: AdamW, and Muon for weight matrices where a rate is set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from animegamer.config import ConfigError, TrainConfig
from animegamer.parallel import sharded_like, whole

_MOMENTUM = 0.95
# Quintic Newton-Schulz iteration with the coefficients and steps of torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def build_optimizer(
    train: TrainConfig, model: nn.Module, groups: dict[str, list[str]]
) -> torch.optim.AdamW:
    """AdamW over the trained parameters; with ``train.matrix_lr``, Muon over their matrices.

    Args:
        train: rates, weight decay.
        model: what trains.
        groups: parameter names by entry of ``train.trainable``.

    Raises:
        ConfigError: if ``train.lr_groups`` names what does not train.
    """
    unknown = sorted(set(train.lr_groups) - set(groups))
    if unknown:
        raise ConfigError(f"train.lr_groups: {unknown[0]!r} is not in train.trainable")
    named = dict(model.named_parameters())
    hidden = _hidden_matrices(model) if train.matrix_lr else set()
    parts: list[dict[str, Any]] = []

    def add(names: list[str], peak: float, weight_decay: float, orthogonal: bool) -> None:
        if names:
            rates = {"peak_lr": peak, "lr": peak, "weight_decay": weight_decay}
            parts.append({"params": [named[n] for n in names], "orthogonal": orthogonal, **rates})

    for pattern, names in groups.items():
        peak = train.lr_groups.get(pattern, train.lr)
        matrices = [n for n in names if n in hidden]
        others = [n for n in names if n not in hidden]
        add(matrices, train.matrix_lr * peak / train.lr, train.weight_decay, True)
        add([n for n in others if named[n].ndim > 1], peak, train.weight_decay, False)
        add([n for n in others if named[n].ndim <= 1], peak, 0.0, False)
    kind = MuonAdamW if train.matrix_lr else torch.optim.AdamW
    return kind(parts, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Weights of linear layers, but for those that score a vocabulary."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("lm_head")
    }


class MuonAdamW(torch.optim.AdamW):
    """Muon for parameter groups with ``orthogonal``, AdamW for the others.

    One optimiser, so that one checkpoint and one schedule hold it. Like ``torch.optim.Muon`` with
    ``match_rms_adamw``; that class takes no other parameters beside matrices and always iterates
    in bfloat16, which CPUs without it compute some 25 times slower.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates all parameters that have a gradient; drops the gradients of matrices."""
        for group in self.param_groups:
            if not group["orthogonal"]:
                continue
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["step"] = torch.zeros(())  # AdamW looks for it when states are loaded
                    state["momentum"] = torch.zeros_like(matrix)
                state["step"] += 1
                state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                ahead = matrix.grad.lerp(state["momentum"], _MOMENTUM)
                size = 0.2 * math.sqrt(max(matrix.shape))  # makes the mean square that of AdamW
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                # Of a matrix in shards every process computes the whole, and takes its own rows.
                update = sharded_like(orthogonal(whole(ahead)).to(matrix.dtype), matrix)
                matrix.add_(update, alpha=-group["lr"] * size)
                matrix.grad = None  # AdamW passes over it
        return super().step(closure)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest semi-orthogonal matrix: singular values near 1, same singular vectors.

    Args:
        matrix: (M, N) float.

    Returns:
        (M, N), in bfloat16 where the device computes it, else in float32.
    """
    native = matrix.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = (x / x.norm().clamp(min=1e-7)).to(torch.bfloat16 if native else torch.float32)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
