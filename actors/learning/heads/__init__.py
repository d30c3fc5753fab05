"""Trainable draft heads: networks that unroll as they draft, and the heads of a deployment that learn."""
