"""Tests translation between tokenizers: byte-level and SentencePiece-like, over text in many scripts."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.drafters.translation.text_tokens import text_tokens
from cluster.drafting.translation import TextTokens, TranslatedText, Translator
from tests.toy_tokenizers import byte_level, sentence_piece

KEY = 7
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n\treturn a + b\n\n\n\tx = 1  # two  spaces",
    "naïve café größer 東京都 日本語 👩‍💻🙂 e\u0301 a\u0308 ﬁ ½ ﷽ \u200d",
    " <bos> is text here, and so is <mark>",
)
KINDS = ("words", "bytes", "few", "gemma", "llama")


@cache
def tokenizer(kind: str) -> Any:
    match kind:
        case "words":
            return byte_level(120, controls=("<bos>", "<only>", "<eos>", "<mark>"))
        case "bytes":
            return byte_level(0)
        case "few":
            return byte_level(30, by_words=False)
        case "gemma":
            return sentence_piece(100, begins=True)
        case _:
            return sentence_piece(40, prepends=True)


@cache
def tokens_of(kind: str) -> TextTokens:
    return text_tokens(tokenizer(kind))


def a_text(target: str, draft: str, tokens: list[int] | tuple[int, ...] = ()) -> TranslatedText:
    return TranslatedText.begin(Translator(tokens_of(target), tokens_of(draft)), KEY, tokens)


def after_prompt(target: str, draft: str, prompt: str, draft_prompt: list[int], tokens: list[int]) -> TranslatedText:
    """Returns a text that begins with `prompt` for the target, and with `draft_prompt` for the draft."""
    own = tokens_of(target).encode(prompt)
    return TranslatedText.begin(
        Translator(tokens_of(target), tokens_of(draft)), KEY, [*own, *tokens], len(own), draft_prompt
    )


def rendered(kind: str, content: str) -> list[int]:
    """Returns a conversation in a toy chat template, with control tokens."""
    bos, mark = [tokenizer(kind).convert_tokens_to_ids(name) for name in ("<bos>", "<mark>")]
    return [bos, mark, *tokens_of(kind).encode(f"user {content}"), mark, *tokens_of(kind).encode("assistant\n")]


def bytes_of(kind: str, tokens: list[int]) -> bytes:
    return b"".join(tokens_of(kind).piece(token) for token in tokens)


pairs = st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
texts = st.one_of(  # without the mark that SentencePiece writes for spaces
    st.sampled_from(TEXTS),
    st.text(max_size=30).map(lambda text: text.replace("▁", "")),
    st.lists(st.sampled_from(TEXTS), min_size=2, max_size=5).map("".join),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_spell_the_text(kind: str, text: str) -> None:
    assert bytes_of(kind, list(tokens_of(kind).encode(text))) == text.encode()


@settings(deadline=None)
@given(pairs, texts, st.data())
def test_the_draft_reads_the_committed_text(pair: tuple[str, str], text: str, data: st.DataObject) -> None:
    target, draft = pair
    tokens = list(tokens_of(target).encode(text))
    translated = a_text(target, draft)
    while tokens:
        count = data.draw(st.integers(1, 6))
        before = list(translated.prefix.tokens)
        kept = translated.extend(tokens[:count])
        del tokens[:count]
        assert translated.prefix.tokens[:kept] == before[:kept]
    assert bytes_of(draft, translated.prefix.tokens) == text.encode()
    assert translated.required == b""


@settings(deadline=None)
@given(pairs, st.lists(st.integers(0, 700), max_size=40))
def test_any_tokens_are_read(pair: tuple[str, str], tokens: list[int]) -> None:
    """Tokens in any order, also control tokens, ids beyond the vocabulary, and bytes that form no characters."""
    target, draft = pair
    whole = a_text(target, draft, tokens)
    grown = a_text(target, draft)
    for token in tokens:
        grown.extend([token])
    assert whole.target_len == grown.target_len == len(tokens)
    assert whole.required == grown.required
    spelled = [bytes_of(draft, text.prefix.tokens).decode() for text in (whole, grown)]
    assert spelled[0] == spelled[1]


@settings(deadline=None)
@given(pairs, texts, texts, st.data())
def test_drafts_spell_the_drafted_text(
    pair: tuple[str, str], text: str, continuation: str, data: st.DataObject
) -> None:
    target, draft = pair
    translated = a_text(target, draft, tokens_of(target).encode(text))
    drafted = list(tokens_of(draft).encode(continuation))[: data.draw(st.integers(0, 8))]
    found = translated.translated(drafted)
    spelled = bytes_of(target, [token for token, _ in found])
    assert bytes_of(draft, drafted).startswith(spelled)
    complete = bytes_of(draft, drafted).decode(errors="ignore").encode()
    assert spelled == complete, "only incomplete characters are held back"
    at = 0
    for token, index in found:
        at += len(tokens_of(target).piece(token))
        assert len(bytes_of(draft, drafted[:index])) < at <= len(bytes_of(draft, drafted[: index + 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_pair_with_one_tokenizer_drafts_its_own_tokens(kind: str, text: str) -> None:
    tokens = list(tokens_of(kind).encode(text))
    words = [count for count in range(1, len(tokens)) if bytes_of(kind, tokens[count:])[:1] in (b" ", b"\n")]
    for count in words:
        translated = a_text(kind, kind, tokens[:count])
        assert [token for token, _ in translated.translated(tokens[count:])] == tokens[count:]


def test_control_tokens_are_those_of_the_same_name() -> None:
    """A name in a text is text; <bos> begins all of the draft's texts already."""
    bos, mark, only = [tokenizer("words").convert_tokens_to_ids(name) for name in ("<bos>", "<mark>", "<only>")]
    encode = tokens_of("words").encode
    tokens = [bos, mark, *encode("the dog"), only, mark, *encode(" sleeps <mark>")]
    translated = a_text("words", "gemma", tokens)
    marks = [tokenizer("gemma").convert_tokens_to_ids("<mark>")] * 2
    start = list(tokens_of("gemma").start)
    assert len(start) == 1
    assert [token for token in translated.prefix.tokens if not tokens_of("gemma").piece(token)] == start + marks
    assert bytes_of("gemma", translated.prefix.tokens) == b"the dog sleeps <mark>"


def test_control_tokens_end_drafts() -> None:
    mark = tokenizer("gemma").convert_tokens_to_ids("<mark>")
    drafted = [*tokens_of("gemma").encode(" on"), mark, *tokens_of("gemma").encode(" the")]
    found = a_text("words", "gemma", tokens_of("words").encode("sleeps")).translated(drafted)
    assert bytes_of("words", [token for token, _ in found]) == b" on"


def test_an_incomplete_character_waits_for_its_other_bytes() -> None:
    emoji = list("🙂".encode())
    alone = [tokens_of("bytes").encode("a")[0], *tokens_of("bytes").encode("🙂")]
    assert len(alone) == 5
    translated = a_text("bytes", "gemma", alone[:3])
    assert translated.required == bytes(emoji[:2])
    assert translated.translated(tokens_of("gemma").encode("🙂")) != []
    assert [token for token, _ in translated.translated(tokens_of("gemma").encode("🙂"))] == alone[3:]
    assert translated.translated(tokens_of("gemma").encode("the")) == []
    translated.extend(alone[3:])
    assert bytes_of("gemma", translated.prefix.tokens) == "a🙂".encode()


@pytest.mark.parametrize("pair", [("words", "gemma"), ("gemma", "words"), ("bytes", "llama"), ("llama", "few")])
def test_a_round_tokenizes_only_the_end_again(pair: tuple[str, str]) -> None:
    target, draft = pair
    tokens = list(tokens_of(target).encode(" ".join(TEXTS[:2]) * 12))
    translated = a_text(target, draft, tokens[:-40])
    translator = translated.translator
    before = translator.encoded
    for index in range(10):
        translated.extend(tokens[len(tokens) - 40 + 4 * index :][:4])
        translated.translated(tokens_of(draft).encode(" jumps over"))
    assert translator.encoded - before < 10 * 80, "independent of the text's length"


@settings(deadline=None)
@given(pairs, texts, texts, st.data())
def test_the_draft_reads_its_own_prompt_and_then_the_answer(
    pair: tuple[str, str], prompt: str, answer: str, data: st.DataObject
) -> None:
    """The prompt stays as rendered, however the answer arrives; a replay of the whole session reads the same."""
    target, draft = pair
    own = rendered(draft, prompt)
    tokens = list(tokens_of(target).encode(answer))
    at = data.draw(st.integers(0, len(tokens)))
    translated = after_prompt(target, draft, prompt, own, tokens[:at])
    for end in range(at, len(tokens)):
        kept = translated.extend(tokens[end : end + 1])
        assert kept >= len(own)
    replayed = after_prompt(target, draft, prompt, own, tokens)
    for text in (translated, replayed):
        assert text.prefix.tokens[: len(own)] == own
        assert bytes_of(draft, text.prefix.tokens[len(own) :]) == answer.encode()
        assert text.target_len == len(tokens_of(target).encode(prompt)) + len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_its_own_prompt_continue_the_targets_prompt(kind: str) -> None:
    whole = list(tokens_of(kind).encode(TEXTS[0]))
    for count in range(1, len(whole)):
        translator = Translator(tokens_of(kind), tokens_of("words"))
        text = TranslatedText.begin(translator, KEY, whole[:count], count, rendered("words", "x"))
        drafted = tokens_of("words").encode(bytes_of(kind, whole[count:]).decode())
        assert [token for token, _ in text.translated(drafted)] == whole[count:]


def test_control_tokens_after_its_own_prompt_are_translated() -> None:
    mark = tokenizer("words").convert_tokens_to_ids("<mark>")
    own = rendered("gemma", "x")
    text = after_prompt("words", "gemma", "the dog", own, [mark, *tokens_of("words").encode("sleeps")])
    added = text.prefix.tokens[len(own) :]
    assert added[0] == tokenizer("gemma").convert_tokens_to_ids("<mark>")
    assert bytes_of("gemma", added) == b"sleeps"


def test_a_prompt_of_unknown_tokens_is_replaced_by_the_translation() -> None:
    unknown = [len(tokens_of("gemma").pieces)]
    text = after_prompt("words", "gemma", "the dog", unknown, [])
    assert text.prefix.tokens == a_text("words", "gemma", list(tokens_of("words").encode("the dog"))).prefix.tokens
