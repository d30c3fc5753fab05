"""What speculation brings before anything runs."""
