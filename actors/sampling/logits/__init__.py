"""Logits processors: what a request's parameters change of the logits after each prefix, before temperature."""
