"""The wire format of the events that a stream of POST /v1/responses consists of, as they are described to clients."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from serve_app.http.wire.responses_output import OutputItem, OutputText, ResponseReply


class _ResponsesEvent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_number: int


class ResponseEvent(_ResponsesEvent):
    """The whole of the response, as it is then; the last three end the stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseReply


class _OutputEvent(_ResponsesEvent):
    output_index: int


class ItemEvent(_OutputEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class ArgumentsDelta(_OutputEvent):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    delta: str


class ArgumentsDone(_OutputEvent):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    name: str
    arguments: str


class _PartEvent(_OutputEvent):
    item_id: str
    content_index: Literal[0]


class PartEvent(_PartEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDelta(_PartEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: tuple[()]


class TextDone(_PartEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: tuple[()]


class ReasoningDelta(_PartEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(_PartEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class ResponseStreamEvent(
    RootModel[
        Annotated[
            ResponseEvent
            | ItemEvent
            | PartEvent
            | TextDelta
            | TextDone
            | ReasoningDelta
            | ReasoningDone
            | ArgumentsDelta
            | ArgumentsDone,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of the stream; its name is its `type`."""
