"""Convolution as message passing: a pixel hears those under the kernel, one linear map for each place in it.

topology   convolution(height, width, kernel)      or neighborhood(height, width, 1), a kernel of 3 with padding 1
attention  Typed(channels, out, relations=9)       the class of an edge is its relative position
aggregate  "sum"                                   m_i = sum_j W_(class of ij) x_j
update     none                                    y_i = m_i + b
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from mpnn.attention import Typed
from mpnn.graphs import convolution
from mpnn.graphs.image import convolved
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.images import as_image, pair, patchify, size_of
from mpnn.models.saving import Model
from mpnn.ops import built


class Convolution(Model):
    """What `torch.nn.Conv2d` computes (cross-correlation, LeCun et al. 1989), as one round over a graph of pixels.

        y_i = b + sum_{j under the kernel at i} W_{place of j in the kernel} x_j

    Sizes are one integer, or two: down and across.

    Args:
        channels, out: width of pixels before and after. kernel, stride, padding, dilation, bias: as of a `Conv2d`.
    """

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.kernel, self.stride = pair(kernel), pair(stride)
        self.padding, self.dilation = pair(padding), pair(dilation)
        places = self.kernel[0] * self.kernel[1]
        maps = Typed(channels, out, relations=places, bias=bias)
        self.layer = MessagePassing(None, "sum", None, maps)
        for parameter in maps.parameters():  # as torch begins: a pixel hears all places of the kernel at once
            nn.init.uniform_(parameter, -((places * channels) ** -0.5), (places * channels) ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, channels, H, W] -> [B, out, H', W'], sizes as `Conv2d` gives them."""
        height, width = size_of(images)
        sizes = self.kernel, self.stride, self.padding, self.dilation
        rows, columns = convolved(height, width, *sizes)
        graph = built(convolution, height, width, *sizes)
        pixels = patchify(images)
        hearing = pixels.new_empty(len(pixels), rows * columns, 0)  # pixels to be, which know nothing yet
        return as_image(self.layer(hearing, graph, source=pixels), rows, columns)


def from_conv(conv: nn.Conv1d | nn.Conv2d) -> Convolution:
    """A convolution of torch as message passing, with a copy of its weights.

    One over sequences [B, channels, N] becomes one over images of height 1, [B, channels, 1, N].

    Raises:
        TypeError: not a `Conv1d` or `Conv2d`.
        ValueError: groups, or padding with anything but zeros on both sides alike; the sentence names it.
    """
    if not isinstance(conv, (nn.Conv1d, nn.Conv2d)):
        raise TypeError(f"from_conv takes a torch.nn.Conv1d or Conv2d; got {type(conv).__name__}")
    if conv.groups != 1:
        raise ValueError(f"from_conv does not support groups = {conv.groups}, only 1: every channel hears every other")
    if conv.padding_mode != "zeros":
        raise ValueError(f"from_conv does not support padding_mode = {conv.padding_mode!r}, only 'zeros'")
    ours = Convolution(
        conv.in_channels,
        conv.out_channels,
        _flat(conv.kernel_size, 1),
        stride=_flat(conv.stride, 1),
        padding=_flat(_padding(conv), 0),
        dilation=_flat(conv.dilation, 1),
        bias=conv.bias is not None,
    )
    weight = conv.weight.flatten(2).permute(2, 1, 0)  # [places, in, out]
    state = {"layer.attention.weight": weight, "layer.attention.bias": conv.bias}
    ours.load_state_dict({name: value.detach() for name, value in state.items() if value is not None})
    return ours.to(conv.weight).train(conv.training)


def _padding(conv: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    if not isinstance(conv.padding, str):
        return conv.padding
    whole = [d * (k - 1) * (conv.padding == "same") for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if any(n % 2 for n in whole):
        raise ValueError(
            f"from_conv does not support padding = 'same' with kernel_size = {conv.kernel_size}, which pads one side "
            "more than the other"
        )
    return tuple(n // 2 for n in whole)


def _flat(size: tuple[int, ...], height: int) -> tuple[int, ...]:
    """A size of a `Conv1d` as that of a `Conv2d` over images of height 1."""
    return (height, *size) if len(size) == 1 else size
