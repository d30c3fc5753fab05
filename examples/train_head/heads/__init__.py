"""Trainable draft heads, and their initial tensors from the target."""
