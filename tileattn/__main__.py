"""``python -m tileattn``."""

import sys

from tileattn.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
