"""Parts that models share: embeddings, packing, losses, positions. The models are in the sibling folders."""
