"""Performer's positive random features as a differentiable function, on CPU.

    phi(x) = exp(omega x - |x|^2 / 2 - m),   dx = (d_phi * phi) omega - x sum(d_phi * phi)

(Choromanski et al. 2021, lemma 1, with a maximum m that keeps the exponentials from overflowing.) Features are the
largest tensors of a layer, so they are computed by chunks of rows that stay in the cache, and the backward pass
allocates no tensor of their size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.kernels.memory import empty

_MANY = 1 << 20  # numbers: 4 MiB of float32
_CHUNK = 1 << 17  # numbers of a chunk per thread: 512 KiB of float32


def positive_features(
    x: Tensor, directions: Tensor, maximum: Callable[[Tensor], Tensor], constant: float = 0.0
) -> Tensor:
    """phi [..., F] of x [..., D], for directions [F, D]. `maximum` returns m [...], or a shape that broadcasts to it,
    from the logarithm of the largest feature of each row [...], and m gets the `constant` added. Gradients regard m as
    a constant."""
    if _is_worthwhile(x, directions):
        out: Tensor = _PositiveFeatures.apply(x, directions, lambda y: maximum(y) + constant)
        return out
    half = x.square().sum(-1, keepdim=True) / 2
    exponent = x @ directions.T
    if not exponent.numel():
        return exponent
    largest = maximum(exponent.detach().amax(-1) - half.detach().squeeze(-1)).unsqueeze(-1)
    # In place: the features are the largest tensor of a layer, and this allocates them once.
    return exponent.sub_(half + largest + constant).exp_()


def _is_worthwhile(x: Tensor, directions: Tensor) -> bool:
    """Whether there are enough features for this to be faster than torch operations, and nothing needs those."""
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and x.shape[:-1].numel() * len(directions) >= _MANY
        and not (directions.requires_grad or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
        and forward_ad.unpack_dual(x).tangent is None
    )


class _PositiveFeatures(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, directions: Tensor, maximum: Callable[[Tensor], Tensor]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        half = x.square().sum(-1) / 2
        phi = empty(x, len(rows), len(directions))
        largest = x.new_empty(len(rows))
        for chunk in _chunks(phi):
            torch.mm(rows[chunk], directions.T, out=phi[chunk])
            # The maximum is read while the chunk is in the cache.
            torch.amax(phi[chunk], -1, out=largest[chunk])
        shift = (half + maximum(largest.view_as(half) - half)).view(-1, 1)
        for chunk in _chunks(phi):
            # In a second pass, because `maximum` may look at all rows.
            phi[chunk].sub_(shift[chunk]).exp_()
        return phi.view(*x.shape[:-1], len(directions))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, directions, _ = inputs
        ctx.save_for_backward(x, directions, output)

    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> Any:
        x, directions, phi = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            g = d_phi * phi
            return g @ directions - x * g.sum(-1, keepdim=True), None, None
        rows, phi, d_phi = (t.reshape(-1, t.shape[-1]) for t in (x, phi, d_phi))
        d_x = empty(x, *rows.shape)
        for chunk in _chunks(phi):
            g = d_phi[chunk] * phi[chunk]
            torch.addcmul(g @ directions, rows[chunk], g.sum(-1, keepdim=True), value=-1, out=d_x[chunk])
        return d_x.view_as(x), None, None


def _chunks(x: Tensor) -> Iterator[slice]:
    step = max(_CHUNK * torch.get_num_threads() // max(x.shape[-1], 1), 1)
    return (slice(k, k + step) for k in range(0, len(x), step))
