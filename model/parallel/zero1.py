"""ZeRO stage 1 (arXiv 1910.02054): each of n ranks has the optimizer's state of 1/n of the model.

All parameters are views of one flat tensor, all gradients of another. A step reduces and scatters
the gradients, so that each rank has the mean of its part only; its optimizer updates that part of
the parameters; and all parts are gathered. With a ring, each rank sends (n-1)/n of the bytes of the
gradients and (n-1)/n of those of the parameters: as much as for one all-reduce, in two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.parallel.collectives import Collectives
from model.parallel.data_parallel import trained_parameters

# Elements. Kernels read whole cache lines of a GPU, 128 bytes, and are slow across two of them.
_ALIGNMENT = 32


class Zero1:
    """A sharded optimizer of all trained parameters of a model.

    make_optimizer: makes one that treats each element by itself, like AdamW. It gets a list of
        parameters, each a part of one of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        collectives: Collectives,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        self._collectives = collectives
        self._trained = trained_parameters(model)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._flats = [_FlatParameters(one, collectives) for one in by_dtype.values()]
        self._pieces = [piece for flat in self._flats for piece in flat.pieces]
        self.optimizer = make_optimizer([piece.part for piece in self._pieces])

    def zero_grad(self) -> None:
        """Forget all gradients. Their memory stays: the next ones overwrite it."""
        for parameter in self._trained:
            parameter.grad = None

    def communicate(self) -> None:
        """Give this rank's part of the parameters the mean gradients."""
        if self._collectives.is_on:
            for flat in self._flats:
                self._collectives.average_part(flat.gradients)
        for piece in self._pieces:
            # A parameter without a gradient is not updated, not even by weight decay.
            piece.part.grad = None if piece.whole.grad is None else piece.gradient

    def gather(self) -> None:
        """Give all ranks the updated parameters, after the optimizer."""
        if self._collectives.is_on:
            for flat in self._flats:
                self._collectives.gather_parts(flat.values)


@dataclass(frozen=True)
class _Piece:
    """The part of one parameter that a rank updates; it and its gradient are views of flat tensors."""

    whole: nn.Parameter
    part: nn.Parameter
    gradient: Tensor


class _FlatParameters:
    """Parameters of one dtype, as views of the flat tensor `values`, padded to n equal parts."""

    def __init__(self, parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
        first, offsets, end = parameters[0], [], 0
        for parameter in parameters:
            offsets.append(end)
            end += _rounded_up(parameter.numel(), _ALIGNMENT)
        size = _rounded_up(end, _ALIGNMENT * collectives.ranks)
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.values)
        self._gradient_of: dict[Tensor, Tensor] = {}
        length = size // collectives.ranks
        low = collectives.rank * length
        self.pieces: list[_Piece] = []
        for parameter, offset in zip(parameters, offsets, strict=True):
            stop = offset + parameter.numel()
            values = self.values[offset:stop].view(parameter.shape)
            parameter.data = values.copy_(parameter.detach())
            self._gradient_of[parameter] = self.gradients[offset:stop].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]
            own = slice(max(offset, low), min(stop, low + length))
            if own.start < own.stop:
                part = nn.Parameter(self.values[own])
                self.pieces.append(_Piece(parameter, part, self.gradients[own]))

    def _move(self, parameter: Tensor) -> None:
        """Move a new gradient into the flat tensor, where later ones are added to it."""
        place = self._gradient_of[parameter]
        if parameter.grad is not place:
            assert parameter.grad is not None
            parameter.grad = place.copy_(parameter.grad)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
