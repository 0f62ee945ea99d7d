"""Every error minikv raises on purpose: one base class, and messages that name the thing, its value
and the remedy."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors that minikv raises on purpose."""


class ArgumentError(Error, ValueError):
    """An argument that cannot be used.

    Parameters
    ----------
    argument
        Name of the argument as the caller wrote it.
    value
        What was passed; shown with ``repr`` and shortened when long.
    remedy
        One sentence that says what is wrong and what to pass instead.

    Examples
    --------
    >>> raise ArgumentError("page_size", 0, "must be between 1 and 256")
    Traceback (most recent call last):
    ...
    minikv.errors.ArgumentError: page_size=0: must be between 1 and 256
    """

    def __init__(self, argument: str, value: object, remedy: str) -> None:
        self.argument, self.value, self.remedy = argument, value, remedy
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{argument}={shown}: {remedy}")

    def __reduce__(self):
        return type(self), (self.argument, self.value, self.remedy)


class StateError(Error, RuntimeError):
    """An operation that the present state, machine or installation does not allow; the message
    names the remedy."""
