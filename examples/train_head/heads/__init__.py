"""Trainable heads by kind, and the tensors they take from the target."""
