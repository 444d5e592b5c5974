"""DeepSpeed's ZeRO: AdamW's moments as whole tensors of each parameter, and back.

ZeRO flattens parameters and shares the moments of the flat vectors out. As whole tensors they are
saved in the one format of our checkpoints, without pickles and for any number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_MOMENTS = ("exp_avg", "exp_avg_sq")


def gathered(parameter: nn.Parameter) -> Any:
    """A context in which a parameter under ZeRO-3 is whole."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def local(parameter: Any) -> torch.Tensor:
    """The part that this process holds of a parameter under ZeRO-3, flat."""
    part = parameter.ds_tensor
    start = part.numel() * torch.distributed.get_rank()
    return part[: max(0, min(part.numel(), parameter.ds_numel - start))]  # the rest is padding


def is_zero(optimizer: Any) -> bool:
    """Whether the optimiser is DeepSpeed's, around torch's."""
    return _flat(optimizer) is not None


def _flat(optimizer: Any) -> list[torch.Tensor] | None:
    """The flat vectors that this process optimises: of ZeRO-3, or of ZeRO-2."""
    second = getattr(optimizer, "single_partition_of_fp32_groups", None)
    return getattr(optimizer, "fp32_partitioned_groups_flat", second)


def moments(optimizer: Any, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """``exp_avg``, ``exp_avg_sq`` and ``step`` of a parameter; every process has to ask."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
    steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
    return {**found, "step": torch.as_tensor(steps[0]).clone()}


def set_moments(optimizer: Any, kept: dict[nn.Parameter, dict[str, torch.Tensor]]) -> None:
    """Gives ZeRO its first moments: zeros, or a checkpoint's; every process gives the same.

    ZeRO would make them in its first step, but with several parameter groups ZeRO-2 then never
    finds those of the later ones again.
    """
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    step = next(iter(kept.values()))["step"] if kept else torch.zeros(())
    for flat in _flat(optimizer) or ():
        made = {key: torch.zeros_like(flat) for key in _MOMENTS}
        optimizer.optimizer.state[flat] = {**made, "step": step.clone().to(flat.device)}
    partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if not partitioned:
        optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, state in kept.items():
        for key in _MOMENTS:
            value = state[key].to(parameter.device)
            if partitioned:
                safe_set_local_optimizer_state(parameter, _own_part(value, parameter), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)


def _own_part(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """What ZeRO-3 gives this process of a tensor: a slice of the flat one, padded."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    part = value.flatten()[start : start + size]
    return functional.pad(part, (0, size - part.numel()))
