"""Checks chat requests against the model's features, and converts conversations for its chat template."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import RequestError
from serve_app.api.chat_template import ChatTemplate, Message, TemplateOptions
from serve_app.api.request_schemas import ChatMessage, ChatRequest, NamedTool, ToolCall
from serve_app.api.tool_calls import CallForm, ReasoningInPrompt, ResponseReaders


def check_features(request: ChatRequest, template: ChatTemplate, *, reads_answers: bool) -> None:
    """Raises RequestError for features the model lacks. `reads_answers`: whether a response template splits answers."""
    _check_choice(request)
    if request.offered and not template.takes("tools", with_tools=True):
        raise RequestError("tools: this model's chat template does not support tools; leave them out", "tools")
    if request.offered and not reads_answers:
        message = "tools: the format of this model's tool calls is unknown; set server.response_template"
        raise RequestError(message, "tools")
    effort = request.reasoning_effort
    if effort not in (None, "none") and not any(map(template.takes, effort_variables(effort))):
        raise RequestError("reasoning_effort: this model's chat template does not support it", "reasoning_effort")


def check_call_form(request: ChatRequest, form: CallForm | None) -> None:
    """Raises RequestError if calls must be constrained but the model's call format (`form`) is unknown."""
    if form is not None:
        return
    unknown = "is not supported: no grammar is known for this model's tool calls"
    if request.must_call:
        raise RequestError(f"tool_choice: requiring a call {unknown}; expected auto or none", "tool_choice")
    if strict := [n for n, tool in enumerate(request.offered) if tool.function.strict]:
        field = request.strict_field.format(strict[0])
        raise RequestError(f"{field} {unknown}; expected false", field)


def _check_choice(request: ChatRequest) -> None:
    if not request.must_call:
        return
    names = [tool.function.name for tool in request.tools]
    if not names:
        raise RequestError("tool_choice: the request has no tools; expected auto or none", "tool_choice")
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"tool_choice: {choice.function.name!r} is not in tools, expected one of {', '.join(names[:8])}"
        raise RequestError(message, "tool_choice")


def messages_of(request: ChatRequest, template: ChatTemplate) -> list[Message]:
    """Returns the conversation in the form that chat templates expect."""
    developer = "developer" if template.takes("developer") else "system"
    return [_message(message, developer) for message in request.messages]


def options_of(request: ChatRequest) -> TemplateOptions:
    """Returns the template options of a request."""
    begins_answer = request.add_generation_prompt
    return TemplateOptions(
        tools=[tool.model_dump() for tool in request.offered],
        variables=effort_variables(request.reasoning_effort) | request.chat_template_kwargs,
        begins_answer=not request.continue_final_message if begins_answer is None else begins_answer,
        continues_last=request.continue_final_message,
    )


def reasoning_before(request: ChatRequest, template: ChatTemplate, readers: ResponseReaders) -> ReasoningInPrompt:
    """Returns whether the prompt begins or ends the answer's reasoning; depends on the template options only."""
    options = options_of(request)
    if options.continues_last:
        return "over"
    put = TemplateOptions(variables=options.variables, begins_answer=options.begins_answer)
    return readers.reasoning_in(template.written([{"role": "user", "content": "x"}], put))


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the template variables for a reasoning effort; "none" disables thinking."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _message(message: ChatMessage, developer: str) -> Message:
    optional = {
        "tool_calls": [_call(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name if message.role == "tool" else None,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    role = developer if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | {name: value for name, value in optional.items() if value}


def _call(call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    identity = {} if call.id is None else {"id": call.id}
    return identity | {"type": call.type, "function": function}


def _arguments(written: str) -> Any:
    """Parses arguments into an object for the template; returns anything else verbatim."""
    try:
        read = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written
