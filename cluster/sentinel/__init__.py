"""Whether drafts are as good as they should be: when a drafter begins, and while it serves. Pure."""
