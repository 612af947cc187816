"""`python -m agents_env` is the command `agents-env`."""

from agents_env.entry import main

main()
