"""The command line: ``minikv doctor | tour | lab | bench | check | model``."""

from __future__ import annotations

import argparse
import sys

from minikv.errors import Error


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors that minikv raises on purpose become one line and exit code 2."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _COMMANDS[options.command](options, rest)
    except Error as e:
        print(f"minikv {options.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minikv", description="How an LLM server's KV cache works, by running it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor", help="what this machine has, and the command that repairs each lack"
    )
    tour = commands.add_parser(
        "tour", help="run the notebooks and write them as HTML pages with an index"
    )
    tour.add_argument("--only", metavar="00,04", help="numbers of the notebooks (default: all)")
    tour.add_argument(
        "--out",
        metavar="DIR",
        default="minikv-tour",
        help="folder for the pages (default: %(default)s)",
    )
    commands.add_parser(
        "lab", help="open JupyterLab on the notebooks; further arguments go to jupyter lab"
    )
    bench = commands.add_parser(
        "bench", help="measure this machine: our pieces beside peers and the physical limit"
    )
    bench.add_argument(
        "names", nargs="*", metavar="NAME", help="what to measure (default: list the names)"
    )
    bench.add_argument(
        "--out", metavar="DIR", default=None, help="folder for JSON results (default: print only)"
    )
    bench.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    bench.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    check = commands.add_parser(
        "check", help="grade the exercises of a notebook in a fresh process"
    )
    check.add_argument("notebook", metavar="NOTEBOOK", help="path of the .ipynb file")
    check.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    model = commands.add_parser("model", help="the SmolLM2-135M model file")
    model.add_argument("action", choices=["status", "fetch", "path"], nargs="?", default="status")
    return parser


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.device import doctor

    return 0 if doctor().ok else 1


def _tour(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.tour import tour

    return 1 if any(stop.error for stop in tour(options.only, options.out)) else 0


def _lab(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.tour import lab

    return lab(rest)


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.measure import suite

    if not options.names:
        print(f"minikv bench NAME ... measures one or more of these:\n{suite.listing()}")
        return 0
    suite.run(options.names, out_dir=options.out, quick=options.quick, device=options.device)
    return 0


def _check(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.lessons.grade import main

    return main(options.notebook, as_json=options.json)


def _model(options: argparse.Namespace, rest: list[str]) -> int:
    from minikv.models.files.download import model_path, model_status

    if options.action == "status":
        print(model_status())
    else:
        print(model_path(fetch=options.action == "fetch"))
    return 0


_COMMANDS = {
    "doctor": _doctor,
    "tour": _tour,
    "lab": _lab,
    "bench": _bench,
    "check": _check,
    "model": _model,
}

if __name__ == "__main__":
    sys.exit(main())
