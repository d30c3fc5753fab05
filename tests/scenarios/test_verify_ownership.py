"""Sessions belong to the router that opened them, and only the assigned drafter takes part."""

import pytest

from tests.scenarios.verification import Target

# ---------------------------------------------------------------- routers


def test_another_router_cannot_replace_a_session():
    """The refusal does not reveal whether the request is valid."""
    Target().run("""
        router#1: Open s 1,2
        other#1: Open s 5,6 attempt=2 -> other#1 <- Refusal s invalid "not permitted" attempt=2
        other#1: Open s 99,2 -> other#1 <- Refusal s invalid "not permitted"
        show refusals -> refusals=an Open of another router's session:2
        step -> router#1 <- Verdict s 1,2 +23
    """)


def test_another_router_cannot_close_or_claim_a_session():
    Target().run("""
        router#1: Open s 1,2
        other#1: Close s attempt=9
        other#1: Hello s
        step -> router#1 <- Verdict s 1,2 +23
    """)


def test_a_router_replaces_its_session_from_a_new_stream():
    Target().run("""
        router#1: Open s 1,2
        router#1: Open s 5,6 attempt=2
        router#2: Hello s/2
        router#2: Open s 7,8 attempt=3
        step -> router#2 <- Verdict s 7,8 +7 attempt=3
    """)


# ---------------------------------------------------------------- drafters

ASSIGNED = """
        router#1: Open s 1,2 token_key=secret
        drafter#1: Attach s 1,2 assignment_token=secret/s/1 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
"""


@pytest.mark.parametrize(
    "token",
    ["none", "secret/t/1", "guess/s/1", "secret/s/1/2", "zeros"],
    ids=["none", "another session's", "another key's", "renumbered", "zeros"],
)
def test_a_drafter_without_a_valid_token_receives_nothing(token):
    """A Resync would disclose the text's length and hash."""
    Target().run(f"""
        router#1: Open s 1,2 token_key=secret
        thief#1: Attach s 1,2 assignment_token={token}
        thief#1: Attach s 1 have_hash=7 assignment_token={token}
        show refusals -> refusals=an Attach to a session that it was not assigned:2
        step -> router#1 <- Verdict s 1,2 +23
    """)


def test_the_assigned_drafter_with_other_tokens_is_resynchronized():
    Target().run("""
        router#1: Open s 1,2 token_key=secret
        drafter#1: Attach s 1 have_hash=7 assignment_token=secret/s/1 -> drafter#1 <- Resync s 1,2
    """)


def test_a_later_drafter_excludes_earlier_ones():
    Target().run(f"""{ASSIGNED}
        second#1: Attach s 1,2 assignment_token=secret/s/2 -> second#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Attach s 1,2 assignment_token=secret/s/1
        step
            second#1 <- Verdict s 1,2 +23
            second#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
    """)


def test_a_drafter_may_return_by_another_stream():
    Target().run(f"""{ASSIGNED}
        gone drafter#1
        drafter#2: Attach s 1,2 assignment_token=secret/s/1 -> drafter#2 <- DraftRequest s 1,2 max_tokens=4
    """)


def test_only_answers_of_the_attached_drafter_count():
    Target(patience=1).run("""
        router#1: Open s 1 token_key=secret
        drafter#1: Attach s 1 assignment_token=secret/s/1 -> drafter#1 <- DraftRequest s 1 max_tokens=4
        thief#1: Block s 1 :5
        thief#1: NoDraft s 1
        show dropped -> dropped=not_assigned:1
        plan -> open s
        apply
        due -> 1
        drafter#1: NoDraft s 1
        plan -> row s@0 1
    """)


def test_blocks_of_earlier_drafters_are_late_and_those_of_strangers_refused():
    """This also holds after the router reopens the session. Refusals raise an alarm; late blocks do not."""
    Target().run(f"""{ASSIGNED}
        second#1: Attach s 1,2 assignment_token=secret/s/2 -> second#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Block s 1,2 :5
        router#1: Open s 1,2 attempt=2 token_key=secret
        drafter#1: Block s 1,2 :5
        second#1: Block s 1,2 :5
        show dropped refusals -> dropped=not_assigned:3 refusals=none
        thief#1: Block s 1,2 :5
        show refusals -> refusals=a Block for a session that it was not assigned:1
    """)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_messages_before_the_open_need_a_token_too(is_first):
    stolen = """
        thief#1: Attach s 1,2
        thief#1: Block s 1,2 :6
    """
    Target().run(f"""
        {stolen if is_first else ""}
        drafter#1: Attach s 1,2 assignment_token=secret/s/1
        drafter#1: Block s 1,2 :5
        {"" if is_first else stolen}
        router#1: Open s 1,2 token_key=secret -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        show dropped -> dropped=not_assigned:1
        plan
            open s
            row s@0 1,2 :5
    """)


def test_no_drafter_can_attach_to_an_audit():
    Target().run("""
        router#1: Open s 1,2 audit=yes draft_tokens=0
        drafter#1: Attach s 1,2
        show refusals -> refusals=an Attach to a session that it was not assigned:1
    """)
