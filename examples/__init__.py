"""Example scripts and configurations to copy and adapt."""
