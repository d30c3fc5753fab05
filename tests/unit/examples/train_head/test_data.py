"""Tests token files, generated answers, the draft vocabulary, and the order of training sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.models.checkpoint import load_model
from cluster.errors import ModelError
from examples.train_head.answers import batches as prompt_batches
from examples.train_head.answers import chat_ids, draw, opening_ids, prompt_ids, temperatures, written
from examples.train_head.heads.draft_vocabulary import frequent_tokens
from examples.train_head.sampling_order import HELD_OUT_EVERY, batches, held_out
from examples.train_head.shards import StoredSequence
from examples.train_head.token_files import common_opening, read_tokens, write_tokens
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET
from tests.unit.examples.train_head.tiny_training import CPU

PROMPTS = [[5, 9, 2], [7, 7, 1, 30, 4], [11]]


class CharTokenizer:
    """Character tokenizer with a simple chat template: prefix, user text and suffix."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{message['content']}>" for message in messages) + "|"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(character) for character in text]


def spelled(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def greedy(prompt: list[int], tokens: int) -> list[int]:
    """Decodes greedily with uncached forward passes, one prompt at a time."""
    model = load_model(TARGET, "float32", CPU)
    found = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found


def wrote(temperature: list[float], tokens: int, stops: tuple[int, ...] = (), seed: int = 0) -> list[list[int]]:
    model = load_model(TARGET, "float32", CPU).eval()
    generator = torch.Generator().manual_seed(seed)
    return written(model, PROMPTS, temperature, tokens, stops, 8, generator)


# ---------------------------------------------------------------- generated answers


def test_rows_of_different_lengths_are_generated_as_if_alone():
    assert wrote([0.0, 0.0, 0.0], 6) == [greedy(prompt, 6) for prompt in PROMPTS]


def test_a_stop_token_ends_an_answer_and_is_kept():
    whole = [greedy(prompt, 6) for prompt in PROMPTS]
    stop = whole[0][len(PROMPTS[0]) + 2]
    for prompt, expected, found in zip(PROMPTS, whole, wrote([0.0, 0.0, 0.0], 6, (stop,)), strict=True):
        answer = expected[len(prompt) :]
        end = answer.index(stop) + 1 if stop in answer else len(answer)
        assert found == expected[: len(prompt) + end]


def test_rows_have_individual_temperatures():
    cold = [greedy(prompt, 12) for prompt in PROMPTS]
    found = wrote([0.0, 5.0, 0.0], 12)
    assert [found[0], found[2]] == [cold[0], cold[2]]
    assert found[1] != cold[1]
    assert found == wrote([0.0, 5.0, 0.0], 12)
    assert found[1] != wrote([0.0, 5.0, 0.0], 12, seed=1)[1]


def test_top_p_limits_the_sampled_tokens():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(400, 4)
    drawn = draw(logits, torch.full((400,), 3.0), 2, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {2, 3}


def test_temperatures_are_spread_evenly():
    assert temperatures(5, 0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert temperatures(1, 0.5, 1.0) == [0.5]


# ---------------------------------------------------------------- prompts


def test_prompts_and_messages_are_templated(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}], "kind": "chat"}\n')
    assert [spelled(ids) for ids in prompt_ids(CharTokenizer(), path)] == ["<one>|", "<two>|"]
    assert spelled(chat_ids(CharTokenizer(), [{"role": "user", "content": "one"}])) == "<one>|"


def test_a_line_without_a_prompt_is_refused(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ModelError, match="line 2"):
        prompt_ids(CharTokenizer(), path)


def test_a_dialogue_begins_with_the_messages_before_the_user():
    assert spelled(opening_ids(CharTokenizer())) == "<"


def test_prompts_of_similar_length_are_batched():
    found = list(prompt_batches([[1] * length for length in (5, 1, 4, 2)], 2))
    assert [[len(prompt) for prompt in group] for group in found] == [[1, 2], [4, 5]]


# ---------------------------------------------------------------- token files


def test_padding_is_removed_from_tokens(tmp_path: Path):
    sequences = [[4, 5, 2], [7], [1, 2, 3, 70000, 9]]
    write_tokens(tmp_path / "some.npz", sequences)
    assert [sequence.tolist() for sequence in read_tokens(tmp_path / "some.npz")] == sequences
    assert [path.name for path in tmp_path.iterdir()] == ["some.npz"]


def test_another_file_format_is_refused(tmp_path: Path):
    np.savez(tmp_path / "other.npz", ids=np.zeros((2, 3)))
    with pytest.raises(ModelError, match="expected an array tokens"):
        read_tokens(tmp_path / "other.npz")


def test_the_common_prefix_is_the_opening():
    assert common_opening([np.array([1, 2, 3, 4]), np.array([1, 2, 5])]) == 2
    assert common_opening([np.array([1, 2]), np.array([1, 2, 5])]) == 2


# ---------------------------------------------------------------- vocabulary and order


def test_the_draft_vocabulary_has_frequent_tokens_in_id_order():
    assert frequent_tokens([3, 0, 9, 1, 4], 3).tolist() == [0, 2, 4]
    assert frequent_tokens([3, 0, 9], None).tolist() == [0, 1, 2]


def some_sequences(count: int) -> list[StoredSequence]:
    return [StoredSequence(Path("shard"), 100 * index, 100 * index + 10 + index % 7) for index in range(count)]


def test_an_epoch_contains_every_training_sequence_once():
    stored = some_sequences(4 * HELD_OUT_EVERY)
    order = batches(stored, 4, seed=0, step=0)
    epoch = [one for _ in range(31) for one in next(order)]
    assert len(set(epoch)) == len(epoch) == 31 * 4
    assert not set(epoch) & set(held_out(stored))
    again = [one for _ in range(31) for one in next(order)]
    assert set(again) == set(epoch)
    assert again != epoch


def test_the_order_resumes_at_any_step():
    stored = some_sequences(100)
    whole = batches(stored, 8, seed=3, step=0)
    expected = [next(whole) for _ in range(30)]
    for step in (1, 12, 29):
        assert next(batches(stored, 8, seed=3, step=step)) == expected[step]


def test_more_shards_keep_the_held_out_sequences():
    some = some_sequences(3 * HELD_OUT_EVERY)
    assert held_out(some[: 2 * HELD_OUT_EVERY]) == held_out(some)[:2]
