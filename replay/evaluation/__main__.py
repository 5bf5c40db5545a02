"""`python -m replay.evaluation`."""

import sys

from replay.evaluation.studies import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
