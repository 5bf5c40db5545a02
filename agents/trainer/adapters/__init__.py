"""Trainers of other libraries that keep their own loop, driven iteration by iteration by the hook.

Use `hugging_face.HuggingFaceTrainer` (`from unicrond import HuggingFaceTrainer`). What they share, the order of samples
of a program's own DataLoader, lives in `loop.loader`. docs/use/adapters.md has what is taken and what is refused.
"""
