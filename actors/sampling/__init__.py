"""From logits to decided tokens: logits processing, the noise, and the two acceptance rules."""
