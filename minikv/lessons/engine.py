"""The check engine: what an exercise is, and how a learner's function is judged.

A check runs the worked case of the statement first, then a grid of edge cases (0, 1, page-1, page,
page+1), then seeded random cases, each on a fresh copy of its inputs and under a step budget, and
compares with an oracle that does not use the package's own implementation. It stops at the first
failing case and says what differs first.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from minikv.errors import ArgumentError, Error
from minikv.lessons.budget import OutOfSteps, limited
from minikv.lessons.cells import Names
from minikv.lessons.compare import first_difference, plain
from minikv.lessons.picture import draw
from minikv.viz.style import Drawing

NOTEBOOKS = ("00", "01", "02", "03", "04", "05", "06", "07", "08")


@dataclass(frozen=True)
class Case:
    """One call of the learner's function: its arguments, and in words what this case is about."""

    args: tuple[Any, ...]
    why: str = ""
    data: Any = None


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer, and the cause that a check names when a learner's results equal this
    function's."""

    cause: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """One exercise of a notebook.

    Attributes
    ----------
    id
        Such as ``"04-alloc-extend"``: notebook number, then a name.
    title, statement, signature
        What the notebook shows; the statement is Markdown with a tiny worked example.
    worked
        The case of the statement, run first.
    grid
        The edge cases, simplest first.
    random
        Makes one random case from a NumPy generator.
    oracle
        The right result for the case's arguments, computed independently of the package.
    judge
        ``judge(case, expected, got)`` returns None, or in words what is wrong; default: the first
        difference.
    hints
        Three, each saying more than the one before.
    picture
        ``picture(case, expected, got)`` draws the failing state as a ``viz.style.Drawing``; it
        stands above expected and got side by side, or alone when `alone` says so, as it must where
        `oracle` gives no result of the kind asked for. ``parts`` name the parts of a result, level
        by level.
    run
        ``run(function, *args)`` calls the learner's function when it is more than one plain call.
    rounds, steps
        Number of random cases, and lines of the learner's code that one case may execute.
    """

    id: str
    title: str
    statement: str
    signature: str
    worked: Case
    grid: Callable[[], Iterable[Case]]
    random: Callable[[np.random.Generator], Case]
    oracle: Callable[..., Any]
    hints: tuple[str, str, str]
    judge: Callable[[Case, Any, Any], str | None] | None = None
    picture: Callable[[Case, Any, Any], Drawing | None] | None = None
    alone: bool = False
    parts: Names = ()
    run: Callable[..., Any] | None = None
    rounds: int = 50
    steps: int = 100_000

    def cases(self) -> Iterator[Case]:
        """The worked case, the grid and the seeded random cases, in the order in which a check runs
        them."""
        yield self.worked
        yield from self.grid()
        rng = np.random.default_rng(20_260_101)
        for _ in range(self.rounds):
            yield self.random(rng)

    def call(self, function: Callable[..., Any], case: Case) -> Any:
        """What `function` answers for a fresh copy of the case's arguments."""
        args = copy.deepcopy(case.args)
        return self.run(function, *args) if self.run else function(*args)

    def wrong(self, case: Case, expected: Any, got: Any) -> str | None:
        """None when `got` is right, else what is wrong with it."""
        if self.judge is not None:
            return self.judge(case, expected, got)
        return first_difference(expected, got)


@dataclass
class Verdict:
    """What a check found; true when the exercise is solved."""

    exercise: str
    passed: bool
    message: str
    cases: int = 0
    case: Case | None = None
    expected: Any = None
    got: Any = None
    drawing: Drawing | str | None = None
    hints: tuple[str, ...] = field(default=(), repr=False)
    shown: bool = field(default=False, repr=False)

    def __bool__(self) -> bool:
        return self.passed

    def hint(self, number: int = 1) -> None:
        """Print hint `number` (1 to 3; each says more than the one before)."""
        if not self.hints:
            print("no hints here")
        else:
            number = min(max(int(number), 1), len(self.hints))
            print(f"hint {number} of {len(self.hints)}: {self.hints[number - 1]}")

    def __repr__(self) -> str:
        return f"Verdict({self.exercise}: {'solved' if self.passed else 'not yet'})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = {"text/plain": repr(self)}
        if (
            isinstance(self.drawing, Drawing) and not self.shown
        ):  # else it would stand twice under one cell
            bundle["image/svg+xml"] = self.drawing.svg
        return bundle


def exercises(notebook: str | None = None) -> list[Exercise]:
    """All exercises, or those of one notebook such as ``"04"``, in teaching order."""
    found: list[Exercise] = []
    for number in NOTEBOOKS if notebook is None else (notebook,):
        try:
            module = importlib.import_module(f"minikv.lessons.nb{number}")
        except ModuleNotFoundError as e:
            if e.name != f"minikv.lessons.nb{number}":
                raise
            continue
        found.extend(module.EXERCISES)
    return found


def exercise(id: str) -> Exercise:
    """The exercise with this id.

    Raises
    ------
    ArgumentError
        When there is none; the message lists those of the same notebook.
    """
    near = exercises(str(id)[:2]) if str(id)[:2] in NOTEBOOKS else []
    for candidate in near:
        if candidate.id == id:
            return candidate
    names = ", ".join(e.id for e in near or exercises())
    raise ArgumentError("exercise", id, f"there is none of this name; there are {names}")


def check(id: str, function: Callable[..., Any], *, quiet: bool = False) -> Verdict:
    """Judge a learner's function; print the verdict and return it. Never raises, but for an
    interrupt (Ctrl-C).

    Parameters
    ----------
    id
        The exercise, such as ``"04-alloc-extend"``.
    function
        The learner's own function.
    quiet
        Return the verdict without printing it.
    """
    try:
        verdict = _judge(exercise(id), function)
    except Error as e:
        verdict = Verdict(str(id), False, str(e))
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # an id or a function that runs code when it is looked at
        verdict = Verdict(
            id if isinstance(id, str) else "?", False, f"cannot be judged ({type(e).__name__})"
        )
    verdict.message = verdict.message.encode(
        errors="backslashreplace"
    ).decode()  # half characters cannot be printed
    if not quiet:
        print(f"{'solved' if verdict.passed else 'not yet'}: {verdict.exercise}: {verdict.message}")
        if verdict.hints and not verdict.passed:
            print("stuck? verdict.hint(1), then verdict.hint(2) and verdict.hint(3)")
        if verdict.drawing is not None:
            verdict.shown = _show(verdict.drawing)
    return verdict


def _show(drawing: Drawing | str) -> bool:
    """Show the picture in a notebook (then true), print its text elsewhere."""
    shell = sys.modules.get("IPython")
    if isinstance(drawing, str) or shell is None or shell.get_ipython() is None:
        print(drawing)
        return False
    shell.display.display(drawing)
    return True


def _judge(task: Exercise, function: Any) -> Verdict:
    def failed(message: str, **more: Any) -> Verdict:
        return Verdict(task.id, False, message, hints=task.hints, **more)

    if not callable(function):
        return failed(
            f"pass your function itself, as in check({task.id!r}, my_function), not "
            f"{type(function).__name__}"
        )
    done = 0
    for case in task.cases():
        expected = task.oracle(*copy.deepcopy(case.args))
        where = "the worked case" if done == 0 else case.why or f"random case {done}"
        shown = f"{where}: {describe_call(task, case)}"
        try:
            got = limited(function, task.steps, partial(task.call, function, case))
        except OutOfSteps:
            return failed(
                f"{shown} ran more than {task.steps:,} lines; does a loop never end?",
                cases=done,
                case=case,
            )
        except NotImplementedError:
            return failed(
                "not written yet: replace the line that raises NotImplementedError",
                cases=done,
                case=case,
            )
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # exit() in an answer must not end the learner's session
            return failed(
                f"{shown} raised {_raised(e)}",
                cases=done,
                case=case,
                expected=expected,
                drawing=draw(task, case, expected, e),
            )
        try:
            problem = task.wrong(case, expected, got)
        except KeyboardInterrupt:
            raise
        # an answer of a shape that no judge foresaw, or that runs code when it is looked at
        except BaseException as e:
            problem = (
                f"the result, a {type(got).__name__}, is not of the kind that is asked for "
                f"({type(e).__name__})"
            )
        if problem:
            cause = _known_cause(task, function)
            message = f"{shown}: {problem}" + (f". This looks like: {cause}" if cause else "")
            return failed(
                message,
                cases=done,
                case=case,
                expected=expected,
                got=got,
                drawing=draw(task, case, expected, got),
            )
        done += 1
    return Verdict(task.id, True, f"{done} cases right", cases=done, hints=task.hints)


def describe_call(task: Exercise, case: Case, limit: int = 400) -> str:
    """The call of a case as a learner would write it: whole when it fits in `limit` characters,
    else shortened."""
    names = list(inspect.signature(_signature_of(task)).parameters)
    values = [repr(plain(value)) for value in case.args]
    parts = ", ".join(map("{}={}".format, names, values))
    if len(parts) <= limit:
        return parts
    each = limit // max(len(values), 1) - max(map(len, names)) - 3
    return ", ".join(
        f"{name}={shorten(value, each)}" for name, value in zip(names, values, strict=False)
    )


def shorten(text: str, limit: int) -> str:
    """`text` cut to at most `limit` characters, the cut marked by dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _signature_of(task: Exercise) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + task.signature.rstrip().rstrip(":") + ": ...",
        scope,
    )
    return next(v for k, v in scope.items() if callable(v) and k != "__builtins__")


def _raised(e: BaseException) -> str:
    last = traceback.extract_tb(e.__traceback__)[-1]
    try:
        text = shorten(str(e), 400)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = "(no message)"
    return f"{type(e).__name__}: {text} (in {last.name}, line {last.lineno})"


def mistakes(task: Exercise) -> list[Mistake]:
    """The known wrong answers of an exercise."""
    answers = importlib.import_module(f"minikv.lessons.answers.nb{task.id[:2]}")
    return list(answers.MISTAKES.get(task.id, ()))


def solution(task: Exercise) -> Callable[..., Any]:
    """The solution of an exercise."""
    answers = importlib.import_module(f"minikv.lessons.answers.nb{task.id[:2]}")
    return answers.SOLUTIONS[task.id]


def _known_cause(task: Exercise, function: Callable[..., Any]) -> str | None:
    """The cause of the known wrong answer whose results the learner's function repeats in every
    case, if any does."""
    suspects = mistakes(task)
    for case in task.cases():
        if len(suspects) == 0:
            return None
        outcome = _outcome(task, function, case)
        suspects = [m for m in suspects if _same(outcome, _outcome(task, m.function, case))]
    return suspects[0].cause if suspects else None


def _outcome(task: Exercise, function: Callable[..., Any], case: Case) -> Any:
    try:
        return limited(function, task.steps, partial(task.call, function, case))
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return f"raised {type(e).__name__}"


def _same(a: Any, b: Any) -> bool:
    try:
        return first_difference(a, b) is None
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False
