"""Convolution as message passing: a pixel receives from the pixels under the kernel, with one linear map per tap.

topology   convolution(height, width, kernel)      or neighborhood(height, width, 1), a kernel of 3 with padding 1
attention  Typed(channels, out, relations=9)       the edge type is the relative position
aggregate  "sum"                                   m_i = sum_j W_type(ij) x_j
update     none                                    y_i = m_i + b
"""

from collections.abc import Sequence

from torch import Tensor, nn

from mpnn import MessagePassing
from mpnn.attention import Typed
from mpnn.engine import build_once
from mpnn.graphs import convolution
from mpnn.graphs.image import convolved
from mpnn.models.layers.images import as_image, pair, patchify, size_of
from mpnn.models.saving import Model


class Convolution(Model):
    """`torch.nn.Conv2d` (cross-correlation, LeCun et al. 1989) as one round of message passing between pixels.

        y_i = b + sum_{j under the kernel at i} W_{tap of j} x_j

    Sizes are one integer or two (height and width).

    Args:
        channels: number of input channels.
        out: number of output channels.
        kernel, stride, padding, dilation, bias: as in `torch.nn.Conv2d`.
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
        taps = self.kernel[0] * self.kernel[1]
        maps = Typed(channels, out, relations=taps, bias=bias)
        self.layer = MessagePassing(None, "sum", None, maps)
        for parameter in maps.parameters():  # the initialization of Conv2d, whose fan-in is taps * channels
            nn.init.uniform_(parameter, -((taps * channels) ** -0.5), (taps * channels) ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, channels, H, W] to [B, out, H', W'] with the same sizes as `Conv2d`."""
        height, width = size_of(images)
        sizes = self.kernel, self.stride, self.padding, self.dilation
        rows, columns = convolved(height, width, *sizes)
        graph = build_once(convolution, height, width, *sizes)
        pixels = patchify(images)
        outputs = pixels.new_empty(len(pixels), rows * columns, 0)  # destinations without features
        return as_image(self.layer(outputs, graph, source=pixels), rows, columns)


def from_conv(conv: nn.Conv1d | nn.Conv2d) -> Convolution:
    """Converts a torch convolution to message passing, with a copy of its weights.

    A `Conv1d` over [B, channels, N] becomes a convolution over images of height 1, [B, channels, 1, N].

    Raises:
        TypeError: if `conv` is not a `Conv1d` or `Conv2d`.
        ValueError: if `conv` has groups, a padding mode other than zeros, or asymmetric padding.
    """
    if not isinstance(conv, (nn.Conv1d, nn.Conv2d)):
        raise TypeError(f"from_conv takes a torch.nn.Conv1d or Conv2d; got {type(conv).__name__}")
    if conv.groups != 1:
        raise ValueError(f"from_conv does not support groups = {conv.groups}, only 1")
    if conv.padding_mode != "zeros":
        raise ValueError(f"from_conv does not support padding_mode = {conv.padding_mode!r}, only 'zeros'")
    converted = Convolution(
        conv.in_channels,
        conv.out_channels,
        _as_2d(conv.kernel_size, 1),
        stride=_as_2d(conv.stride, 1),
        padding=_as_2d(_padding(conv), 0),
        dilation=_as_2d(conv.dilation, 1),
        bias=conv.bias is not None,
    )
    weight = conv.weight.flatten(2).permute(2, 1, 0)  # [taps, in, out]
    state = {"layer.attention.weight": weight, "layer.attention.bias": conv.bias}
    converted.load_state_dict({name: value.detach() for name, value in state.items() if value is not None})
    return converted.to(conv.weight).train(conv.training)


def _padding(conv: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    if not isinstance(conv.padding, str):
        return conv.padding
    totals = [d * (k - 1) * (conv.padding == "same") for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if any(n % 2 for n in totals):
        raise ValueError(
            f"from_conv does not support padding = 'same' with kernel_size = {conv.kernel_size}, because that pads "
            "the two sides by different amounts"
        )
    return tuple(n // 2 for n in totals)


def _as_2d(size: tuple[int, ...], height: int) -> tuple[int, ...]:
    """Converts a size of a `Conv1d` to that of a `Conv2d` over images of height 1."""
    return (height, *size) if len(size) == 1 else size
