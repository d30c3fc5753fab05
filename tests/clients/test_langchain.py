"""LangChain's own suite for chat models, over its client of OpenAI's."""

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestSlipstream(ChatModelIntegrationTests):
    """What is declared False here needs a grammar over the answer's tokens, or images."""

    @pytest.fixture(autouse=True)
    def _server(self, base_url: str) -> None:
        self.base_url = base_url

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "toy", "base_url": self.base_url, "api_key": "none", "stream_usage": True, "max_retries": 0}

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return False
