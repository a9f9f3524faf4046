"""The command line: build kernels ahead, look at them and at the cache, find what is missing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from . import __version__, _env
from ._jit import cache as kernel_cache
from ._jit.build import build
from ._jit.compile import Program
from ._jit.kernel import fetch
from .errors import FlashSkipError
from .variant import DOMAINS, Variant, every, matrix

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv
        The arguments; default: the process's.

    Returns
    -------
    int
        0 if all went well, 1 if not, 2 if the arguments are wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        _env.configure_logging()
        if argv[:1] == ["demo"]:  # these two have options of their own
            from .integrations import demo

            return demo.main(argv[1:])
        if argv[:1] == ["calibrate"]:
            from . import calibration

            return calibration.main(argv[1:])
        args = _parser().parse_args(argv)
        return int(args.command(args))
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FlashSkipError, ValueError, OSError) as error:
        print(f"flashskip: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashskip", description=__doc__)
    parser.add_argument("--version", action="version", version=f"flashskip {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_warmup(commands)
    _add_cache(commands)

    variants = commands.add_parser("variants", help="list the kernels that can be built")
    variants.add_argument("--matrix", action="store_true", help="only those that the tests build")
    variants.set_defaults(command=_variants)

    show = commands.add_parser("show", help="print a kernel's source and the compiler's report")
    show.add_argument("variant", metavar="VARIANT", help="a symbol that `flashskip variants` lists")
    show.set_defaults(command=_show)

    doctor = commands.add_parser("doctor", help="say what is missing on this machine")
    doctor.set_defaults(command=_doctor)
    commands.add_parser("demo", help="a language model answers through flashskip")
    commands.add_parser("calibrate", help="measure a model on texts; thresholds for a sparsity")
    return parser


def _add_warmup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ._models import PRESETS

    warmup = commands.add_parser(
        "warmup",
        help="build kernels ahead; no GPU needed",
        description="Build every kernel that the models given can reach, and those of the "
        "manifests. With none of them: the whole matrix that the tests run.",
    )
    archs = sorted({str(arch) for domain in DOMAINS.values() for arch in domain["arch"]})
    warmup.add_argument("--arch", choices=archs, default=archs[0], help="default: %(default)s")
    warmup.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        help="config.json of a causal language model from Hugging Face",
    )
    warmup.add_argument("--preset", choices=sorted(PRESETS), action="append", default=[])
    warmup.add_argument(
        "--fp8-cache",
        action="store_true",
        help="also what the models reach in decode on an FP8 cache",
    )
    warmup.add_argument(
        "--manifest",
        type=Path,
        action="append",
        default=[],
        help="a file that FLASHSKIP_MANIFEST recorded",
    )
    cores = len(os.sched_getaffinity(0))
    warmup.add_argument(
        "--jobs", type=_positive, default=cores, help="kernels at a time; default: %(default)s"
    )
    warmup.add_argument(
        "--out", type=Path, default=None, help="directory; default: the cache itself"
    )
    warmup.set_defaults(command=_warmup)


def _add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = commands.add_parser("cache", help="look after compiled kernels")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    for name, command, text in (
        ("info", _cache_info, "where they are, how many and how large"),
        ("verify", _cache_verify, "check every entry; exit status 1 if one is damaged"),
        ("prune", _cache_prune, "remove the longest unused ones beyond a size"),
        ("clear", _cache_clear, "remove all"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("--dir", type=Path, help="default: the cache of this user")
        if name == "prune":
            action.add_argument("--max-mb", type=_positive, help="default: FLASHSKIP_CACHE_MAX_MB")
        action.set_defaults(command=command)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number, 1 or more")
    return int(text)


def _warmup(args: argparse.Namespace) -> int:
    variants = _wanted(args)
    directory = _directory(args.out)
    if directory.exists() and not directory.is_dir():
        raise _no_directory("--out", args.out, directory)
    programs, broken = _render(variants)
    print(f"{len(variants)} kernels for {args.arch} into {directory}")
    if args.out is None:
        kernel_cache.make_private(directory)
    outcome = build(programs, directory, jobs=args.jobs)
    failed = [*broken, *outcome.failed]
    print(f"{len(outcome.built)} built, {len(outcome.present)} there before, {len(failed)} failed")
    for symbol in failed:
        print(f"flashskip: failed: {symbol}", file=sys.stderr)
    return int(bool(failed))


def _wanted(args: argparse.Namespace) -> list[Variant]:
    """Collect the Variants that a warmup's arguments name, each once."""
    from ._models import PRESETS, read_config, read_manifest

    models = {str(path): _read("--config", path, read_config) for path in args.config}
    models |= {preset: PRESETS[preset] for preset in args.preset}
    if args.fp8_cache and not models:
        raise ValueError(
            "--fp8-cache is given without a model, where it has no effect; expected it with "
            "--config or --preset. Drop it, or name a model."
        )
    variants = []
    for name, model in models.items():
        try:
            variants += model.variants(args.arch, fp8_cache=args.fp8_cache)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for path in args.manifest:
        recorded = _read("--manifest", path, read_manifest)
        variants += [v for v in recorded if v.arch == args.arch]
    if not (args.config or args.preset or args.manifest):
        variants = [v for v in matrix() if v.arch == args.arch]
    return list(dict.fromkeys(variants))


def _read(option: str, path: Path, reader: Callable[[Path], T]) -> T:
    """Read a file that an option names."""
    try:
        return reader(path)
    except OSError as error:
        raise ValueError(
            f"{option} is {path}, which cannot be read ({error.strerror}); expected a file. Check "
            "the path"
        ) from error


def _render(variants: Sequence[Variant]) -> tuple[list[Program], list[str]]:
    """Return the programs, and the symbols of those that cannot be rendered."""
    from . import _kernels

    programs, broken = [], []
    for v in variants:
        try:
            programs.append(_kernels.program_for(v))
        except Exception as error:  # whatever is wrong with one template, the others go on
            print(f"flashskip: {v.symbol}: {type(error).__name__}: {error}", file=sys.stderr)
            broken.append(v.symbol)
    return programs, broken


def _variants(args: argparse.Namespace) -> int:
    for v in matrix() if args.matrix else every():
        print(v.symbol)
    return 0


def _show(args: argparse.Namespace) -> int:
    from . import _kernels

    program = _kernels.program_for(Variant.from_symbol(args.variant))
    compiled = fetch(program, _env.kernel_cache())
    print(f"// {program.symbol}")
    print(f"// {program.arch}, {program.block} threads, {compiled.registers} registers per thread")
    print(f"// spills: {compiled.spill_stores} bytes stored, {compiled.spill_loads} loaded")
    print(f"// dynamic shared memory: {program.shared_bytes} bytes; cubin: {len(compiled.cubin)}")
    print(f"// headers: {', '.join(name for name, _ in program.source.headers) or 'none'}")
    print(program.source.text)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from . import _doctor

    return _doctor.main()


def _directory(chosen: Path | None) -> Path:
    directory = chosen or _env.cache_dir()
    if directory is None:
        raise ValueError(
            "there is no cache directory, because this user has no home; set FLASHSKIP_CACHE_DIR "
            "or name a directory"
        )
    return directory.absolute()


def _existing(chosen: Path | None) -> Path:
    """Return the directory to look after; a misspelt one, or a file, is no empty cache."""
    directory = _directory(chosen)
    if not directory.is_dir() and (chosen is not None or directory.exists()):
        raise _no_directory("--dir", chosen, directory)
    return directory


def _no_directory(option: str, chosen: Path | None, directory: Path) -> ValueError:
    name = "the cache directory (FLASHSKIP_CACHE_DIR)" if chosen is None else option
    return ValueError(
        f"{name} is {directory}, which is no directory; expected one for kernels. Check the path"
    )


def _cache_info(args: argparse.Namespace) -> int:
    directory = _directory(args.dir)
    listed = kernel_cache.entries(directory)
    megabytes = sum(entry.size for entry in listed) / 2**20
    if directory.is_dir():
        state = ""
    else:
        state = " (no directory)" if directory.exists() else " (not there yet)"
    print(f"directory  {directory}{state}")
    print(f"kernels    {len(listed)}, {megabytes:.1f} MB of {_env.cache_max_bytes() >> 20} MB")
    for seed in _env.cache_seeds():
        print(f"seed       {seed}, {len(kernel_cache.entries(seed))} kernels")
    return 0


def _cache_verify(args: argparse.Namespace) -> int:
    directory = _existing(args.dir)
    damaged = kernel_cache.verify(directory)
    for _, problem in damaged:
        print(f"damaged: {problem}")
    print(f"{len(kernel_cache.entries(directory))} kernels in {directory}, {len(damaged)} damaged")
    return int(bool(damaged))


def _cache_prune(args: argparse.Namespace) -> int:
    max_bytes = args.max_mb << 20 if args.max_mb else _env.cache_max_bytes()
    removed = kernel_cache.prune(_existing(args.dir), max_bytes)
    print(f"{len(removed)} kernels removed")
    return 0


def _cache_clear(args: argparse.Namespace) -> int:
    print(f"{kernel_cache.clear(_existing(args.dir))} files removed")
    return 0
