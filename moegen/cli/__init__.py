"""The command line: a thin caller of the Python API.

Results and ``--json`` go to stdout, progress to stderr. Exit codes: 0 done, 1 a fault of the
machine, 2 wrong usage or input, 3 infeasible, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from moegen.errors import Infeasible, InvalidInput, MoegenError

# Of a path that somebody gave: it is too long, loops, or leads where one may not go.
_OF_PATHS = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR}
_OF_STDOUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``moegen`` command; always leaves through ``SystemExit``."""
    try:
        code = _exit_code(argv)
        sys.stdout.flush()  # here, where a full disk can still be told
    except KeyboardInterrupt:
        print("moegen: stopped.", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # who read it has seen enough
        _discard_stdout()
        code = 1
    except OSError as error:
        if error.errno in _OF_PATHS and error.filename is not None:
            print(f"moegen: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(InvalidInput.exit_code)
        if error.errno not in _OF_STDOUT or error.filename is not None:
            raise  # a bug: nobody foresaw it
        print(f"moegen: cannot write the result: {error.strerror or error}", file=sys.stderr)
        _discard_stdout()
        code = 1
    sys.exit(code)


def _exit_code(argv: Sequence[str] | None) -> int | str | None:
    try:
        from moegen.cli.app import app  # takes a second, in which Ctrl-C may come

        app(args=None if argv is None else list(argv), prog_name="moegen")
    except SystemExit as done:
        return done.code
    except Infeasible as error:
        from moegen.cli.groups import with_flags

        print(f"moegen: {with_flags(str(error))}", file=sys.stderr)
        return error.exit_code
    except MoegenError as error:
        print(f"moegen: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _discard_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter would fail on it when it ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
