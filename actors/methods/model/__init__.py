"""What methods that draft with a model share: loading it, its cache, blocks under way, heads and mask tokens."""
