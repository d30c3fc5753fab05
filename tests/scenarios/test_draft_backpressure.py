"""Back-pressure and load checks: a drafter drops sessions while its blocks are late, and checks its first drafts."""

import pytest

from tests.scenarios.drafting import LIMITS, Drafter

ENOUGH_ROUNDS = 80  # shortly before the session's text reaches its limit


def overtaken(drafter: Drafter, *sessions: str) -> list[str]:
    """Lets verdicts overtake every requested block; returns the scheduler's first answers."""
    texts = dict.fromkeys(sessions, "1,2")
    for _ in range(ENOUGH_ROUNDS):
        requested = [request.split()[:2] for request in drafter.do("draft")]
        for session, _ in requested:
            drafter.do(f"t1: Step {session} {texts[session]} +1")
            texts[session] += ",1"
        for session, text in requested:
            if answers := drafter.do(f"block {session} {text} :5"):
                return answers
    return []


def opened(*sessions: str) -> Drafter:
    drafter = Drafter()
    for session in sessions:
        drafter.do(f"router#1: Open {session} 1,2 max_len=90")
    return drafter


def test_a_drafter_whose_blocks_are_all_overtaken_gives_up_a_session_and_accepts_none_instead():
    drafter = opened("a", "b", "c")
    refusal, detach = overtaken(drafter, "a", "b", "c")
    session = refusal.split()[3]
    why = '"nearly all blocks are late; this drafter has too many sessions"'
    assert refusal == f"router#1 <- Refusal {session} attempt=1 overloaded {why}"
    assert detach == f"t1 <- Detach {session}"
    drafter.run(f"""
        router#1: Open {session} 1,2
            router#1 <- Refusal {session} attempt=1 overloaded "this drafter is full with 2 sessions"
        show sessions -> sessions=2
    """)


def in_time(drafter: Drafter, sessions: dict[str, str], rounds: int, late: int) -> None:
    """Drafts for the sessions' texts; of every 10 rounds, the blocks of `late` rounds come too late."""
    for round_ in range(rounds):
        answer = "missed" if round_ % 10 < late else "given"
        for session, text in [request.split()[:2] for request in drafter.do("draft")]:
            if session not in sessions:
                continue  # lists a closed session
            drafter.do(f"block {session} {text} :5")
            assert not drafter.do(f"t1: Step {session} {sessions[session]} +1 answer={answer}")
            sessions[session] += ",1"


def test_a_drafter_that_gave_up_a_session_accepts_one_again_once_few_blocks_are_late():
    drafter = opened("a", "b", "c")
    refusal, _ = overtaken(drafter, "a", "b", "c")
    given_up = refusal.split()[3]
    kept = [session for session in "abc" if session != given_up]
    for session in kept:
        drafter.do(f"router#1: Close {session}")
    for session in ("d", "e"):
        drafter.do(f"router#1: Open {session} 1,2 max_len=90")
    assert drafter.do(f"router#1: Open {given_up} 1,2")[0].startswith("router#1 <- Refusal")
    in_time(drafter, dict.fromkeys(("d", "e"), "1,2"), ENOUGH_ROUNDS, late=2)
    assert drafter.do(f"router#1: Open {given_up} 1,2") == [f"t1 <- Attach {given_up} 1,2"]


def test_new_weights_restore_the_session_limit():
    drafter = opened("a", "b", "c")
    refusal, _ = overtaken(drafter, "a", "b", "c")
    given_up = refusal.split()[3]
    drafter.do("exchange 1")
    assert drafter.do(f"router#1: Open {given_up} 1,2") == [f"t1 <- Attach {given_up} 1,2"]


def test_a_session_without_requested_drafts_is_not_given_up_for_others():
    """A session without requests takes no drafting time."""
    drafter = opened("resting", "b", "c")
    for session, tokens in (("resting", 0), ("b", 4), ("c", 4)):
        drafter.do(f"t1: DraftRequest {session} 1,2 max_tokens={tokens}")
    refusal, _ = overtaken(drafter, "b", "c")
    assert refusal.split()[2:4] in (["Refusal", "b"], ["Refusal", "c"])


def test_a_session_served_by_a_block_ahead_is_not_the_longest_unserved():
    drafter = Drafter(draft_ahead=True)
    drafter.run("""
        router#1: Open a 1,2 max_len=90 -> t1 <- Attach a 1,2
        router#1: Open b 1,2 max_len=90 -> t1 <- Attach b 1,2
        draft
            a 1,2 max_tokens=4
            b 1,2 max_tokens=4
        block a 1,2 :3 -> t1 <- Block a 1,2 :3
        block b 1,2 :3 -> t1 <- Block b 1,2 :3
        ahead
            a 1,2 unverified=3
            b 1,2 unverified=3
        block a 1,2,3,4 :5 outcome=3,4 -> t1 <- Block a 1,2,3,4 :5
        t1: Step a 1,2 +3,4
        # Both lack a block now.
        t1: Step a 1,2,3,4 +7
        t1: Step b 1,2 +7
        draft
            b 1,2,7 max_tokens=4
            a 1,2,3,4,7 max_tokens=4
    """)


def test_a_drafter_that_made_no_blocks_for_long_gives_up_no_session():
    """Only drafted blocks that arrived late count."""
    drafter = opened("a", "b")
    text = "1,2"
    for _ in range(ENOUGH_ROUNDS):
        for session in "ab":
            assert drafter.do(f"t1: Step {session} {text} +1 answer=missed") == []
        text += ",1"
    assert drafter.do("show sessions") == ["sessions=2"]


def test_blocks_that_were_sent_and_came_too_late_count_too():
    drafter = opened("a", "b")
    texts = dict.fromkeys("ab", "1,2")
    answers: list[str] = []
    for _ in range(ENOUGH_ROUNDS):
        for session, text in [request.split()[:2] for request in drafter.do("draft")]:
            drafter.do(f"block {session} {text} :5")
            answers += drafter.do(f"t1: Step {session} {texts[session]} +1 answer=missed")
            texts[session] += ",1"
        if answers:
            break
    assert [answer.split()[2] for answer in answers] == ["Refusal", "Detach"]


@pytest.mark.parametrize(
    ("token", "confidence", "shown"),
    [
        (7, "confidence=0.8", "checked=3 correct=3"),
        (8, "confidence=0.8", "checked=3 correct=0"),
        (8, "", "checked=0 correct=0"),
    ],
    ids=["right", "wrong", "a method without confidence is not checked"],
)
def test_verdicts_check_the_first_tokens_of_blocks(token, confidence, shown):
    drafter = Drafter()
    drafter.do("router#1: Open s 1,2")
    drafter.do("t1: DraftRequest s 1,2 max_tokens=2")
    text = "1,2"
    for _ in range(3):
        drafter.do("draft")
        drafter.do(f"block s {text} :{token},9 {confidence}")
        drafter.do(f"t1: Step s {text} +7")
        text += ",7"
    assert drafter.do("show checked correct") == [shown]


FULL = '"this drafter is full, and another model has fewer sessions"'


def test_a_full_drafter_divides_its_sessions_evenly_among_models():
    """A new session replaces one of the model with the most sessions until both models have equally many."""
    drafter = Drafter()
    for session in range(LIMITS.max_sessions):
        drafter.do(f"router#1: Open s{session} 1,2 model=large")
    for session in range(LIMITS.max_sessions // 2):
        drafter.run(f"""
            router#2: Open t{session} 1,2 model=small target_address=t2
                router#1 <- Refusal s{session} attempt=1 overloaded {FULL}
                t1 <- Detach s{session}
                t2 <- Attach t{session} 1,2
        """)
    full = f'"this drafter is full with {LIMITS.max_sessions} sessions"'
    drafter.run(f"""
        router#2: Open more 1,2 model=small -> router#2 <- Refusal more attempt=1 overloaded {full}
        router#1: Open more 1,2 model=large -> router#1 <- Refusal more attempt=1 overloaded {full}
        router#1: Open long 1,2 model=third max_len=999
            router#1 <- Refusal long attempt=1 invalid "max_len is 999, expected at most 100, the drafter's context"
    """)


def test_sessions_are_given_up_by_the_model_with_the_most():
    drafter = Drafter()
    for session in ("a", "b", "c", "d"):
        drafter.do(f"router#1: Open {session} 1,2 max_len=90 model={'small' if session == 'a' else 'large'}")
    refusal, _ = overtaken(drafter, "a", "b", "c", "d")
    assert refusal.split()[3] in ("b", "c", "d")


def test_a_session_at_another_models_target_is_refused():
    known = {"large": frozenset({"t1"}), "small": frozenset({"t2"})}
    drafter = Drafter(known_targets=lambda model: known.get(model, frozenset()))
    why = '"target_address is not known yet; retry"'
    drafter.run(f"""
        router#1: Open a 1,2 model=large -> t1 <- Attach a 1,2
        router#2: Open b 1,2 model=small -> router#2 <- Refusal b attempt=1 overloaded {why}
        router#2: Open b 1,2 model=other target_address=t2 -> router#2 <- Refusal b attempt=1 overloaded {why}
        router#2: Open b 1,2 model=small target_address=t2 -> t2 <- Attach b 1,2
    """)
