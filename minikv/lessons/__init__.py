"""Exercises that check themselves: ``check("04-alloc-extend", my_function)`` says whether, and
where not, it is right.

The learner's own function is what is tested, never the package. Each notebook's exercises stand in
one module (``nb04.py``); their solutions and known wrong answers stand apart in ``answers/``, out
of a learner's first sight.
"""

from __future__ import annotations

from minikv.lessons.engine import Case, Exercise, Verdict, check, exercise, exercises

__all__ = ["Case", "Exercise", "Verdict", "check", "exercise", "exercises"]
