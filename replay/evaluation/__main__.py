"""`python -m replay.evaluation`."""

import sys

from replay.evaluation.redo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
