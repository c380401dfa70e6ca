import pytest

from polar.demo.questions import RESERVED_NAMES, Question, make_questions


def followed(question: Question) -> list[str]:
    """The names that are looked up, and then the number."""
    seen = [question.name]
    while (said := question.book[seen[-1]]).startswith("see "):
        seen.append(said.removeprefix("see "))
    return [*seen, said]


@pytest.mark.parametrize(("hops", "digits"), [(1, 2), (3, 4)])
def test_a_book_leads_to_the_answer(hops: int, digits: int) -> None:
    asked = make_questions(train=20, held_out=10, seed=0, hops=hops, digits=digits)
    for question in asked.train + asked.held_out:
        *names, number = followed(question)
        assert (len(names), number, len(number)) == (hops, question.answer, digits)
        assert list(question.book.values()).count(number) >= 1
        assert len(question.book) > hops  # others are there as well


def test_held_out_names_and_answers_are_in_no_question_to_train_on() -> None:
    asked = make_questions(train=100, held_out=40, seed=3)
    train = {name for question in asked.train for name in question.book}
    held_out = {name for question in asked.held_out for name in question.book}
    assert not train & held_out
    assert not {question.answer for question in asked.train} & {question.answer for question in asked.held_out}
    assert len(train) == sum(len(question.book) for question in asked.train)  # a name is in one book only


def test_nothing_of_the_agents_example_is_asked_for() -> None:
    asked = make_questions(train=200, held_out=50, seed=0)
    for question in asked.train + asked.held_out:
        assert not RESERVED_NAMES & {question.name, question.answer, *question.book}


def test_a_seed_gives_the_same_questions_and_another_one_others() -> None:
    assert make_questions(train=3, held_out=2, seed=1) == make_questions(train=3, held_out=2, seed=1)
    assert make_questions(train=3, held_out=2, seed=1) != make_questions(train=3, held_out=2, seed=2)
