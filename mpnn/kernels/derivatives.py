"""Derivatives of derivatives: how backward passes of kernels are differentiated again.

Kernels compute first derivatives. Where these are to be differentiated (`create_graph=True`), a backward pass returns
the gradients of the kernel's reference instead, an equal function of differentiable operations: `Fused`. So first
derivatives take no longer for it. A kernel without a reference raises an error when its gradients are differentiated.

Torch's own `once_differentiable` raises only if the incoming gradient requires gradients. If that is a constant, as
when an energy is a sum of outputs, the dependence of the gradient on the features would be lost silently. Training on
forces needs that dependence.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `backward(ctx, *gradients) -> tuple` of an autograd function. Its results raise RuntimeError if they are
    differentiated by the incoming gradients or by a tensor that `ctx` saved. Batches of gradients raise at once,
    because kernels read addresses."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_batches(*gradients)
        if forward_ad._current_level >= 0:
            _refuse_tangents(*gradients, *ctx.saved_tensors)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph=True
            return results
        # A result is tied to what it depends on, so that a later derivative finds this node and raises, instead of
        # being 0.
        inputs = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(_Last.apply(x, *inputs) if inputs and x is not None else x for x in results)

    return once


class Fused(torch.autograd.Function):
    """A function of tensors that a kernel computes with its first derivatives. Those of higher order are the
    derivatives of its reference.

    A subclass says which arguments of `apply` are its tensors, `TENSORS`, and has two static methods:
        forward(ctx, ...): calls `ctx.save_for_backward(*tensors, *results)`, with the tensors as they were passed,
            because no gradient would flow through copies, and sets `ctx.reference`, a function of these tensors with
            equal results, made of differentiable operations; None if there is none. Where the gradients do not depend
            on the numbers of the first tensor, None may be saved in its place, and `ctx.form` is its shape and dtype.
        gradients(ctx, *upstream): the gradient of each tensor, None where there is none.
    """

    TENSORS: ClassVar[slice]

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        kernel = getattr(ctx, "kernel", ctx._forward_cls)  # a transform of torch.func makes another class
        needs = ctx.needs_input_grad
        if not are_differentiated(upstream):
            found = kernel.gradients(ctx, *upstream)
        elif ctx.reference is None:
            found = once_differentiable(kernel.gradients)(ctx, *upstream)
        else:
            wanted = needs[kernel.TENSORS]
            tensors = list(ctx.saved_tensors[: len(wanted)])
            if wanted[0] and tensors[0] is None:
                shape, dtype = ctx.form
                device = next(x.device for x in upstream if x is not None)
                tensors[0] = torch.zeros(shape, dtype=dtype, device=device).requires_grad_()
            found = gradients_again(ctx.reference, tensors, wanted, upstream)
        options = [None] * (kernel.TENSORS.start or 0)
        return *options, *found, *[None] * (len(needs) - len(options) - len(found))

    @staticmethod
    def gradients(ctx: Any, *upstream: Any) -> Sequence[Tensor | None]:
        raise NotImplementedError


class Kernel(NamedTuple):
    """The loops of a family on one kind of device, as functions of tensors. `needs` says which tensors need gradients.

    Attributes:
        forward: (options, needs, *tensors) -> the results, and the tensors that `gradients` reads next to the inputs,
            None for those that are not wanted.
        gradients: (options, needs, tensors, saved, *upstream) -> the gradient of each tensor, None where there is none.
            One of the results, at least, has a gradient.
        reads_first: (options, needs) -> whether `gradients` reads the first tensor. If not, it is None there, and its
            memory is not kept.
    """

    forward: Callable[..., tuple[Any, tuple[Tensor | None, ...]]]
    gradients: Callable[..., Sequence[Tensor | None]]
    reads_first: Callable[[Any, Sequence[bool]], bool] = lambda options, needs: True


def launch(kernel: Kernel, options: Any, reference: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """The results of a kernel, with its derivatives. `options`: all that are not tensors. `reference`: as in
    `Fused`."""
    return _Launch.apply(kernel, options, reference, *tensors)


class _Launch(Fused):
    TENSORS = slice(3, None)

    @staticmethod
    def forward(ctx: Any, loops: Kernel, options: Any, reference: Any, *tensors: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[3:]
        results, saved = loops.forward(options, needs, *tensors)
        ctx.loops = loops
        ctx.options = options
        ctx.reference = reference
        first, *others = tensors
        if first is not None and not loops.reads_first(options, needs):
            ctx.form = first.shape, first.dtype
            first = None
        ctx.save_for_backward(first, *others, *saved)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def gradients(ctx: Any, *upstream: Tensor | None) -> Sequence[Tensor | None]:
        needs = ctx.needs_input_grad[3:]
        count = len(needs)
        saved = ctx.saved_tensors
        if all(x is None for x in upstream):
            return [None] * count
        return ctx.loops.gradients(ctx.options, needs, saved[:count], saved[count:], *upstream)


def is_recorded() -> bool:
    """Whether operations that run now are recorded for derivatives, or transformed, so that a kernel must be an
    autograd function: to call one takes as long as a kernel over a molecule."""
    recorded = torch.is_grad_enabled() or forward_ad._current_level >= 0
    return recorded or torch._C._are_functorch_transforms_active()


def are_differentiated(gradients: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass with these gradients is differentiated again, in reverse or forward mode, or they are
    batches, which kernels do not read."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0 or are_batches(gradients)


def gradients_again(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], needs: Sequence[bool], upstream: Sequence[Any]
) -> list[Tensor | None]:
    """The gradients of a function, which can be differentiated any number of times.

    Args:
        function: of the tensors, made of differentiable operations; returns an output, or a tuple of outputs.
        tensors: inputs of an autograd function as its backward pass finds them. needs: which of them need a gradient.
        upstream: the gradient of each output, None for one that has none.

    Returns:
        A gradient for each tensor, None where none is needed.
    """
    if any(need and not (x is not None and x.requires_grad) for x, need in zip(tensors, needs, strict=True)):
        _refuse()  # What was saved is a copy, to which no gradient would flow.
    with torch.enable_grad():
        # A view of each, because one tensor may be passed as several inputs.
        views = [x if x is None else x.view_as(x) for x in tensors]
        outputs = function(*views)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs = [(y, d) for y, d in zip(outputs, upstream, strict=False) if d is not None and y.requires_grad]
    wanted = [x for x, need in zip(views, needs, strict=False) if need and x is not None]
    if not pairs or not wanted:
        found = iter([torch.zeros_like(x) for x in wanted])
    else:
        outputs, ds = zip(*pairs, strict=True)
        # Batches have one more dimension than the zeros of an input that the outputs do not depend on.
        is_batch = are_batches(ds)
        found = iter(
            torch.autograd.grad(
                outputs, wanted, ds, create_graph=True, allow_unused=True, materialize_grads=not is_batch
            )
        )
    return [next(found) if need else None for need in needs]


def refuse_batches(*gradients: Tensor | None) -> None:
    """Raises RuntimeError for batches of gradients."""
    if are_batches(gradients):
        raise RuntimeError(
            "this backend computes one gradient at a time, not a batch (is_grads_batched=True, or jacobian and "
            'hessian with vectorize=True): call torch.autograd.grad in a loop, or name backend="edge_list"'
        )


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises NotImplementedError for dual numbers, whose tangents a kernel would lose."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            'this backward pass has no forward-mode derivatives (jvp, dual numbers): name backend="edge_list"'
        )


def are_batches(gradients: Sequence[Tensor | None]) -> bool:
    """Whether some gradient is a batch of gradients (is_grads_batched=True)."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


class _Last(torch.autograd.Function):
    """The identity on a gradient; its backward raises."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor) -> Any:  # type: ignore[no-untyped-def]
        _refuse()


def differentiable_again(out: Tensor) -> Tensor:
    """`out` of torch's scaled dot product attention, whose fused kernels have first derivatives only. Those of higher
    order are computed by its formula."""
    node = out.grad_fn
    if node is not None and node.name().startswith(("ScaledDotProduct", "FlashAttention")):
        node.register_hook(_by_formula)
    return out


def _by_formula(gradients: Any, upstream: Any) -> Any:
    """Replaces gradients that torch's kernel computed, if they are differentiated again. The tensors are those that
    torch saved, so that the hook keeps none alive."""
    if not are_differentiated(upstream):
        return None
    node: Any = torch._C._current_autograd_node()
    packed = getattr(node, "_saved_cum_seq_q", None) is not None
    if not node.name().startswith("ScaledDotProduct") or packed or node._saved_dropout_p:
        return _refuse_behind(gradients)
    mask = getattr(node, "_saved_attn_mask", None)
    mask = getattr(node, "_saved_attn_bias", None) if mask is None else mask
    causal = node._saved_is_causal
    scale = node._saved_scale

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, mask, causal, scale)

    features = node._saved_query, node._saved_key, node._saved_value
    needs = [x is not None for x in gradients[:3]]
    return *gradients_again(formula, features, needs, upstream[:1]), *gradients[3:]


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Computes torch's scaled dot product attention by differentiable operations."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if causal:
        # torch aligns its causal mask at the upper left corner.
        past = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        logits = logits.masked_fill(~past, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(wide)
    # torch's kernels give zeros for a row without keys, where the softmax would give NaN.
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).to(query.dtype)


def refuse_second_derivatives(out: Tensor) -> Tensor:
    """`out` of torch's flash kernel for packed texts: second derivatives raise the sentence of this module instead of
    the name of torch's operation."""
    node = out.grad_fn
    if node is not None and node.name().startswith("FlashAttention"):
        node.register_hook(lambda gradients, _: _refuse_behind(gradients))
    return out


def _refuse_behind(gradients: Any) -> None:
    """Lets the backward pass of these gradients raise, where they have one (create_graph=True)."""
    for node in {x.grad_fn for x in gradients if x is not None and x.grad_fn is not None}:
        node.register_prehook(_refuse)


def _refuse(*_: Any) -> Any:
    raise RuntimeError(
        "these gradients cannot be differentiated again (create_graph=True); for second derivatives name "
        'backend="edge_list", and over several processes not transport="stream"'
    )
