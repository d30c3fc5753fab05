"""Hidden states of the target on the wire: what a drafting method needs, and the layout of a row.

A row holds the states after one token, at that token's position.
"""

from enum import IntEnum

from protos.frozen import value

MAX_STATES_WIDTH = 1 << 18  # elements per row: eight layers of a model with hidden size 32,768
MAX_STATES_BYTES = 1 << 20  # bytes of the rows in one message, unless it has only one row
SCALE_BYTES = 4  # one float32 after the elements of a scaled row


class StateDtype(IntEnum):
    """Encoding of the elements of a row, little-endian."""

    BFLOAT16 = 1
    FLOAT8 = 2  # e4m3, with one float32 factor for all elements of the row


@value
class StatesNeeded:
    """Hidden states of the target that a drafting method reads.

    Layers are numbered as in Hugging Face's `output_hidden_states`: 0 is the embeddings, k the residual stream after k
    layers, and the model's number of layers is the stream after its final norm. A row concatenates the states of all
    `layers`, `width` elements. If the method first projects each row on its own, the target may apply the projection
    and send `projected_width` elements instead.
    """

    layers: tuple[int, ...]
    width: int
    projected_width: int | None = None
    window: int | None = None  # number of a text's latest states that are read; None: all
    sees: int | None = None  # number of latest states that drafts depend on at all; None: all


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
