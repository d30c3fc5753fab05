"""What drafts bring, measured in one process: real target, real methods, no network and no Ray."""
