"""Rows continue from the recurrent states in their pages, also after rejections and in copied pages."""

import pytest
import torch
from torch import Tensor

from actors.compute.input_row import InputRow
from actors.compute.recurrent_states import RecurrentStates, State
from cluster.page_allocator import PageCopy

PAGE_SIZE = 4
PAGES = (7, 2, 5, 1)


def advance(inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Returns each token's number in base 10 with all tokens before it."""
    total = torch.zeros(1, dtype=torch.int64) if state is None or state[0] is None else state[0]
    outputs = []
    for token in inputs:
        total = total * 10 + token
        outputs.append(total)
    return torch.stack(outputs), (total,)


def fed(states: RecurrentStates, text: str, start: int, logits: int, pages: tuple[int, ...] = PAGES) -> list[int]:
    """Feeds the digits of a text from `start` on; returns the outputs."""
    tokens = tuple(int(digit) for digit in text[start:])
    row = InputRow(tokens, start, logits, pages)
    outputs = states.feed(0, row, torch.tensor(tokens).unsqueeze(1), advance)
    return outputs.flatten().tolist()


def expected(text: str, start: int) -> list[int]:
    return [int(text[: end + 1]) for end in range(start, len(text))]


def test_prompt_chunks_tokens_and_blocks_continue_the_text():
    states = RecurrentStates(PAGE_SIZE)
    for text, start, logits in (("123", 0, 0), ("1234567", 3, 1), ("12345678", 7, 1), ("123456789123", 8, 4)):
        assert fed(states, text, start, logits) == expected(text, start)


@pytest.mark.parametrize("kept", range(6))
def test_a_row_may_start_at_any_position_of_the_block_before_it(kept):
    """The block of five crosses a page; starting at its own beginning is possible, too."""
    states = RecurrentStates(PAGE_SIZE)
    fed(states, "123456", 0, 1)
    fed(states, "12345699999", 6, 5)
    text = "123456" + "9" * kept + "12"
    assert fed(states, text, 6 + kept, 1) == expected(text, 6 + kept)


def test_another_text_continues_at_the_end_of_a_shared_page():
    states = RecurrentStates(PAGE_SIZE)
    fed(states, "1234567891", 0, 1)
    for shared in (1, 2):
        text = "12345678"[: shared * PAGE_SIZE] + "55555"
        other = (*PAGES[:shared], 11, 12, 13)
        assert fed(states, text, shared * PAGE_SIZE, 1, other) == expected(text, shared * PAGE_SIZE)
    assert fed(states, "123456789177", 10, 2) == expected("123456789177", 10)


def test_a_copied_page_continues_apart():
    states = RecurrentStates(PAGE_SIZE)
    fed(states, "123456", 0, 1)
    states.copy([PageCopy(PAGES[1], 9)])
    assert fed(states, "1234569", 6, 1) == expected("1234569", 6)
    assert fed(states, "1234561", 6, 1, (PAGES[0], 9)) == expected("1234561", 6)


def test_a_row_without_the_state_before_it_fails():
    states = RecurrentStates(PAGE_SIZE)
    fed(states, "123456789123", 0, 1)
    with pytest.raises(AssertionError, match="no state at position 6"):
        fed(states, "12345699", 6, 1)
