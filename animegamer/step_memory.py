"""Memory of a training step or of a prediction, found without having that memory.

The real forward and backward pass runs on tensors that have shapes and no content (torch's fake
tensors), and every allocation and release is counted. Integers that steer the pass, such as token
ids, stay real. What is counted is what torch's CPU operators allocate: on a GPU autocast keeps
LayerNorms in float32 and attention has kernels of its own, which shifts activations a little, and
the allocator rounds up. The scratch memory of convolutions is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Trace:
    """What a pass holds, moment by moment, beside weights, optimiser state and inputs.

    Attributes:
        working: (M,) bytes of everything but gradients of parameters: the batch, activations,
            temporary results, casts of weights.
        gradients: (M,) bytes of gradients of parameters.
        optimizer: bytes of the optimiser's state after a step.
        optimizer_work: most bytes that the optimiser's step itself needs for a moment.
    """

    working: np.ndarray
    gradients: np.ndarray
    optimizer: int = 0
    optimizer_work: int = 0

    def peak(self, gradient_share: float = 1.0) -> int:
        """Most bytes at one moment, if only a share of the gradients is kept."""
        return int((self.working + gradient_share * self.gradients).max())


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A fake tensor that claims to lie on the CPU, for one on the meta device."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        new = torch.empty(tensor.shape, dtype=kind, device="cpu")
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _make_fake(mode: FakeTensorMode, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Makes a model's weights fake, in place; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = made.setdefault(id(tensor), _fake(mode, tensor, dtype))


class _Recorder(TorchDispatchMode):
    """Counts live storages; runs what needs real numbers on real numbers."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.live: dict[int, int] = {}
        self.total = self.gradients = 0
        self.moments: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if fake and func is torch.ops.aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _integers(index)])
        # What is made of nothing is fake if it is floating point: noise, zeros, masks.
        result = func(*args, **kwargs) if fake or not tensors else None
        if result is None or (not fake and not _floating(result)):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        self.moments.append((self.total - self.gradients, self.gradients))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live and key not in self.known:
            self.live[key] = storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)

    def is_gradient(self, parameter: torch.Tensor) -> None:
        """Counts a parameter's finished gradient as one."""
        assert parameter.grad is not None
        self.gradients += self.live.get(parameter.grad.untyped_storage()._cdata, 0)

    def trace(self) -> Trace:
        """What was counted, this moment included."""
        self.moments.append((self.total - self.gradients, self.gradients))
        working, gradients = np.array(self.moments, dtype=np.int64).T
        return Trace(working, gradients)


def _floating(result: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tree_leaves(result))


def _integers(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Real masks as the indices that they stand for, so that the result has a known shape."""
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return (index,)
    with unset_fake_temporarily():
        return index.nonzero(as_tuple=True)


def _autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def trace_training(
    model: nn.Module,
    batch: Any,
    optimizer: Callable[[], torch.optim.Optimizer],
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    """One training step of a model on the meta device, which becomes a fake one.

    Args:
        model: ``loss, metrics = model(batch)``; its ``requires_grad`` says what trains.
        batch: a dataclass of tensors; those on the meta device become fake, the others count for
            what they are.
        optimizer: makes the optimiser, when the weights are there.
        autocast: type of mixed precision, or None.
        dtype: of the weights; None keeps theirs.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _make_fake(mode, model, dtype)
    inputs = {k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    inputs = {k: _fake(mode, v, None) if v.is_meta else v for k, v in inputs.items()}
    batch = replace(batch, **inputs)
    model.train()
    with mode:
        recorder = _Recorder([*model.parameters(), *model.buffers(), *inputs.values()])
        recorder.total = sum(tensor.nbytes for tensor in inputs.values())
        hooks = [
            parameter.register_post_accumulate_grad_hook(recorder.is_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        with recorder:
            with _autocast(autocast):
                loss, metrics = model(batch)
            loss.backward()
            del loss, metrics
            trace = recorder.trace()
            for hook in hooks:
                hook.remove()
            before = len(recorder.moments)
            made = optimizer()
            made.step()
        states = [t for s in made.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        kept = sum(tensor.untyped_storage().nbytes() for tensor in states)
        during = max((w for w, _ in recorder.moments[before:]), default=0)
    return Trace(trace.working, trace.gradients, kept, max(0, during - kept))


def trace_prediction(
    model: nn.Module,
    predict: Callable[[], Any],
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    """A pass without gradients of a model on the meta device, which becomes a fake one.

    Args:
        model: whose weights do not count.
        predict: makes the inputs, on torch's default device, and runs the pass.
        autocast: type of mixed precision, or None.
        dtype: of the weights; None keeps theirs.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _make_fake(mode, model, dtype)
    model.eval()
    recorder = _Recorder([*model.parameters(), *model.buffers()])
    with mode, torch.no_grad(), recorder, _autocast(autocast):
        predict()
    return recorder.trace()
