"""Dropout by words, `mpnn.graph.rng`, in Triton: an edge of a stream is kept if the product of the words of its stream,
its destination and its source is at least the threshold.

Attention along rows computes words of nodes where it visits them. Attention over tiles reads them: a tile has as many
pairs as the product of its sides, and all threads that share a node would compute its word again.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """`mpnn.graph.rng.mix` on uint32, whose shifts move zeros in."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def role_keys(seed):
    """The keys of destinations, sources and streams, uint32."""
    seed = tl.load(seed)
    low = seed.to(tl.int32).to(tl.uint32, bitcast=True)
    high = (seed >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
    nodes = mix(low) ^ high
    return mix(nodes), mix(nodes ^ 0xFFFFFFFF), low ^ mix(high)


@triton.jit
def word(key, number):
    """`mpnn.graph.rng.words`, int32."""
    return (mix(key ^ number.to(tl.uint32)) | 1).to(tl.int32, bitcast=True)


@triton.jit
def node_word(key, ids, n, exists):
    """The words of nodes n: of their ids, or without ids of their numbers."""
    number = n
    if ids is not None:
        number = tl.load(ids + n, mask=exists, other=0)
    return word(key, number)


@triton.jit(do_not_specialize=["num_dst", "num_src", "copies", "heads", "first_stream", "streams"])
def fill_words(
    seed, dst_ids, src_ids, dst_words, src_words, stream_words, num_dst, num_src, copies, heads, first_stream, streams,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the words of destinations [N_dst], sources [N_src] and streams [copies]: copy b * heads + h has the stream
    b * streams + first_stream + h."""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    dst_key, src_key, stream_key = role_keys(seed)
    is_dst = n < num_dst
    is_src = n < num_src
    is_copy = n < copies
    stream = n // heads * streams + first_stream + n % heads
    tl.store(dst_words + n, node_word(dst_key, dst_ids, n, is_dst), mask=is_dst)
    tl.store(src_words + n, node_word(src_key, src_ids, n, is_src), mask=is_src)
    tl.store(stream_words + n, word(stream_key, stream), mask=is_copy)
