"""`python -m solera.cli`."""

import sys

from solera.cli import main

sys.exit(main())
