"""Twenty typical JSON schemas with short answers, each with a question."""

from typing import Any, NamedTuple


class SchemaPrompt(NamedTuple):
    prompt: str
    schema: dict[str, Any]


def text(longest: int = 24, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, **more}


def whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def listed(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def closed(required: int | None = None, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with only these properties; the first `required`, or all, are mandatory."""
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


FLAG = {"type": "boolean"}
PERSON = closed(name=text(), age=whole(0, 120))

SCHEMA_PROMPTS = (
    SchemaPrompt("Make up a person.", PERSON),
    SchemaPrompt("Name a city and its country.", closed(city=text(), country=text(), capital=FLAG)),
    SchemaPrompt("Is the sky blue?", closed(answer={"enum": ["yes", "no", "unknown"]}, reason=text(60))),
    SchemaPrompt("List three fruits.", closed(fruits=listed(text(16), 3, 3))),
    SchemaPrompt(
        "Rate this film: it was wonderful.", closed(stars=whole(1, 5), mood={"enum": ["good", "mixed", "bad"]})
    ),
    SchemaPrompt("Give a point in the plane.", closed(x=whole(-100, 100), y=whole(-100, 100))),
    SchemaPrompt("When was the telephone invented?", closed(date=text(10, pattern="^(1[89]|20)[0-9]{2}-[01][0-9]$"))),
    SchemaPrompt("Describe a book.", closed(2, title=text(40), author=text(), year=whole(1000, 2030), isbn=text(13))),
    SchemaPrompt("Make up a family.", closed(parents=listed(PERSON, 1, 2), children=listed(PERSON, 0, 2))),
    SchemaPrompt(
        "A colour for the kitchen, please.", closed(colour={"enum": ["red", "green", "blue", "white", "yellow"]})
    ),
    SchemaPrompt(
        "Call the weather service for Paris.", closed(tool={"const": "weather"}, arguments=closed(city=text()))
    ),
    SchemaPrompt("Give a version number.", closed(version=text(14, pattern="^[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}$"))),
    SchemaPrompt("A number or nothing.", closed(value={"anyOf": [whole(0, 9), {"type": "null"}]})),
    SchemaPrompt(
        "Draw a shape.", {"anyOf": [closed(circle=closed(r=whole(1, 9))), closed(square=closed(side=whole(1, 9)))]}
    ),
    SchemaPrompt("Three coin tosses.", listed({"enum": ["heads", "tails"]}, 3, 3)),
    SchemaPrompt(
        "How sure are you?", closed(certainty={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01})
    ),
    SchemaPrompt(
        "A small tree of words.",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": closed(word=text(10), left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
                "leaf": {"anyOf": [closed(word=text(10)), {"type": "null"}]},
            },
        },
    ),
    SchemaPrompt("An order of two items.", closed(items=listed(closed(sku=text(8), n=whole(1, 20)), 2, 2), paid=FLAG)),
    SchemaPrompt("Greet me in Japanese.", closed(greeting=text(20, minLength=1), language={"const": "ja"})),
    SchemaPrompt("Plan a day.", closed(morning=text(30), noon=text(30), evening=text(30), rest=listed(text(12), 0, 3))),
)
