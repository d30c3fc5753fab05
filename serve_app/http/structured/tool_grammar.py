"""Which of a chat's calls are held to something, and the grammar that then holds the whole answer."""

from collections.abc import Callable

from cluster.errors import RequestError
from serve_app.http.conversation.call_form import CallForm
from serve_app.http.conversation.response_templates import ReasoningInPrompt
from serve_app.http.structured.call_grammar import CallGrammar, Calling, OfferedCall
from serve_app.http.structured.response_format import AskedGrammar, check_end
from serve_app.http.wire.messages import NamedTool, Tool
from serve_app.http.wire.schemas import ChatRequest

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def held_calls(
    request: ChatRequest,
    form: CallForm | None,
    asked: AskedGrammar | None,
    reasoning: Callable[[], ReasoningInPrompt],
) -> AskedGrammar | None:
    """`asked` itself where no call is held to anything; `reasoning` is that of the prompt. Raises RequestError."""
    strict = any(tool.function.strict for tool in request.offered)
    is_held = request.must_call or strict or not request.parallel_tool_calls or asked is not None
    if form is None or not request.offered or not is_held:
        return asked
    if asked is not None and request.structured_outputs is not None and request.must_call:
        message = "structured_outputs and tool_choice both ask for a form of the answer, expected one of them"
        raise RequestError(message, "structured_outputs")
    calling = Calling(
        tools=[_offered(tool, must=request.must_call) for tool in _callable(request)],
        must=request.must_call,
        several=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
        content=asked,
    )
    grammar = CallGrammar(form).asked(calling, reasoning())
    check_end(grammar, ignore_eos=request.ignore_eos)
    return grammar


def _callable(request: ChatRequest) -> tuple[Tool, ...]:
    choice = request.tool_choice
    if not isinstance(choice, NamedTool):
        return request.offered
    return tuple(tool for tool in request.offered if tool.function.name == choice.function.name)[:1]


def _offered(tool: Tool, *, must: bool) -> OfferedCall:
    function = tool.function
    if not must and not function.strict:
        return OfferedCall(function.name, None)
    return OfferedCall(function.name, NO_PARAMETERS if function.parameters is None else function.parameters)
