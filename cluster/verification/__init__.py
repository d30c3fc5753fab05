"""What a target replica decides with: its scheduler, the sequences that it serves, the blocks that wait, and steps."""
