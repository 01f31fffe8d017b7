"""`python -m tailrace`: the same as `tailrace`."""

import sys

from tailrace.app.cli import run

sys.exit(run())
