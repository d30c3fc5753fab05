"""SQL requests from a template: a second kind of uniform training traffic for the demo's draft.

8 tables, 24 choices of their columns and 8 conditions give 1536 distinct requests.
"""

import random
from itertools import permutations, product

TABLES = {
    "orders": ("customer", "product", "total", "city"),
    "employees": ("name", "salary", "department", "manager"),
    "books": ("title", "author", "year", "price"),
    "flights": ("airline", "origin", "destination", "duration"),
    "patients": ("name", "age", "doctor", "ward"),
    "songs": ("artist", "album", "length", "genre"),
    "houses": ("street", "rooms", "rent", "owner"),
    "races": ("driver", "team", "points", "country"),
}
CONDITIONS = (
    *("is above 10", "is below 50", "is missing", "is not missing"),
    *("starts with A", "is equal to 7", "is the highest", "is shared by at least two rows"),
)
TEMPLATE = (
    "The table {table} has the columns id, {columns}. Write an SQL query that returns {first} and {second} of all rows"
    " whose {third} {condition}, sorted by {first}."
)


def sql_requests(count: int, seed: int = 0) -> list[str]:
    """Returns `count` distinct requests, at most 1536, in an order determined by the seed."""
    choices = [
        (table, columns, chosen, condition)
        for table, columns in TABLES.items()
        for chosen, condition in product(permutations(columns, 3), CONDITIONS)
    ]
    if count > len(choices):
        raise ValueError(f"{count} SQL requests are wanted, expected at most {len(choices)}")
    return [
        TEMPLATE.format(
            table=table, columns=", ".join(columns), first=first, second=second, third=third, condition=condition
        )
        for table, columns, (first, second, third), condition in random.Random(seed).sample(choices, count)
    ]
