"""``python -m tileattn``."""

import sys

from tileattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
