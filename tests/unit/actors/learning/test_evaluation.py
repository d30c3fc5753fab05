"""Compares teacher-forced scores with a draft's forward passes, one position at a time."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.drafters.model.recurrent_head import load_recurrent_head
from actors.learning.evaluation import score_draft, score_loaded
from actors.learning.trainable import RowLimits, collate, load_trainable, rows_of
from actors.models.checkpoint import load_model
from cluster.errors import ModelError
from cluster.learning import Example, SessionScore
from tests.unit.actors.learning.drafts import CPU, SHAPE, VOCABULARY, some_examples, write_draft

DRAFT_TOKENS = 5


@torch.inference_mode()
def greedy_rounds(folder: Path, example: Example, width: int, frequent: list[int] | None) -> SessionScore:
    """Drafts and verifies an answer like a server, with the serving code of model and head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    served = load_model(folder, "float32", CPU)
    ids = torch.arange(VOCABULARY) if frequent is None else torch.tensor(frequent)
    if frequent is not None:
        served.lm_head.weight = torch.nn.Parameter(served.lm_head.weight[ids])
    head = load_recurrent_head(folder, served, width) if width > 1 else None

    def first(text: list[int]) -> tuple[int, torch.Tensor]:
        output = model(torch.tensor([text]), output_hidden_states=True)
        return int(ids[output.logits[0, -1, ids].argmax()]), output.hidden_states[-1][0, -1:]

    answer = example.answer
    agreed = sum(first([*example.prompt, *answer[:place]])[0] == token for place, token in enumerate(answer))
    verifies = done = 0
    while done < len(answer):
        block: list[int] = []
        while len(block) < DRAFT_TOKENS:
            token, state = first([*example.prompt, *answer[:done], *block])
            block.append(token)
            for _ in range(width - 1):
                assert head is not None
                logits, found, *_ = head.predict_next(state, [block[-1]])
                assert found is not None
                state = found
                block.append(int(ids[logits[0].argmax()]))
        accepted = 0
        while accepted < DRAFT_TOKENS and answer[done + accepted : done + accepted + 1] == (block[accepted],):
            accepted += 1
        done += accepted + 1
        verifies += 1
    return SessionScore(len(answer), agreed, verifies)


def own_answers(folder: Path, examples: list[Example]) -> list[Example]:
    """Replaces two thirds of the answers' tokens by the model's own choices, so that some blocks are right."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for example in examples:
        text = list(example.prompt)
        for place, token in enumerate(example.answer):
            own = int(model(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token if place % 3 == 2 else own)
        found.append(Example(example.prompt, tuple(text[len(example.prompt) :])))
    return found


@pytest.mark.parametrize(("width", "frequent"), [(1, None), (3, None), (3, [*range(30, 5, -1)])])
def test_scores_are_those_of_drafting_and_verifying(width: int, frequent: list[int] | None, tmp_path: Path) -> None:
    folder = write_draft(tmp_path, width=width, frequent=frequent)
    examples = own_answers(folder, some_examples(6))
    expected = [greedy_rounds(folder, example, width, frequent) for example in examples]
    assert len({each.verifies for each in expected}) > 1
    assert score_draft(folder, examples, DRAFT_TOKENS) == expected


def test_scores_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    draft = load_trainable(write_draft(tmp_path, width=3), CPU)
    examples = own_answers(tmp_path, some_examples(9))
    together = score_loaded(draft, examples, DRAFT_TOKENS)
    assert score_loaded(draft, examples, DRAFT_TOKENS, pass_tokens=1) == together
    assert score_loaded(draft, examples[::-1], DRAFT_TOKENS) == together[::-1]


def test_a_long_answer_is_scored_in_parts(tmp_path: Path) -> None:
    """Without a head, and with a prompt that fits, splitting changes no score."""
    draft = load_trainable(write_draft(tmp_path), CPU)
    examples = own_answers(tmp_path, some_examples(3, answer=20))
    parts = score_loaded(draft, examples, DRAFT_TOKENS, limits=RowLimits(40, 6))
    assert parts == score_loaded(draft, examples, DRAFT_TOKENS)


def test_edges_of_texts(tmp_path: Path) -> None:
    folder = write_draft(tmp_path)
    without_prompt, empty = score_draft(folder, [Example((), (5, 6)), Example((1, 2), ())], 4)
    assert without_prompt.tokens == 2
    assert empty == SessionScore(0, 0, 0)
    assert score_draft(folder, [], 4) == []


def test_rows_end_with_their_predicted_tokens() -> None:
    example = Example((1, 2, 3), (4, 5, 6, 7, 8))
    rows = rows_of(example, RowLimits(prompt_tokens=2, answer_tokens=3))
    assert [(row.tokens, row.predicted) for row in rows] == [((2, 3, 4, 5, 6), 3), ((5, 6, 7, 8), 2)]
    assert [row.predicted for row in rows_of(Example((), (4,)), RowLimits())] == []


def test_limits_fit_the_positions_of_a_model() -> None:
    assert RowLimits(512, 256).within(None) == RowLimits(512, 256)
    assert RowLimits(512, 256).within(600) == RowLimits(344, 256)
    assert RowLimits(512, 256).within(64) == RowLimits(32, 32)


def test_texts_longer_than_the_model_reads_are_cut(tmp_path: Path) -> None:
    (score,) = score_draft(write_draft(tmp_path), some_examples(1, answer=200), 4)
    assert score.tokens == 200


def test_an_unknown_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"token {VOCABULARY}, but the draft's vocabulary has {VOCABULARY}"):
        score_draft(write_draft(tmp_path), [Example((1,), (VOCABULARY,))], 4)


@pytest.mark.parametrize("length", [9, 1000])
def test_attention_is_that_of_transformers(length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"max_position_embeddings": 1024}, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    draft = load_trainable(tmp_path, CPU)
    text = tuple(torch.randint(VOCABULARY, (length + 1,)).tolist())
    rows = [*rows_of(Example(text[:4], text[4:]), RowLimits(4, length)), *rows_of(Example((1,), (2, 3)), RowLimits())]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        states = draft.states(collate(rows, CPU))
        expected = [model(torch.tensor([row.tokens[:-1]])).logits[0, -row.predicted :] for row in rows]
    torch.testing.assert_close(states @ draft.lm_head.T, torch.cat(expected), atol=1e-4, rtol=1e-4)
