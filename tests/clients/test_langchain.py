"""Runs LangChain's standard tests for chat models, with its OpenAI client."""

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestSlipstream(ChatModelIntegrationTests):
    """Standard tests without images, audio and files, which a text model cannot read."""

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
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
