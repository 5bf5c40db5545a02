"""Converts checkpoints between the portable form, Hugging Face's and Megatron's torch_dist. `convert.py` is the command
and all that others use. What a portable checkpoint is: `states/portable.py`."""
