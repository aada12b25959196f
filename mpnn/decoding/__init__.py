"""Decoding: cached keys and values, and generation of tokens with them."""

from mpnn.decoding.cache import KVCache

__all__ = ["KVCache"]
