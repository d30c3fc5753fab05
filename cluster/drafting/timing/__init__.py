"""Estimated times of forward passes, drafting passes and target steps, as a drafter sees them.

`forward_time.py` fits a line over the rows of a forward pass, `pass_time.py` scales a startup profile to recent
passes, and `step_interval.py` estimates when a target's next verdict is due.
"""
