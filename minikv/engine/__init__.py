"""Floor 7: from prompts to tokens. Requests wait, are put into batches, run, are sampled, and their
text streams out.

Read in this order: ``params``, ``request`` and ``batch`` (what travels); ``policy`` and
``scheduler`` (what runs next); ``step`` (what a step computes), ``sampling`` and ``sampler`` (which
token), ``grammar`` (which tokens may come); ``text`` (prompts to tokens, tokens to text); ``loop``
(one step after the other, one caller at a time); ``llm`` (what callers see); ``events`` (what can
be measured). Beside them: ``options`` (what an engine is built with), ``tokens`` and ``cuts``
(kernels of the choice).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minikv.engine.batch import Batch
from minikv.engine.events import EventLog, Stats
from minikv.engine.params import SamplingParams
from minikv.engine.request import Delta, Output, Request, State, Timing, TokenLogprob
from minikv.engine.scheduler import Scheduler
from minikv.engine.text import TextStream

if TYPE_CHECKING:
    from minikv.engine.llm import LLM
    from minikv.engine.sampler import Sampler

__all__ = [
    "LLM",
    "Batch",
    "Delta",
    "EventLog",
    "Output",
    "Request",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "State",
    "Stats",
    "TextStream",
    "Timing",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Sampler"):  # on first use: the scheduler needs neither models nor kernels
        return getattr(import_module(f"minikv.engine.{name.lower()}"), name)
    raise AttributeError(f"module 'minikv.engine' has no attribute {name!r}")
