"""Checkpoints and decoders: loading, sharding, and the way from a batch to logits."""
