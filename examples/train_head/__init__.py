"""A draft head for your own target: the target writes data, its states are stored, a head learns to draft from them."""
