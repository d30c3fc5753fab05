"""Grammars that a text must keep to: compiled, followed along its tokens, and as masks over the vocabulary."""
