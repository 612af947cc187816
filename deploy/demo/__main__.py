"""`python -m deploy.demo`."""

from deploy.demo.cli import main

main()
