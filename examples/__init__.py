"""Examples: what users may copy and change."""
