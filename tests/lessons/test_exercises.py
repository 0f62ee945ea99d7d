"""Every exercise: the stub fails, the solution passes, each known wrong answer is rejected and its
cause named."""

from __future__ import annotations

import pytest

from minikv.lessons import check, exercises
from minikv.lessons.engine import describe_call, mistakes, solution

ALL = exercises()


@pytest.mark.parametrize("task", ALL, ids=lambda t: t.id)
class TestExercise:
    def test_stub_fails(self, task) -> None:
        def stub(*args):
            raise NotImplementedError

        verdict = check(task.id, stub, quiet=True)
        assert not verdict
        assert "not written yet" in verdict.message

    def test_solution_passes(self, task) -> None:
        verdict = check(task.id, solution(task), quiet=True)
        assert verdict, verdict.message

    def test_wrong_answers_are_named(self, task) -> None:
        known = mistakes(task)
        assert len(known) >= 3
        for mistake in known:
            verdict = check(task.id, mistake.function, quiet=True)
            assert not verdict, f"{mistake.function.__name__} passes"
            assert mistake.cause in verdict.message, (
                f"{mistake.function.__name__}: {verdict.message}"
            )

    def test_has_what_a_learner_needs(self, task) -> None:
        assert task.statement
        assert len(task.hints) == 3
        assert task.id in {t.id for t in exercises(task.id[:2])}

    def test_endless_loop_ends(self, task) -> None:
        def endless(*args):
            while True:
                pass

        verdict = check(task.id, endless, quiet=True)
        assert not verdict
        assert "never end" in verdict.message


def test_a_failing_case_is_shown_whole_up_to_400_characters() -> None:
    task = next(t for t in ALL if t.id == "06-insert-split")
    for case in task.cases():
        words, whole = describe_call(task, case), sum(len(repr(arg)) for arg in case.args)
        assert len(words) <= 400
        assert ("..." in words) == (whole + len("root=, tokens=, slots=") > 400)
