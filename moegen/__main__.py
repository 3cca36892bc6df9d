"""``python -m moegen``: the command line where no script is installed."""

from moegen.cli import main

main()
