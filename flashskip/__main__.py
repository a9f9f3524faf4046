"""``python -m flashskip``: see `flashskip.cli`."""

import sys

from .cli import main

sys.exit(main())
