"""From a step plan to its outcomes: the executor, the runner of forwards, and tensor-parallel ranks around them."""
