"""What one forward of a model returns."""

from typing import NamedTuple

from torch import Tensor


class ForwardOutput(NamedTuple):
    """Of the places that were asked for, in order."""

    logits: Tensor  # (places, columns)
    hidden: Tensor | None  # (places, hidden) what the logits were made of; None where the model's code keeps it
    streams: Tensor | None = None  # (tokens, layers x hidden) of all that was fed, where layers were asked for
