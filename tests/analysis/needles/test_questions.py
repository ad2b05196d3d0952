"""Questions: of the given length, with the answers in the text at their depths, and the same for a seed."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.needles.questions import DEPTHS, TASKS, Haystack, Question, make_questions, score

COUNTS = {
    "bytes": lambda text: len(text.encode()),
    "words": lambda text: len(text.split()),
    "pairs of letters": lambda text: -(-len(text) // 2),
    "pieces": lambda text: len(re.findall(r" ?[A-Za-z]{1,4}|\s|\d{1,3}|.", text)),
}
ESSAYS = Haystack(tuple(re.findall(r"\S+ ", "To be, or not to be. That is the question! Whether it is. ")), " ")
HAYSTACKS = {"noise": Haystack.noise(), "essays": ESSAYS}


def ask(name: str, length: int, seed: int = 0, counts: str = "bytes", haystack: str = "noise") -> Question:
    (question,) = make_questions([name], [length], 1, HAYSTACKS[haystack], COUNTS[counts], [0.5], seed)
    return question


@settings(max_examples=60)
@given(st.sampled_from(sorted(TASKS)), st.integers(9_400, 60_000), st.integers(0, 2**40), st.data())
def test_a_text_has_the_given_length_and_no_more_filler_would_fit(
    name: str, length: int, seed: int, data: st.DataObject
) -> None:
    counts, haystack = data.draw(st.sampled_from(sorted(COUNTS))), data.draw(st.sampled_from(sorted(HAYSTACKS)))
    question = ask(name, length, seed, counts, haystack)
    total = question.prompt_tokens + question.answer_tokens
    assert question.prompt_tokens == COUNTS[counts](question.prompt) and question.length == length
    # One more unit is a word of the haystack, three words of a numbered list, or all words whose counts round up.
    most = {"common_words": 3 * 45, "frequent_words": 7 * 40}.get(name, 12)
    assert length - most <= total <= length
    assert question.answer_tokens >= 2 * COUNTS[counts](", ".join(question.answers))
    assert ask(name, length, seed, counts, haystack) == question
    assert ask(name, length, seed + 1, counts, haystack).answers != question.answers


@settings(max_examples=40)
@given(st.sampled_from([name for name in TASKS if "n" in name[:1]]), st.integers(2_000, 9_000), st.integers(0, 99))
def test_needles_are_hidden_once_and_asked_for(name: str, length: int, seed: int) -> None:
    question = ask(name, length, seed)
    text, query = question.prompt.rsplit("What", 1)
    needles = re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", text)
    count = {"niah_multikey": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    assert len(needles) == len({number for _, number in needles}) == count
    assert len({key for key, _ in needles}) == (count if name != "niah_multivalue" else 1)
    assert {number for key, number in needles if key in query} == set(question.answers)
    assert (question.depth is not None) == (len(question.answers) == 1)
    assert ("A special magic number is" if len(question.answers) == 1 else "Some special magic numbers are") in text
    assert question.prompt.endswith(" is" if len(question.answers) == 1 else " are")


@given(st.sampled_from(DEPTHS), st.sampled_from(sorted(HAYSTACKS)))
def test_a_needle_is_at_its_depth_and_before_a_sentence(depth: float, haystack: str) -> None:
    (question,) = make_questions(["needle"], [6_000], 1, HAYSTACKS[haystack], COUNTS["bytes"], [depth])
    text = question.prompt.split("afterwards.\n")[1].rsplit("\nWhat", 1)[0]
    before = text.partition("One of")[0]
    assert question.depth == depth and abs(len(before) / len(text) - depth) < 0.03
    assert not before or before.rstrip()[-1] in ".!?"


def test_a_chain_of_variables_is_assigned_in_order() -> None:
    question = ask("variable_tracking", 6_000, 3)
    assert score(question, " ".join(question.answers).lower()).share == 1.0
    example, _, text = question.prompt.partition("\n\nMemorize")
    assert example.count("VAR") == 9 and all(example.endswith(name) for name in [example[-3:]])
    value = re.search(r"assigned the value (\d{5}), they are: $", question.prompt)
    assert value is not None
    assignments = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text)
    assert [name for name, _ in assignments] == list(question.answers)
    assert [before for _, before in assignments] == [value[1], *question.answers[:-1]]


@given(st.integers(3_000, 30_000), st.integers(0, 99))
def test_common_words_are_the_most_common(length: int, seed: int) -> None:
    if 4096 <= length < 9_400:
        return
    question = ask("common_words", length, seed)
    listed = re.findall(r"\d+\. (\S+)", question.prompt.rpartition("Below is")[2])
    times = Counter(listed)
    common, other = (6, 1) if length < 4096 else (30, 3)
    assert len(question.answers) == 10
    assert {word for word, count in times.items() if count == common} == set(question.answers)
    assert all(count == other for word, count in times.items() if word not in question.answers)


@given(st.integers(2_000, 30_000), st.integers(0, 99))
def test_frequent_words_are_the_three_most_frequent(length: int, seed: int) -> None:
    question = ask("frequent_words", length, seed)
    coded = question.prompt.split("coded words. ")[1].split("\nQuestion")[0].split(" ")
    ranked = [word for word, _ in Counter(coded).most_common(5)]
    assert ranked[0] == "..." and tuple(ranked[1:4]) == question.answers
    assert Counter(coded)[ranked[3]] > Counter(coded)[ranked[4]]


def test_lengths_without_room_are_refused_with_the_limit() -> None:
    for name in TASKS:
        with pytest.raises(ValueError, match=rf"lengths=100: expected at least (\d+) tokens for {name}") as error:
            ask(name, 100)
        found = re.search(r"least (\d+)", str(error.value))
        assert found is not None
        if name != "common_words":  # that length selects its longer form
            assert ask(name, int(found[1]) + 99).answers  # other random words may be longer
    with pytest.raises(ValueError, match=r"expected at most \d+ tokens for common_words. It has no more words"):
        ask("common_words", 10**7)


def test_a_chat_format_counts_towards_the_length() -> None:
    (question,) = make_questions(
        *(["needle"], [2_000], 1, Haystack.noise(), COUNTS["bytes"], [0.0]),
        prompt=lambda text, opening: f"<user>{text}<model>{opening.lstrip()}",
    )
    assert question.prompt.startswith("<user>A special") and "?<model>The special magic" in question.prompt
    assert 1_990 < question.prompt_tokens + question.answer_tokens <= 2_000


def test_essays_are_the_texts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("The\n end.")
    (tmp_path / "a.txt").write_text("A  beginning. ")
    assert Haystack.essays(tmp_path).text(6) == "A beginning. The end. A beginning."
    (tmp_path / "c.txt").write_bytes(b"\xff")
    for folder, message in ((tmp_path, "UTF-8 text"), (tmp_path / "none", "a folder with .txt files")):
        with pytest.raises(ValueError, match=f"haystack=.*: expected {message}"):
            Haystack.essays(folder)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(" ")
    with pytest.raises(ValueError, match="expected text in its"):
        Haystack.essays(tmp_path)
