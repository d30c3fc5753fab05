"""DFlash heads: a block of tokens at once, by a small model that attends to the target's states as its context."""
