"""Compile kernels for real GPUs on a machine without one, and tell their shared memory, registers
and spills.

The interpreter accepts programs that the GPU compiler refuses, so every kernel is also compiled,
each in the options that it is used with. This file is a script because Triton decides once per
process whether it interprets or compiles::

    python tests/compile_check.py [ROOM ...] [--arch 90] [--match TEXT]  # a JSON line per kernel

and :func:`compile_cases` runs it from a test. A room adds its kernels in
``tests/compile_cases/<room>.py`` as ``def cases() -> list[Case]``. Shared memory comes from
Triton's metadata, registers and spills from its ``ptxas -v``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED_LIMIT = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
}  # bytes one program may use


@dataclass(frozen=True)
class Case:
    """One kernel with the types and options it is compiled with.

    Parameters
    ----------
    name
        Shown in the report, unique in its room.
    kernel
        ``"package.module:kernel"``.
    signature
        Type of every parameter that is not a constexpr, in any order: ``"*fp16"``, ``"*i64"``,
        ``"i32"``, ``"fp32"``.
    constexprs
        Value of every constexpr parameter.
    aligned
        Parameters (pointers, strides) that the launcher knows to be multiples of 16.
    archs
        Compute capabilities, as 90 for sm90.
    max_spill_bytes
        More spilled bytes than this is a failure.
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    archs: tuple[int, ...] = (80, 90)
    num_warps: int = 4
    num_stages: int = 3
    max_spill_bytes: int = 0


def compile_cases(
    *rooms: str, arch: int | None = None, match: str = "", timeout: float = 240
) -> list[dict[str, Any]]:
    """Compile the cases of `rooms` in a process of its own and return one report per (case, arch).

    Raises
    ------
    AssertionError
        With the compiler's message when a case fails, spills or needs more shared memory than its
        chip has.
    """
    command = [sys.executable, str(HERE / "compile_check.py"), *rooms, "--match", match]
    if arch is not None:
        command += ["--arch", str(arch)]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _compile(case: Case, arch: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    names = kernel.arg_names
    missing = set(names) - set(case.signature) - set(case.constexprs)
    unknown = (set(case.signature) | set(case.constexprs) | set(case.aligned)) - set(names)
    assert not missing | unknown, (
        f"{case.name}: parameters without a type {missing}, unknown {unknown}"
    )
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in case.constexprs else case.signature[n] for n in names},
        constexprs={(names.index(n),): value for n, value in case.constexprs.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned},
    )
    started = time.perf_counter()
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    seconds = time.perf_counter() - started
    registers, spills = _ptxas(compiled.asm["ptx"])
    shared = compiled.metadata.shared
    assert shared <= SHARED_LIMIT.get(arch, 99 << 10), (
        f"{case.name}: {shared} bytes of shared memory on sm{arch}"
    )
    assert spills <= case.max_spill_bytes, f"{case.name}: spills {spills} bytes on sm{arch}"
    return {
        "name": case.name,
        "arch": arch,
        "shared": shared,
        "registers": registers,
        "spill_bytes": spills,
        "seconds": round(seconds, 2),
    }


def _ptxas(ptx: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, as Triton's bundled assembler reports them."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    target = re.search(r"^\.target (\S+?)[,\s]", ptx, re.MULTILINE)
    assert target, "no .target in the PTX"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(program),
            "-v",
            f"--gpu-name={target[1]}",
            str(source),
            "-o",
            str(Path(folder) / "kernel.cubin"),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", told)]
    return max(registers, default=0), sum(spills)


def _main() -> int:
    parser = argparse.ArgumentParser(description="compile kernels without a GPU")
    parser.add_argument("rooms", nargs="*", help="modules of tests/compile_cases (default: all)")
    parser.add_argument(
        "--arch", type=int, default=None, help="only this compute capability, as 90"
    )
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    options = parser.parse_args()
    rooms = options.rooms or sorted(p.stem for p in (HERE / "compile_cases").glob("[!_]*.py"))
    failed = 0
    for room in rooms:
        for case in importlib.import_module(f"compile_cases.{room}").cases():
            for arch in case.archs:
                if options.match not in case.name or options.arch not in (None, arch):
                    continue
                try:
                    print(json.dumps({"room": room, **_compile(case, arch)}), flush=True)
                except Exception as e:
                    failed += 1
                    print(
                        f"FAILED {room}: {case.name} on sm{arch}: {type(e).__name__}: {e}",
                        flush=True,
                    )
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "1") != "0":  # start again in compiling mode
        os.environ["TRITON_INTERPRET"] = "0"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        )
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.path.insert(0, str(HERE.parent))
    sys.exit(_main())
