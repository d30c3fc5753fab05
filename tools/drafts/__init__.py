"""`slipstream drafts`: what a draft checkpoint is, whether it fits a target, and how much it brings."""
