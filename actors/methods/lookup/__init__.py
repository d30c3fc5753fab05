"""Methods without a model: what followed the same tokens before, in the text or in recent answers."""
