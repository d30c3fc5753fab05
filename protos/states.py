"""Hidden states of the target that a drafting method reads."""

from protos.values import value


@value
class StatesNeeded:
    """What a method reads at every position.

    `layers` are counted as in transformers' `output_hidden_states`: state k is the stream after k layers, state 0 the
    embedding, and the state after all layers has gone through the final norm. A row is those states, one after the
    other.
    """

    layers: tuple[int, ...]
    width: int  # elements of a row, as sent
