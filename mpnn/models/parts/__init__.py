"""What models are put together from besides the operator; a model itself is a file of the folder above."""
