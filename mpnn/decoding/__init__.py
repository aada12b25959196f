"""Decoding: cached keys and values, and generation of tokens with them."""

from mpnn.decoding.cache import Cache

__all__ = ["Cache"]
