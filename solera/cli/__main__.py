"""`python -m solera.cli`."""

import sys

from solera.cli import command

sys.exit(command())
