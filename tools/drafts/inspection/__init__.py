"""What a draft checkpoint on disk is, what it needs, and whether it fits a target: by metadata alone."""
