"""`python -m paramserver` is the `paramserver` command."""

from paramserver.cli import main

main()
