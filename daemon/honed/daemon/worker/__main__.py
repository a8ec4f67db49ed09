"""Run a worker: python -m honed.daemon.worker, as the service starts it."""

import sys

from .worker import main

main(sys.argv[1:])
