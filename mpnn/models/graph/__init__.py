"""Graph models, one file for each."""
