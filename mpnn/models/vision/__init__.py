"""Image models, one file for each."""
