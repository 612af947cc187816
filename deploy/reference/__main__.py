"""`python -m deploy.reference [--check]`."""

from __future__ import annotations

import sys

from deploy.reference.pages import main

raise SystemExit(main(sys.argv[1:]))
