"""`python -m honed.tuner.service`, as `honed-tuner`."""

import sys

from .main import main

sys.exit(main())
