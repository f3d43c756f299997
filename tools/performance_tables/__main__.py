"""``python -m tools.performance_tables``."""

import sys

from tools.performance_tables import main

sys.exit(main())
