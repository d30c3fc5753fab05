"""Hidden states of the target as they travel: which a drafting method needs, and how a row of them is laid out.

A row is the states after one token, at that token's position.
"""

from enum import IntEnum

from protos.values import value

MAX_STATES_WIDTH = 1 << 18  # elements of a row: eight layers of a model that is 32 768 wide
MAX_STATES_BYTES = 1 << 20  # of the rows of one message, unless it has one row
SCALE_BYTES = 4  # a float32, after the elements of a row that are scaled


class StateDtype(IntEnum):
    """How the elements of a row are written, little-endian."""

    BFLOAT16 = 1
    FLOAT8 = 2  # e4m3, with one float32 that all elements of the row are to be multiplied by


@value
class StatesNeeded:
    """What a drafting method reads of the target.

    Layers are numbered as Hugging Face's `output_hidden_states` numbers them: 0 is the embeddings, k the residual
    stream after k layers, and the model's number of layers that stream after its final norm. A row has those of all
    layers one after the other, `width` elements. Where the method begins with a projection of such a row alone, the
    target may apply it and send `projected_width` elements instead.
    """

    layers: tuple[int, ...]
    width: int
    projected_width: int | None = None
    window: int | None = None  # how many of a text's latest states are read; None: all of them
    sees: int | None = None  # how many of them what it drafts depends on at all; None: all


@value
class StatesFormat:
    """Layout of a row."""

    width: int
    dtype: StateDtype

    @property
    def row_bytes(self) -> int:
        if self.dtype is StateDtype.FLOAT8:
            return self.width + SCALE_BYTES
        return 2 * self.width

    @property
    def rows_in_message(self) -> int:
        """Most rows of one message."""
        return max(1, MAX_STATES_BYTES // self.row_bytes)
