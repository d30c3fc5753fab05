"""Tests detection of a model's call format from its chat template and response template."""

from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import TaggedArguments
from tests.call_writers import json_writer, lined_writer, quoting_writer, special_writer, tagged_writer
from tests.talking_tokenizer import talking_tokenizer


def test_a_json_object_between_marks() -> None:
    form = json_writer().call_form
    assert (form.opening, form.middle, form.closing) == ('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")
    assert form.between == '}</tool_call><tool_call>{"name": "'
    assert (form.trigger, form.tags, form.thinking) == ("<tool_call>", None, ("<think>", "</think>"))


def test_line_breaks_of_the_template_are_kept() -> None:
    form = lined_writer().call_form
    assert form.opening == '<tool_call>\n{"name": "'
    assert form.between == '}\n</tool_call>\n<tool_call>\n{"name": "'
    assert form.closing == "}\n</tool_call>"


def test_arguments_between_tags() -> None:
    form = tagged_writer().call_form
    assert form.tags == TaggedArguments("<parameter=", ">\n", "\n</parameter>\n")
    assert (form.opening, form.middle) == ("<tool_call>\n<function=", ">\n")
    assert form.closing == "</function>\n</tool_call>"
    assert form.trigger == "<tool_call>"


def test_a_list_of_calls_between_special_tokens() -> None:
    form = special_writer().call_form
    assert form.opening == '[CALLS][{"name": "'
    assert (form.between, form.closing) == ('}, {"name": "', "}][/CALLS]")
    assert (form.trigger, form.thinking) == ("[CALLS]", None)
    assert "[CALLS]" in form.special_ids
    assert "<|im_end|>" not in form.special_ids


def test_an_unknown_format_is_none() -> None:
    assert quoting_writer().call_form is None
    tokenizer = talking_tokenizer()
    assert TextCodec(tokenizer, (tokenizer.eos_token_id,)).call_form is None  # calls are indistinguishable


def test_a_format_that_does_not_round_trip_is_none() -> None:
    codec = json_writer()
    template = codec.tokenizer.chat_template.replace(
        "call.function | tojson", '{"name": call.function.name[:5]} | tojson'
    )
    codec.tokenizer.chat_template = template
    assert TextCodec(codec.tokenizer, codec.eos_ids, codec.readers.template).call_form is None


def test_a_template_that_refuses_calls_has_no_format() -> None:
    codec = json_writer()
    codec.tokenizer.chat_template = "{% if messages[-1].tool_calls %}{{ raise_exception('no') }}{% endif %}{{ tools }}"
    assert TextCodec(codec.tokenizer, codec.eos_ids, codec.readers.template).call_form is None
