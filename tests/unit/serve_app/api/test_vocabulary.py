"""Requests with token ids beyond the model's embedding are refused; a tokenizer's ids may have gaps."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, AsgiFront, asgi_front

IDS = {"a": 0, "b": 1, "c": 5, "d": 7}  # 4 tokens, highest id 7
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def a_codec(folder: Path, rows: int) -> TextCodec:
    """Returns the codec of a saved checkpoint with embeddings for ids below `rows`."""
    LlamaConfig(vocab_size=rows, eos_token_id=1).save_pretrained(folder)
    built = Tokenizer(models.BPE(IDS, []))
    built.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=built, chat_template=TEMPLATE).save_pretrained(folder)
    return TextCodec.load(folder)


@pytest_asyncio.fixture
async def whole(tmp_path: Path) -> AsyncIterator[AsgiFront]:
    async with asgi_front(a_codec(tmp_path, 8)) as front:
        yield front


@pytest_asyncio.fixture
async def short(tmp_path: Path) -> AsyncIterator[AsgiFront]:
    """Returns a codec for a model with 6 rows; only the tokenizer contains "d"."""
    async with asgi_front(a_codec(tmp_path, 6)) as front:
        yield front


async def posted(front: AsgiFront, path: str, **fields: Any) -> tuple[int, Any]:
    front.plays([Ended(Finish.STOP)])
    response = await front.http.post(path, json={"model": MODEL} | fields)
    return response.status_code, response.json()


@pytest.mark.parametrize("prompt", ["acd", [0, 5, 7]], ids=["text", "ids"])
async def test_ids_with_gaps_are_served(whole: AsgiFront, prompt: object) -> None:
    assert (await posted(whole, "/v1/completions", prompt=prompt))[0] == 200
    assert whole.prompt == (0, 5, 7)


async def test_ids_with_gaps_are_detokenized(whole: AsgiFront) -> None:
    assert (await posted(whole, "/detokenize", tokens=[7, 5, 0]))[1] == {"prompt": "dca"}
    assert (await posted(whole, "/detokenize", tokens=[8]))[0] == 400


async def test_grammars_accept_ids_with_gaps(whole: AsgiFront) -> None:
    assert whole.codec.grammars() is not None


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "ad"),
        ("/v1/completions", "prompt", [0, 7]),
        ("/v1/completions", "prompt", [[0], [7]]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "ad"}]),
    ],
)
async def test_a_prompt_token_without_embedding_is_refused(
    short: AsgiFront, path: str, field: str, value: object
) -> None:
    status, body = await posted(short, path, **{field: value})
    assert status == 400
    assert body["error"]["param"] == field
    assert "token id 7 is outside the vocabulary of 6 tokens" in body["error"]["message"]
    assert not short.generator.generations


async def test_other_prompts_are_served(short: AsgiFront) -> None:
    assert (await posted(short, "/v1/chat/completions", messages=[{"role": "user", "content": "abc"}]))[0] == 200
    assert short.prompt == (0, 1, 5)


@pytest.mark.parametrize("field", ["logit_bias", "bad_words"])
async def test_rules_for_a_token_without_embedding_are_refused(short: AsgiFront, field: str) -> None:
    value: object = {"7": 1.0} if field == "logit_bias" else ["d"]
    status, body = await posted(short, "/v1/completions", prompt="a", **{field: value})
    assert status == 400
    assert body["error"]["param"] == field
