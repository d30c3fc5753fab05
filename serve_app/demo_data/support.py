"""Support requests from a template: uniform training traffic for the demo's draft.

16 names, 16 products and 8 problems give 2048 distinct requests. The answers share much of their wording, as answers to
one prompt version of an application do.
"""

import random
from itertools import product

NAMES = (
    *("Maria", "Jonas", "Aisha", "Peter", "Chen", "Olga", "Samuel", "Priya"),
    *("Tom", "Lucia", "Omar", "Hannah", "Diego", "Emma", "Yuki", "Noah"),
)
PRODUCTS = (
    *(
        "coffee machine",
        "laptop",
        "electric bike",
        "desk lamp",
        "vacuum cleaner",
        "headphones",
        "office chair",
        "camera",
    ),
    *("dishwasher", "phone", "printer", "backpack", "air purifier", "tablet", "blender", "smart watch"),
)
PROBLEMS = (
    "arrived damaged and the box was already open",
    "stopped working after two weeks",
    "has not arrived although it was ordered ten days ago",
    "makes a strange noise when it is switched on",
    "is missing a part that is shown in the manual",
    "was delivered in the wrong colour",
    "cannot be returned because the label does not print",
    "was charged twice on the invoice",
)
TEMPLATE = (
    "You answer customer support messages politely. A customer named {name} writes that the {product} {problem}."
    " Write a reply that apologizes and explains the next steps."
)


def support_requests(count: int, seed: int = 0) -> list[str]:
    """Returns `count` distinct requests, at most 2048, in an order determined by the seed."""
    combinations = list(product(NAMES, PRODUCTS, PROBLEMS))
    if count > len(combinations):
        raise ValueError(f"{count} support requests are wanted, expected at most {len(combinations)}")
    chosen = random.Random(seed).sample(combinations, count)
    return [TEMPLATE.format(name=name, product=item, problem=problem) for name, item, problem in chosen]
