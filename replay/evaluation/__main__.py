"""`python -m unicrond.replay.evaluation`."""

import sys

from unicrond.replay.evaluation.studies.redo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
