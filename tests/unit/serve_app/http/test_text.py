"""Detokenisation, stop strings, chat templates."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cluster.errors import RequestError
from serve_app.http.text import Detokenizer, StopMatcher, TextCodec

TOKENS_OF_THE_TOY = 259  # 256 bytes, <eos>, <pad>, <tool>


@pytest.fixture(scope="module")
def detokenise(tokenizer: Any) -> Any:
    codec = TextCodec(tokenizer, ())

    def pieces(tokens: list[int]) -> list[str]:
        detokenizer = codec.detokenizer()
        return [*map(detokenizer.push, tokens), detokenizer.finish()]

    return pieces


def test_half_a_character_is_held_back(codec: TextCodec, detokenise: Any) -> None:
    assert detokenise(list(codec.encode("a€b"))) == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_comes_at_the_end(codec: TextCodec, detokenise: Any) -> None:
    assert detokenise(list(codec.encode("a€"))[:-1]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text_and_added_ones_have(codec: TextCodec, detokenise: Any) -> None:
    a, *_ = codec.encode("a")
    eos, _, tool = range(256, 259)
    assert detokenise([a, eos, tool, a]) == ["a", "", "<tool>", "a", ""]


def test_a_special_token_inside_a_character_does_not_break_it(codec: TextCodec, detokenise: Any) -> None:
    first, *others = codec.encode("é")
    assert detokenise([first, 256, *others]) == ["", "", "é", ""]


@given(tokens=st.lists(st.integers(0, TOKENS_OF_THE_TOY - 1), max_size=40))
def test_deltas_of_any_tokens_make_the_whole_decoding(tokenizer: Any, detokenise: Any, tokens: list[int]) -> None:
    assert "".join(detokenise(tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<\ufffd"), max_size=40))
def test_deltas_of_text_are_whole_characters(codec: TextCodec, text: str) -> None:
    detokenizer = codec.detokenizer()
    given_out = ""
    for token in codec.encode(text):
        given_out += detokenizer.push(token)
        assert text.startswith(given_out)
    assert given_out == text


class LeadingSpaceDropper:
    """Decodes as SentencePiece tokenizers do: the space before the very first word goes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")


def test_a_decoder_that_drops_the_first_space_keeps_the_others() -> None:
    detokenizer = Detokenizer(LeadingSpaceDropper(), frozenset())  # type: ignore[arg-type]
    assert [detokenizer.push(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]


def run_matcher(stops: list[str], texts: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    return [*map(matcher.push, texts), matcher.finish()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "texts", "released", "matched"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["END"], ["a EN", "D b"], ["a ", "", ""], True),
        (["END"], ["a EN", "C"], ["a ", "ENC", ""], False),
        (["END"], ["a EN"], ["a ", "EN"], False),
        (["aab"], ["aa", "ab"], ["", "a", ""], True),
        (["x", "\n\n"], ["1\n", "2\n", "\n3"], ["1", "\n2", "", ""], True),
        (["late", "ea"], ["a early"], ["a ", ""], True),
        (["stop"], ["stop", "more"], ["", "", ""], True),
    ],
)
def test_stop_strings(stops: list[str], texts: list[str], released: list[str], matched: bool) -> None:
    assert run_matcher(stops, texts) == (released, matched)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_characters_one_by_one_are_cut_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    released, matched = run_matcher(stops, list(text))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert matched == bool(ends)
    if not ends:
        assert "".join(released) == text
        return
    seen = text[: min(ends)]  # the character at which the first stop string is complete
    assert "".join(released) == seen[: min(seen.index(stop) for stop in stops if stop in seen)]


def test_chat_template_is_the_models_own(codec: TextCodec) -> None:
    tokens = codec.encode_chat([{"role": "user", "content": "hé"}])
    assert tokens == codec.encode("user:hé;assistant:")


def test_a_conversation_that_the_template_refuses_names_the_field(codec: TextCodec) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(RequestError, match="system comes first") as caught:
        codec.encode_chat(messages)
    assert caught.value.field == "messages"


def test_a_model_without_a_chat_template_says_so(tokenizer: Any) -> None:
    bare = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer), ())
    with pytest.raises(RequestError, match="no chat template") as caught:
        bare.encode_chat([{"role": "user", "content": "a"}])
    assert caught.value.field == "messages"
