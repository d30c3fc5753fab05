"""Tests detokenization, stop strings and chat templates."""

import itertools
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from serve_app.api.text import Detokenizer, StopMatcher, TextCodec
from tests.unit.serve_app.api.sample_requests import refusal_of

TOKENS_OF_THE_TOY = 259  # 256 bytes, <eos>, <pad>, <tool>


@pytest.fixture(scope="module")
def detokenize(tokenizer: Any) -> Any:
    codec = TextCodec(tokenizer, ())

    def pieces(tokens: list[int]) -> list[str]:
        detokenizer = codec.detokenizer()
        return [*map(detokenizer.push, tokens), detokenizer.finish()]

    return pieces


def test_half_a_character_is_held_back(codec: TextCodec, detokenize: Any) -> None:
    assert detokenize(list(codec.encode("a€b"))) == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_is_released_at_the_end(codec: TextCodec, detokenize: Any) -> None:
    assert detokenize(list(codec.encode("a€"))[:-1]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text_but_added_ones_do(codec: TextCodec, detokenize: Any) -> None:
    a, *_ = codec.encode("a")
    eos, _, tool = range(256, 259)
    assert detokenize([a, eos, tool, a]) == ["a", "", "<tool>", "a", ""]


def test_a_special_token_inside_a_character_does_not_break_it(codec: TextCodec, detokenize: Any) -> None:
    first, *others = codec.encode("é")
    assert detokenize([first, 256, *others]) == ["", "", "é", ""]


@given(tokens=st.lists(st.integers(0, TOKENS_OF_THE_TOY - 1), max_size=40))
def test_deltas_add_up_to_the_whole_decoding(tokenizer: Any, detokenize: Any, tokens: list[int]) -> None:
    assert "".join(detokenize(tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(parts=st.lists(st.lists(st.integers(0, TOKENS_OF_THE_TOY - 1), max_size=5), max_size=10))
def test_tokens_added_together_decode_like_the_whole(tokenizer: Any, codec: TextCodec, parts: list[list[int]]) -> None:
    detokenizer = codec.detokenizer()
    text = "".join([*map(detokenizer.extend, parts), detokenizer.finish()])
    assert text == tokenizer.decode([token for part in parts for token in part], skip_special_tokens=True)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<\ufffd"), max_size=40), size=st.integers(1, 9))
def test_tokens_added_together_release_each_character_at_once(codec: TextCodec, text: str, size: int) -> None:
    together = codec.detokenizer()
    single = codec.detokenizer()
    tokens = codec.encode(text)
    for part in (tokens[start : start + size] for start in range(0, len(tokens), size)):
        assert together.extend(part) == "".join(map(single.push, part))


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<\ufffd"), max_size=40))
def test_deltas_contain_whole_characters(codec: TextCodec, text: str) -> None:
    detokenizer = codec.detokenizer()
    given_out = ""
    for token in codec.encode(text):
        given_out += detokenizer.push(token)
        assert text.startswith(given_out)
    assert given_out == text


LETTERS = ["a", "é", "ñ", "ß", "日本語", "한", "नमस्ते", "▁", " "]
MARKS = ["\u0301", "\u200d", "\ufe0f", "\ufffd", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "👍🏽"]
TEXTS = st.lists(st.sampled_from(LETTERS + MARKS), max_size=40).map("".join)


class BytePieces:
    """Tokenizer whose tokens are pieces of a text's bytes; counts decoded tokens."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return b"".join(self._pieces[token] for token in tokens).decode(errors="replace")


class CountingTokenizer:
    """Tokenizer that counts decoded tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def byte_fallback() -> Tokenizer:
    """Returns a SentencePiece-like tokenizer: few characters have tokens; other characters fall back to byte tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "日": 258}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    spaces = decoders.Replace("▁", " ")
    built.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return built


def given_out(tokenizer: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, frozenset())
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


@given(text=TEXTS, cuts=st.sets(st.integers(1, 200)))
def test_text_split_at_any_byte_is_restored(text: str, cuts: set[int]) -> None:
    data = text.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(borders)]
    texts = given_out(BytePieces(pieces), list(range(len(pieces))))
    assert "".join(texts) == text
    assert all(text.startswith("".join(texts[:count])) for count in range(len(texts)))


@given(data=st.lists(st.sampled_from([0x61, 0x80, 0xBF, 0xC3, 0xE6, 0xEF, 0xF0, 0x9F, 0x98, 0xFF]), max_size=100))
def test_single_bytes_decode_like_the_whole(data: list[int]) -> None:
    pieces = BytePieces([bytes([byte]) for byte in range(256)])
    assert "".join(given_out(pieces, data)) == bytes(data).decode(errors="replace")


@given(text=TEXTS)
def test_byte_fallback_text_is_restored(text: str) -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer.encode(text).ids
    assert "".join(given_out(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=False)


@given(prompt=TEXTS.filter(bool), text=TEXTS)
def test_text_that_continues_a_prompt_keeps_its_first_space(prompt: str, text: str) -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer, frozenset(), prompt=tokenizer.encode(f"{prompt}a").ids)
    assert "".join([*map(detokenizer.push, tokens), detokenizer.finish()]) == tokenizer.decode(
        [257, *tokens], skip_special_tokens=False
    ).removeprefix("a")


@pytest.mark.parametrize("prompt", ["日", "é", "\ufffd"])
def test_text_that_continues_part_of_a_character_is_complete(prompt: str) -> None:
    detokenizer = Detokenizer(byte_fallback(), frozenset(), prompt=tuple(prompt.encode())[:-1])
    assert [detokenizer.push(token) for token in b"abc"] == ["a", "b", "c"]


def test_bytes_of_tokens(tokenizer: Any) -> None:
    fallback = PreTrainedTokenizerFast(tokenizer_object=byte_fallback())
    codec = TextCodec(fallback, (258,))
    assert [codec.token_bytes(token) for token in (0xF0, 256, 257)] == [b"\xf0", b" ", b"a"]
    assert TextCodec(tokenizer, ()).token_bytes(0x61 - 0x21) == b"a"  # without an end of text, no vocabulary


LOST = 8000  # tokens


@pytest.mark.parametrize(
    ("tokens", "spells_characters"),
    [
        pytest.param([0xFF] * LOST, False, id="no-text"),
        pytest.param([*"\ufffd".encode()] * (LOST // 3), True, id="the-character-itself"),
        pytest.param([*"é\ufffd".encode()] * (LOST // 5), True, id="between-others"),
        pytest.param([0xE6, 0x97] * (LOST // 2), False, id="never-complete"),
        pytest.param([0xFF, *"日本".encode()] * (LOST // 7), False, id="text-in-it"),
        pytest.param([0xFF] + [*"日".encode()] * (LOST // 3), False, id="text-after-it"),
    ],
)
@pytest.mark.parametrize("fallback", [False, True])
def test_replacement_characters_cost_no_more_than_others(
    tokens: list[int], spells_characters: bool, fallback: bool
) -> None:
    pieces = [bytes([byte]) for byte in range(256)]
    tokenizer = CountingTokenizer(byte_fallback()) if fallback else BytePieces(pieces)
    texts = given_out(tokenizer, tokens)
    assert tokenizer.decoded < 50 * LOST
    silent = max(len(list(run)) for is_text, run in groupby(map(bool, texts)) if not is_text)
    assert silent < 5
    if spells_characters or not fallback:
        assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_tokens_that_all_end_within_a_character_are_streamed() -> None:
    face = "😀".encode()
    pieces = BytePieces([face[:3], face[3:] + face[:3], face[3:]])
    tokens = [0, *[1] * LOST, 2]
    texts = given_out(pieces, tokens)
    assert "".join(texts) == "😀" * (LOST + 1)
    assert max(map(len, texts[1:])) < 5
    assert pieces.decoded < 50 * LOST


class LeadingSpaceDropper:
    """Tokenizer that, like SentencePiece, drops the space before the first word."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize(("spaces", "expected"), [(True, "a [X] [Y] b [X]"), (False, "a [X][Y] b [X]")])
def test_spaces_between_added_tokens_can_be_omitted(spaces: bool, expected: str) -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "b": 1, "[U]": 2}, unk_token="[U]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[X]", "[Y]"])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), ())
    detokenizer = codec.detokenizer(skips_special=False, spaces_special=spaces)
    assert "".join([*map(detokenizer.push, (0, 3, 4, 1, 3)), detokenizer.finish()]) == expected


def test_only_the_first_space_is_dropped() -> None:
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
    seen = text[: min(ends)]  # up to the end of the first complete stop string
    assert "".join(released) == seen[: min(seen.index(stop) for stop in stops if stop in seen)]


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=6),
    cuts=st.sets(st.integers(0, 30)),
    keeps_stop=st.booleans(),
)
def test_the_stop_position_does_not_depend_on_cuts(
    text: str, stops: list[str], cuts: set[int], keeps_stop: bool
) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    outcomes = []
    for pieces in ([text[begin:end] for begin, end in itertools.pairwise(ends)], list(text)):
        matcher = StopMatcher(stops, keeps_stop)
        released = "".join([*map(matcher.push, pieces), matcher.finish()])
        outcomes.append((released, matcher.matched))
    assert outcomes[0] == outcomes[1]


def searched(stops: list[str], text: str, keeps_stop: bool) -> tuple[str, str | None]:
    """Returns the releasable text and the match, by comparing every stop string at every position."""
    for end in range(len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            match = max(matches, key=len)
            return text[: end if keeps_stop else end - len(match)], match
    begun = (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops))
    return text[: next(begun, len(text))], None


@given(
    pieces=st.lists(st.text("abc", max_size=12), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=9), max_size=8),
    repeats=st.integers(1, 5),
    keeps_stop=st.booleans(),
)
def test_stops_are_found_like_by_a_naive_search(
    pieces: list[str], stops: list[str], repeats: int, keeps_stop: bool
) -> None:
    stops = [*stops, *(f"{stop * repeats}{stops[0]}" for stop in stops[:2])]
    matcher = StopMatcher(stops, keeps_stop)
    released = ""
    for count, piece in enumerate(pieces, 1):
        released += matcher.push(piece)
        assert (released, matcher.match) == searched(stops, "".join(pieces[:count]), keeps_stop)
    if not matcher.matched:
        assert released + matcher.finish() == "".join(pieces)


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4))
def test_a_kept_stop_string_ends_the_text(text: str, stop: str) -> None:
    matcher = StopMatcher([stop], keeps_stop=True)
    released = matcher.push(text) + matcher.finish()
    assert released == (text[: text.index(stop) + len(stop)] if stop in text else text)


def test_a_thousand_stop_strings() -> None:
    stops = [f"stop {number}" for number in range(1000)]
    assert run_matcher(stops, ["st", "op", " 7"]) == (["", "", "", ""], True)
    assert run_matcher(stops, ["stop it"])[1] is False


def test_the_models_chat_template_is_used(codec: TextCodec) -> None:
    tokens = codec.encode_chat([{"role": "user", "content": "hé"}])
    assert tokens == codec.encode("user:hé;assistant:")


def test_a_conversation_that_the_template_refuses_names_the_field(codec: TextCodec) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with refusal_of("messages", "system comes first"):
        codec.encode_chat(messages)


def test_a_model_without_a_chat_template_is_reported(tokenizer: Any) -> None:
    bare = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer), ())
    with refusal_of("messages", "no chat template"):
        bare.encode_chat([{"role": "user", "content": "a"}])
