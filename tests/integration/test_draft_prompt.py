"""Tests chats whose drafts begin with the draft's own chat template, over real streams: the drafter's text, and a lost
drafter.
"""

import asyncio
from string import ascii_lowercase

import torch
from torch import Tensor

from actors.drafters.model.draft_model import DraftModel
from actors.drafters.translation.text_tokens import text_tokens
from cluster.drafting.method import DraftingMethod
from cluster.drafting.translated_method import TranslatedMethod
from cluster.drafting.translation import TextTokens, Translator
from protos.messages import Open
from serve_app.api.chat_template import ChatTemplate
from serve_app.api.draft_prompt import DraftPrompts
from tests.asgi_front import codec_of, config_of, http_client, toy_api
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.harness import CONTEXT, cluster, eventually
from tests.toy_tokenizers import sentence_piece

TARGET, DRAFT = byte_tokenizer(), sentence_piece(60)
DRAFT.chat_template = "{{ bos_token }}{% for m in messages %}<mark>{{ m.content }}{% endfor %}<mark>"
LETTERS = 300


def alphabet(tokens: TextTokens) -> Tensor:
    """Returns the logits of a model that recites the alphabet after each letter, and from its start after any other
    text.
    """
    logits = torch.full((len(tokens.pieces), len(tokens.pieces)), -4.0)
    for token, piece in enumerate(tokens.pieces):
        last = piece[-1:].decode(errors="ignore")
        begin = ascii_lowercase.index(last) + 1 if last and last in ascii_lowercase else 0
        logits[token, tokens.encode((2 * ascii_lowercase)[begin : begin + 4])[0]] = 6.0
    return logits


async def test_each_drafter_of_a_chat_begins_with_the_drafts_prompt() -> None:
    translator = Translator(text_tokens(TARGET), text_tokens(DRAFT))
    opened: list[tuple[int, ...]] = []  # draft tokens of each opened session

    def translated(method: DraftingMethod) -> DraftingMethod:
        assert isinstance(method, DraftModel)
        open_session = method.open

        def record(request: Open) -> None:
            opened.append(request.tokens)
            open_session(request)

        method.open = record  # type: ignore[method-assign]
        return TranslatedMethod(method, lambda _: translator)

    models = {"logits": alphabet(translator.target), "draft_logits": alphabet(translator.draft)}
    async with cluster(drafters=2, wrap_method=translated, **models) as c:
        prompts = DraftPrompts(ChatTemplate(DRAFT))
        app = toy_api(c.router, codec_of(TARGET), config_of({}, CONTEXT), draft_prompts=prompts)
        async with http_client(app) as client:
            body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": LETTERS}
            asked = asyncio.create_task(client.post("/v1/chat/completions", json={**body, "temperature": 0}))
            await eventually(lambda: c.accepted > 8, "drafts are accepted")
            (busy,) = [address for address, drafter in c.drafters.items() if not drafter.is_idle]
            await c.servers[busy].stop(0)
            await eventually(lambda: len(opened) == 2, "the other drafter takes the session")
            c.hurry()
            answer = (await asked).json()
    assert answer["choices"][0]["message"]["content"] == (LETTERS * ascii_lowercase)[:LETTERS]
    rendered = "<bos><mark>hi<mark>"
    first, second = [DRAFT.decode(tokens, clean_up_tokenization_spaces=False) for tokens in opened]
    assert first.startswith(rendered)
    assert second.startswith(f"{rendered}abcdefgh")
