"""The heads in training, by kind, and what they borrow of the target."""
