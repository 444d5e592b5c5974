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


def is_optimised(parameter: nn.Parameter) -> bool:
    """Whether ZeRO holds the parameter's moments."""
    return _holder(parameter) is not None


def moments(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """``exp_avg``, ``exp_avg_sq`` and ``step`` of a parameter; every process has to ask."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
    steps = [state["step"] for state in _holder(parameter).optimizer.state.values() if state]
    return {**found, "step": torch.as_tensor(steps[0])}


def set_moments(kept: dict[nn.Parameter, dict[str, torch.Tensor]]) -> None:
    """Hands the moments of a checkpoint to ZeRO; every process gives the same."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if not kept:
        return
    zero = _holder(next(iter(kept)))
    partitioned = hasattr(zero, "fp32_partitioned_groups_flat")  # ZeRO-3
    if not partitioned:
        step = next(iter(kept.values()))["step"]
        for flat in zero.single_partition_of_fp32_groups:
            made = {key: torch.zeros_like(flat) for key in _MOMENTS}
            zero.optimizer.state[flat] = {**made, "step": step.clone().to(flat.device)}
        zero._lazy_init_hp_params_optimizer_state()
    for parameter, state in kept.items():
        for key in _MOMENTS:
            value = state[key].to(parameter.device)
            if partitioned:
                safe_set_local_optimizer_state(parameter, _own_part(value, parameter), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
    if partitioned:
        for state in zero.optimizer.state.values():
            state["step"] = next(iter(kept.values()))["step"].clone().to(state["step"].device)


def _own_part(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """What ZeRO-3 gives this process of a tensor: a slice of the flat one, padded."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    part = value.flatten()[start : start + size]
    return functional.pad(part, (0, size - part.numel()))


def _holder(parameter: Any) -> Any:
    """The ZeRO optimiser of a parameter, or None."""
    return getattr(parameter, "_z3_optimizer", getattr(parameter, "_zero_optimizer", None))
