"""What forwards are made of: the paged KV cache, matrix products, collectives, and the way to the device."""
