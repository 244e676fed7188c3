"""The verbs: train, sample, check, env.

Each imports its rooms inside the verb, so that `--help` imports no torch and a wrong recipe no diffusers. What a
user did wrong ends with one clear line on stderr and exit code 2; the hazard is that a ValueError of our own making
looks the same, so STRETTO_TRACEBACK=1 shows where any error came from. Everything else keeps its traceback.
"""

import argparse
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from stretto import __version__
from stretto.record.atomic import naming

if TYPE_CHECKING:
    from stretto.config import Config

__all__ = ["main"]

_DESCRIPTION = "Post-train flow and diffusion models with GRPO and never run a forward twice."
_OVERRIDES = "--section.field value ...  overrides any setting of the recipe (stretto train --help lists them)"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (default `sys.argv[1:]`) and return the exit code.

    0 when all went well, 2 for what the user can mend, 128 + n after signal n (130 for Ctrl-C). Where stdout or
    stderr is closed, what would be said there is lost and the work done all the same.
    """
    _open_closed_streams()
    try:
        with _notes_in_one_line():
            try:
                _run(list(sys.argv[1:] if words is None else words))
            except SystemExit:  # --help and --version
                _flush()
                raise
            _flush()
    except (KeyboardInterrupt, ValueError, OSError, ImportError) as error:
        return _exit_code(error)
    return 0


def _flush() -> None:
    with naming(Path("stdout")):
        sys.stdout.flush()


def _open_closed_streams() -> None:
    """Put the null device where stdout or stderr was closed, so that no file of a run gets its number."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            if null != number:
                os.close(null)
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lives as long as the process


@contextlib.contextmanager
def _notes_in_one_line() -> Iterator[None]:
    """Inside, a UserWarning of ours is a line on stderr without a path; others stay as Python shows them."""
    former, home = warnings.showwarning, str(Path(__file__).parent)

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if issubclass(category, UserWarning) and os.path.abspath(filename).startswith(home + os.sep):
            _tell(f"stretto: note: {' '.join(str(message).split())}")
        else:
            former(message, category, filename, lineno, *rest)

    warnings.showwarning = cast(Any, show)
    try:
        yield
    finally:
        warnings.showwarning = former


def _run(words: list[str]) -> None:
    words, overrides = _split(words)
    arguments = _parser().parse_args(words)
    if overrides and arguments.verb not in ("train", "check"):
        raise ValueError(f"{overrides[0]}: stretto {arguments.verb} takes no settings")
    match arguments.verb:
        case "train":
            _train(arguments, overrides)
        case "sample":
            _sample(arguments)
        case "check":
            _check(arguments, overrides)
        case "env":
            _env(arguments)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.resume is not None:
        overrides = [*overrides, "--run.resume", arguments.resume]
    config = _load(arguments.recipe, overrides)
    from stretto.train import train

    try:
        train(config)
    except KeyboardInterrupt as stop:
        from stretto.record.checkpoint import newest

        goes_on = "a run goes on with --resume auto"
        none_yet = "there is no checkpoint yet, so the run begins anew with --resume auto"
        stop.add_note(goes_on if newest(Path(config.run.folder) / "checkpoints") else none_yet)
        raise


def _check(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = _load(arguments.recipe, overrides)
    if arguments.json is not None:
        _look_at_target("--json", arguments.json)
    from stretto.check import check

    check(config, arguments.json)


def _load(recipe: Path, overrides: list[str]) -> "Config":
    """The recipe, and a look at its prompts: their faults are told in a moment, before torch is imported."""
    from stretto.prompts import read_prompts
    from stretto.recipe import load_recipe

    config = load_recipe(recipe, overrides)
    if config.prompts.file:
        read_prompts(Path(config.prompts.file))
    return config


def _look_at_target(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work that it is to tell of."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: the folder {path.parent} cannot be written to; name another")


def _sample(arguments: argparse.Namespace) -> None:
    if not arguments.source.exists():
        raise ValueError(f"{arguments.source}: there is no such run folder or recipe")
    from stretto.sample import sample

    sample(
        arguments.source,
        prompts=arguments.prompt,
        num_samples=arguments.samples,
        num_steps=arguments.steps,
        seed=arguments.seed,
        out=arguments.out,
        weights=arguments.weights,
        which=arguments.checkpoint,
    )


def _env(arguments: argparse.Namespace) -> None:
    from stretto.record.environment import as_json, as_text, environment

    report = environment()
    with naming(Path("stdout")):
        print(as_json(report) if arguments.json else as_text(report), end="")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words for argparse, and the overrides: each `--section.field` with the words up to the next option."""
    plain: list[str] = []
    overrides: list[str] = []
    target = plain
    for word in words:
        if word.startswith("--"):
            target = overrides if "." in word.partition("=")[0] else plain
        target.append(word)
    return plain, overrides


class _Parser(argparse.ArgumentParser):
    """argparse with our way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.prog} --help shows what there is")


class _SettingsHelp(argparse.Action):
    """`--help` of a verb that takes settings: the usage, then every setting."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from stretto.recipe import settings_help

        parser.print_help()
        print(f"\n{settings_help()}", end="")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stretto", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)

    train = verbs.add_parser("train", help="train a recipe", epilog=_OVERRIDES, add_help=False, allow_abbrev=False)
    train.add_argument("-h", "--help", nargs=0, action=_SettingsHelp, help="show this and every setting")
    train.add_argument("recipe", type=Path, metavar="RECIPE.toml", help="comes first, before any option")
    train.add_argument("--resume", choices=["no", "auto"], help="auto goes on from the newest checkpoint")

    sample = verbs.add_parser("sample", help="draw pictures from a run or a recipe", allow_abbrev=False)
    sample.add_argument("source", type=Path, metavar="RUN_FOLDER_OR_RECIPE", help="a recipe stands for its run")
    sample.add_argument("--prompt", action="append", metavar="TEXT", help="again for more; default: the run's")
    sample.add_argument("--samples", type=_count, default=0, metavar="N", help="pictures a prompt")
    sample.add_argument("--steps", type=_count, default=0, metavar="N", help="steps of the ODE")
    sample.add_argument("--seed", type=int, metavar="N", help="default: the run's")
    sample.add_argument("--out", type=Path, metavar="FOLDER", help="default: a new one in the run's samples/")
    sample.add_argument("--weights", choices=["ema", "live", "base"], help="default: ema where there is one")
    sample.add_argument("--checkpoint", metavar="WHICH", help="newest (default), best or an iteration")

    check = verbs.add_parser(
        "check",
        help="compare every schedule's gradient with native's on this machine",
        epilog=_OVERRIDES,
        allow_abbrev=False,
    )
    check.add_argument("recipe", type=Path, metavar="RECIPE.toml", help="comes first, before any option")
    check.add_argument("--json", type=Path, metavar="FILE", help="also write the table here")

    env = verbs.add_parser("env", help="show versions and devices, for bug reports", allow_abbrev=False)
    env.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a count of at least 1")
    return int(word)


def _exit_code(error: BaseException) -> int:
    """Say what went wrong and return the exit code for it; raise what is not the user's."""
    if os.environ.get("STRETTO_TRACEBACK"):
        traceback.print_exception(error)
    _give_up_failing_stdout()
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone (`stretto env | head -1`)
        return 128 + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        number = signal.Signals(getattr(error, "signal_number", signal.SIGINT))
        _tell("; ".join([f"stretto: stopped by {number.name}", *getattr(error, "__notes__", [])]))
        return 128 + number
    if isinstance(error, ImportError):
        text = _missing_extra(error)
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        text = f"{where}{error.strerror or error}"
    else:
        text = str(error)
    _tell(f"stretto: error: {text}")
    return 2


def _tell(text: str) -> None:
    """A line on stderr, in one write, or lines of several ranks mix; nobody can be told that it fails."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _give_up_failing_stdout() -> None:
    """Where stdout takes no more (full, or its reader gone) it loses the rest, or Python would fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_TRAIN_EXTRA = {"PIL", "accelerate", "diffusers", "ftfy", "peft", "safetensors", "sklearn", "tqdm", "transformers"}


def _missing_extra(error: ImportError) -> str:
    """The pip line for a package of an extra; an import that fails for another reason is not the user's."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _TRAIN_EXTRA:
        raise error
    return f'{package} is not installed: pip install "stretto[train]"'
