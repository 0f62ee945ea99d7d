"""The path of a prompt: which functions of the package the second ``generate`` of an engine meets.

``python tests/house/trace_path.py`` prints them in the order in which they are first called, with
the number of their calls, grouped where the path changes the file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import minikv

PACKAGE = Path(minikv.__file__).resolve().parent
PROMPT = list(b"Thirteen toks")  # "tiny" reads bytes


def trace(function: Any, *args: Any) -> dict[CodeType, int]:
    """Named functions of the package that a call meets, in order, and how often each is called.

    Comprehensions, generator expressions and lambdas are no functions with a name.
    """
    met: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")
        if inside and event == "call":
            met[code] = met.get(code, 0) + 1

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return met


def path_of_a_prompt() -> dict[CodeType, int]:
    """The second call of a warm engine on the CPU: a prompt of 13 tokens, two new ones."""
    llm = minikv.LLM("tiny", device="cpu", progress=False)
    params = minikv.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    llm.generate(PROMPT, params)
    return trace(llm.generate, PROMPT, params)


def file_of(code: CodeType) -> str:
    """The file of a function, as it is named inside the package."""
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def name_of(code: CodeType) -> str:
    """The function's name in its class: ``LLM.generate``."""
    return code.co_qualname


def main() -> None:
    """Print the path."""
    met = path_of_a_prompt()
    last = ""
    for code, calls in met.items():
        if file_of(code) != last:
            last = file_of(code)
            print(last)
        print(f"  {calls:4}  {name_of(code)}")
    files = {file_of(code) for code in met}
    print(f"{len(met)} functions, {sum(met.values())} calls, {len(files)} files")
    for file in sorted(files):
        print(f"  {sum(file_of(code) == file for code in met):4}  {file}")


if __name__ == "__main__":
    main()
