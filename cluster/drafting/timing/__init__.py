"""What forwards, passes and target steps take, as a drafter sees them."""
