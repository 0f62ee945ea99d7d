"""Chats: what callers may pass as messages, and the templates that turn them into a text."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minikv.errors import ArgumentError

Message = dict[str, Any]


def check_messages(messages: list[Message]) -> list[Message]:
    """The messages, fields that are None dropped and text parts joined; raises for anything that is
    not a list of dicts with a role, and for content that is no text."""
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        raise ArgumentError(
            "messages", messages, 'pass a list of {"role": "user", "content": "..."}'
        )
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    return [m | {"content": _text(m["content"])} if "content" in m else m for m in given]


def _text(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            remedy = 'minikv reads text: a string, or parts {"type": "text", "text": "..."}'
            raise ArgumentError("content", kind, remedy)
    return "".join(part["text"] for part in parts)


def compile_template(source: str) -> jinja2.Template:
    """A template in a sandbox, with the helpers that the hub's templates expect to find."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = _tojson
    env.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return env.from_string(source)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is simply
    rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
):
    """Plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
